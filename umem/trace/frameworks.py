"""Supported frameworks: a row for each of umem's folders, and a record once it is imported.

General code uses this table; only its own folder knows a framework's internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from umem.trace.recording.sources import Source, add_source, remove_source


class Folder(NamedTuple):
    """A framework that a folder of umem supports.

    Args:
        name: the framework's name in messages.
        package: its top-level package.
        module: the folder's module, which registers the framework when it is imported.
        pool_name: a name in the package that is bound to CuPy's default pool at its import.
    """

    name: str
    package: str
    module: str
    pool_name: str


DATA_CACHE = "data cache"
"""Key of a trace's notes for the report of data caches."""
FOLDERS = [Folder("Chainer", "chainer", "umem.chainer", "chainer.backends.cuda.memory_pool")]


@dataclass(frozen=True)
class Framework:
    """The interface of a framework to the rest of umem.

    Args:
        name: the framework's name in messages.
        source: reports its operations to recorders.
        parts: returns the arrays, or containers of them, in one of its objects; None for an object
            of another library. Raises HintError if the object cannot have arrays yet.
        notes: returns sentences on the run so far, by subject, such as `DATA_CACHE`, for traces and
            `umem.status`.
    """

    name: str
    source: Source
    parts: Callable[[Any], Iterable[Any] | None]
    notes: Callable[[], Mapping[str, str]] = dict


_registered: list[Framework] = []


def register(framework: Framework) -> Callable[[], None]:
    """Register a framework; returns the function that unregisters it."""
    _registered.append(framework)
    add_source(framework.source)

    def forget() -> None:
        remove_source(framework.source)
        _registered.remove(framework)

    return forget


def names() -> str:
    """Name all frameworks: those with a folder, and those registered."""
    found = [folder.name for folder in FOLDERS] + [framework.name for framework in _registered]
    return " or ".join(dict.fromkeys(found))


def framework_notes() -> dict[str, str]:
    """Return the frameworks' sentences on the run so far, by subject; may be empty."""
    return {name: text for framework in _registered for name, text in framework.notes().items()}


def parts_of(x: Any) -> Iterable[Any] | None:
    """Return the arrays or containers in a framework's object; None if no framework knows it.

    Imports the folder of the object's framework if the program has not imported it.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(x).__mro__}
    for folder in FOLDERS:
        if folder.package in packages:
            import_module(folder.module)
    for framework in _registered:
        parts = framework.parts(x)
        if parts is not None:
            return parts
    return None
