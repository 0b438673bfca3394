"""A disk that records what is done to it, and what it may hold after the power went at any moment.

The model is the weakest that POSIX allows (Pillai et al., OSDI 2014): what was written to a file
since it was synchronised may be there whole, in part, as zeros, or not at all; names that were
made, changed or removed in a directory since it was synchronised may have reached the disk or not,
each on its own and in any order. A rename within a directory is one change of names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from umem.snapshots import FileOperations

Step = tuple[Any, ...]


class RecordingDisk(FileOperations):
    """A real disk that keeps a log of what is changed on it, below a folder.

    Attributes:
        log: the operations in order; ("done", n) is put in by whoever writes snapshots.
    """

    def __init__(self, root: Path) -> None:
        self.log: list[Step] = []
        self._root = root
        self._open: dict[int, str] = {}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(("make_folder", self._name(path)))

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._open[handle] = self._name(path)
        self.log.append(("create", self._name(path)))
        return handle

    def write(self, handle: int, data: memoryview) -> None:
        super().write(handle, data)
        self.log.append(("write", self._open[handle], bytes(data)))

    def synchronize(self, handle: int) -> None:
        super().synchronize(handle)
        self.log.append(("synchronize", self._open[handle]))

    def close(self, handle: int) -> None:
        super().close(handle)
        del self._open[handle]

    def synchronize_folder(self, path: Path) -> None:
        super().synchronize_folder(path)
        self.log.append(("synchronize_folder", self._name(path)))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.log.append(("rename", self._name(old), self._name(new)))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.log.append(("remove", self._name(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.log.append(("remove_folder", self._name(path)))


# -- what is on the disk -----------------------------------------------------------------------


@dataclass
class File:
    """A file: what is on the disk for sure, and all that was written."""

    durable: bytes = b""
    written: bytes = b""

    def contents(self) -> list[bytes]:
        """What it may hold after the power went, what is likeliest first."""
        new = len(self.written) - len(self.durable)
        if not new:
            return [self.durable]
        zeros = self.durable + bytes(new)
        part = self.written[: len(self.durable) + new // 2]
        return [self.durable, self.written, zeros, part]


@dataclass
class Folder:
    """A folder: the names that are on the disk for sure, and the changes since."""

    durable: dict[str, Any] = field(default_factory=dict)
    changes: list[tuple[tuple[str, Any], ...]] = field(default_factory=list)

    def names(self, chosen: Any = None) -> dict[str, Any]:
        """The names after some of the changes, all by default."""
        found = dict(self.durable)
        for number, change in enumerate(self.changes):
            if chosen is None or number in chosen:
                for name, item in change:
                    found.pop(name, None) if item is None else found.update({name: item})
        return found


def after(log: list[Step]) -> Folder:
    """Return the root folder after some operations."""
    root = Folder()
    for operation, *names in log:
        if operation == "done":
            continue
        if operation in ("write", "synchronize", "synchronize_folder"):
            item = _find(root, names[0])
            _do(operation, item, *names[1:])
            continue
        parent, name = _split(root, names[0])
        made = {"make_folder": Folder, "create": File}.get(operation)
        if made is not None:
            parent.changes.append(((name, made()),))
        elif operation == "rename":
            moved = parent.names()[name]
            parent.changes.append(((name, None), (_split(root, names[1])[1], moved)))
        else:
            parent.changes.append(((name, None),))
    return root


def _do(operation: str, item: Any, data: bytes = b"") -> None:
    if operation == "write":
        item.written += data
    elif operation == "synchronize":
        item.durable = item.written
    else:
        item.durable, item.changes = item.names(), []


def _find(root: Folder, name: str) -> Any:
    found: Any = root
    for part in Path(name).parts:
        found = found.names()[part]
    return found


def _split(root: Folder, name: str) -> tuple[Folder, str]:
    path = Path(name)
    return _find(root, str(path.parent)), path.name


# -- what may be left --------------------------------------------------------------------------


def crashes(root: Folder, seed: int, draws: int) -> Iterator[Any]:
    """Yield trees that a disk may hold: nested dictionaries of names, and bytes.

    Nothing of what was not synchronised, all of it, each change of names alone and each left out,
    and so many at random.
    """
    random_ = random.Random(seed)
    changes = sum(len(folder.changes) for folder in _folders(root))
    everything = set(range(changes))
    chosen = [
        set(),
        everything,
        *({n} for n in everything),
        *(everything - {n} for n in everything),
    ]
    chosen += [{n for n in everything if random_.random() < 0.5} for _ in range(draws)]
    for number, keep in enumerate(chosen):
        plain = number if number < 2 else None  # nothing of the files, or all; then at random
        yield _tree(root, _by_folder(root, keep), lambda file, p=plain: _content(file, p, random_))


def _content(file: File, plain: int | None, random_: random.Random) -> bytes:
    contents = file.contents()
    return random_.choice(contents) if plain is None else contents[min(plain, len(contents) - 1)]


def _folders(root: Folder) -> list[Folder]:
    """Every folder that is or was below one, each once."""
    found, todo = [], [root]
    while todo:
        folder = todo.pop()
        if not any(folder is other for other in found):
            found.append(folder)
            items = [*folder.durable.values()]
            items += [item for change in folder.changes for _, item in change]
            todo += [item for item in items if isinstance(item, Folder)]
    return found


def _by_folder(root: Folder, keep: set[int]) -> dict[int, set[int]]:
    """Share numbers of changes among the folders."""
    numbers = count()
    return {
        id(folder): {n for n, _ in enumerate(folder.changes) if next(numbers) in keep}
        for folder in _folders(root)
    }


def _tree(folder: Folder, kept: dict[int, set[int]], content: Any) -> Any:
    return {
        name: _tree(item, kept, content) if isinstance(item, Folder) else content(item)
        for name, item in folder.names(kept[id(folder)]).items()
    }


def lay_out(tree: Any, folder: Path) -> None:
    """Write such a tree to a real disk."""
    folder.mkdir()
    for name, item in tree.items():
        if isinstance(item, dict):
            lay_out(item, folder / name)
        else:
            (folder / name).write_bytes(item)
