"""The face of a room: the names that other rooms may import, loaded when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def face(room: str, **places: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's ``__all__`` and its ``__getattr__``, which loads a name's module.

    A package says its face twice: so, and under TYPE_CHECKING for those who check types;
    tests/house/test_layers.py holds the two equal.

    Args:
        room: the package.
        places: the names of each of its modules, with spaces between; "__" in a module's name is a
            dot.
    """
    module_of = {
        name: f"{room}.{module.replace('__', '.')}"
        for module, names in places.items()
        for name in names.split()
    }

    def load(name: str) -> Any:
        """Load the module that has a name of the face.

        Raises:
            AttributeError: the face has no such name.
        """
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)  # tests may replace it there

    return sorted(module_of), load
