"""The face of a room: the names that other rooms may import, loaded on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def face(room: str, packages: str = "", **places: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's ``__all__`` and its ``__getattr__``, which loads a name's module.

    A package lists its face a second time, under TYPE_CHECKING, for type checkers;
    tests/house/test_layers.py checks that the two are equal.

    Args:
        room: the package.
        packages: packages inside of it, separated by spaces.
        places: the names of each of its modules, separated by spaces; "__" in a module's name
            stands for a dot.
    """
    module_of = {
        name: f"{room}.{module.replace('__', '.')}"
        for module, names in places.items()
        for name in names.split()
    }
    module_of |= dict.fromkeys(packages.split(), room)

    def load(name: str) -> Any:
        """Load the module that has a name of the face.

        Raises:
            AttributeError: the face has no such name.
        """
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if module_of[name] == room:  # a package inside
            return import_module(f"{room}.{name}")
        return getattr(import_module(module_of[name]), name)  # not stored: a test may replace it

    return sorted(module_of), load
