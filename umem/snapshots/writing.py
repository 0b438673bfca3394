"""Writes a snapshot completely or not at all, and removes old ones.

The order follows crash-consistent updates (Pillai et al., "All File Systems Are Not Created Equal",
OSDI 2014): content, then the names in the directory, then its own name, then its folder, each
synchronised before the next. Older snapshots are removed only after that.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from umem._common.checksums import FileSum, Summing
from umem._common.files import reason
from umem._common.printable import short
from umem._common.safetensors_file import Arrays, pieces, size_of
from umem.errors import FileError
from umem.snapshots.manifest import (
    MANIFEST,
    Manifest,
    arrays_name,
    folder_name,
    is_of_snapshot,
    place_of,
    values_name,
)
from umem.snapshots.operations import FileOperations
from umem.units import format_bytes

_TEMPORARY = re.compile(r"\.umem-[0-9a-f]{16}\.tmp")
_ROOM = 1 << 16
"""Bytes added for the manifest, the directory, and rounding by the file system: a guess."""


def write_snapshot(
    operations: FileOperations, folder: Path, step: int, arrays: Arrays, values: Mapping[str, Any]
) -> Path:
    """Write the snapshot of a step; existing snapshots do not change.

    Args:
        folder: the existing folder of the snapshots.
        arrays: C-contiguous arrays by name; they must not change meanwhile.
        values: JSON values.

    Returns:
        its directory.

    Raises:
        FileError: it cannot be written; the message has the bytes needed and free. Its files are
            removed as far as possible.
    """
    temporary = new_directory(operations, folder)
    try:
        return publish(
            operations, temporary, step, write_part(operations, temporary, arrays, values)
        )
    finally:
        remove_left(operations, temporary)


def new_directory(operations: FileOperations, folder: Path) -> Path:
    """Make the temporary directory of a snapshot, with a name that `sweep` recognises.

    Raises:
        FileError: the directory cannot be made.
    """
    directory = _temporary(folder)
    with _naming_room(operations, folder, _ROOM):
        operations.make_folder(directory)
    return directory


def write_part(
    operations: FileOperations,
    directory: Path,
    arrays: Arrays,
    values: Mapping[str, Any],
    rank: int = 0,
) -> dict[str, FileSum]:
    """Write and flush one rank's files; returns their checksums.

    Raises:
        FileError: they cannot be written; the message has the bytes needed and free.
    """
    text = json.dumps(values, separators=(",", ":")).encode()
    with _naming_room(operations, directory.parent, needed_bytes(arrays) + len(text)):
        written = {arrays_name(rank): pieces(arrays), values_name(rank): [memoryview(text)]}
        return {name: _write_file(operations, directory / name, c) for name, c in written.items()}


def publish(
    operations: FileOperations, directory: Path, step: int, files: dict[str, FileSum]
) -> Path:
    """Add the manifest to a directory that all ranks have written, and rename it to a snapshot.

    Returns its path.

    Raises:
        FileError: the manifest cannot be written, or the directory renamed; there is no snapshot.
    """
    with _naming_room(operations, directory.parent, _ROOM):
        manifest = Manifest(step, files, ranks=len(files) // 2).to_json()
        _write_file(operations, directory / MANIFEST, [memoryview(manifest)])
        operations.synchronize_folder(directory)
        return _name(operations, directory, directory.parent, step)


def remove_left(operations: FileOperations, directory: Path) -> None:
    """Remove an unpublished directory as far as possible; ignores errors."""
    with contextlib.suppress(OSError):
        _remove(operations, directory)


@contextlib.contextmanager
def _naming_room(operations: FileOperations, folder: Path, needed: int) -> Iterator[None]:
    """Add the needed and free bytes to disk errors."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise _cannot_write(operations, folder, needed, error) from error


def needed_bytes(arrays: Arrays) -> int:
    """Return the bytes of a snapshot of some arrays, without its other values."""
    return size_of(arrays) + _ROOM


def check_room(operations: FileOperations, folder: Path, needed: int) -> None:
    """Check that the folder exists and has room, before a snapshot is written.

    Raises:
        FileError: it does not; the message has the bytes needed and free.
    """
    try:
        operations.names(folder)
        free = operations.free_bytes(folder)
    except OSError as error:
        raise _cannot_write(operations, folder, needed, error) from error
    if free < needed:
        raise FileError(_message(folder, needed, free, "the disk is full"))


def _cannot_write(
    operations: FileOperations, folder: Path, needed: int, error: OSError
) -> FileError:
    free: int | None = None
    with contextlib.suppress(OSError):
        free = operations.free_bytes(folder)
    return FileError(_message(folder, needed, free, reason(error)))


def _message(folder: Path, needed: int, free: int | None, why: str) -> str:
    room = "free space unknown" if free is None else f"{format_bytes(free)} free"
    return (
        f"a snapshot cannot be written to {short(folder)}: {why}; it needs "
        f"{format_bytes(needed)}, {room}. Free space, keep fewer snapshots, or name another "
        "folder; existing snapshots are intact"
    )


# -- the directory -----------------------------------------------------------------------------


def _temporary(folder: Path) -> Path:
    return folder / f".umem-{secrets.token_hex(8)}.tmp"


def _write_file(operations: FileOperations, path: Path, content: Iterable[memoryview]) -> FileSum:
    """Write and flush one file in pieces; returns its checksum."""
    summing = Summing()
    handle = operations.create(path)
    try:
        for piece in content:
            operations.write(handle, piece)
            summing.add(piece)
        operations.synchronize(handle)
    finally:
        operations.close(handle)
    return summing.result()


def _name(operations: FileOperations, temporary: Path, folder: Path, step: int) -> Path:
    """Rename a complete directory to an unused name."""
    names = set(operations.names(folder))
    every = (folder_name((step, again)) for again in count())
    path = next(folder / name for name in every if name not in names)
    operations.rename(temporary, path)
    operations.synchronize_folder(folder)
    return path


# -- old ones ----------------------------------------------------------------------------------


def prune(operations: FileOperations, newest: Path, keep: int) -> None:
    """Remove the oldest snapshots, and keep ``keep``, including the given one.

    Directories with files that do not belong to a snapshot stay.

    Raises:
        OSError: one cannot be removed; `sweep` removes its renamed directory later.
    """
    folder, last = newest.parent, place_of(newest.name)
    assert last is not None
    places = (place_of(name) for name in operations.names(folder))
    older = sorted(place for place in places if place is not None and place < last)
    for place in older[: max(0, len(older) - (keep - 1))]:
        path = folder / folder_name(place)
        if _is_ours(operations, path):
            aside = _temporary(folder)
            operations.rename(path, aside)  # first, so that its name is never half a snapshot's
            _remove(operations, aside)


def sweep(operations: FileOperations, folder: Path) -> None:
    """Remove directories that killed runs have left half written or half removed."""
    for name in operations.names(folder):
        if _TEMPORARY.fullmatch(name):
            with contextlib.suppress(OSError):
                _remove(operations, folder / name)


def _is_ours(operations: FileOperations, path: Path) -> bool:
    """Tell whether a directory has only a snapshot's files."""
    try:
        return not path.is_symlink() and all(map(is_of_snapshot, operations.names(path)))
    except OSError:
        return False


def _remove(operations: FileOperations, directory: Path) -> None:
    """Remove a snapshot's directory if it exists, manifest first, so that nobody reads the rest."""
    if not _is_ours(operations, directory):
        return
    for name in sorted(operations.names(directory), key=MANIFEST.__ne__):
        operations.remove(directory / name)
    operations.remove_folder(directory)
