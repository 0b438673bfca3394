"""Frameworks whose programs umem follows: a row for each of umem's folders, a record once it is in.

General code asks here; a framework's internals are known to its folder only.
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
        name: as people know it.
        package: its top package.
        module: the folder, which registers the framework when it is imported.
        pool_name: a name in it that is bound to CuPy's default pool, once, at its import.
    """

    name: str
    package: str
    module: str
    pool_name: str


DATA_CACHE = "data cache"
"""Key of a trace's notes under which caches of data report."""
FOLDERS = [Folder("Chainer", "chainer", "umem.chainer", "chainer.backends.cuda.memory_pool")]


@dataclass(frozen=True)
class Framework:
    """The interface of a framework to the rest of umem.

    Args:
        name: as people know it.
        source: reports its operations to recorders.
        parts: the arrays, or other containers of them, in one of its objects; None where the
            object is none of its own. Raises HintError where it cannot have any yet.
        told: sentences on what else the run has done so far, by what they are about, such as
            `DATA_CACHE`: for traces and `umem.status`.
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
    """Return what frameworks report about the run beside its steps; may be empty."""
    return {name: text for framework in _registered for name, text in framework.notes().items()}


def parts_of(x: Any) -> Iterable[Any] | None:
    """Return the arrays or containers in a framework's object; None if no framework knows it.

    The folder of an object's framework is imported here, where a program has not done it.
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
