"""Finds the newest complete snapshot and reads it, after all checks."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from umem._common.checksums import FileSum, Summing
from umem._common.files import reason
from umem._common.printable import short
from umem._common.safetensors_file import SafetensorsFile
from umem.errors import FileError, SnapshotError, UmemError
from umem.snapshots.manifest import (
    LONGEST,
    MANIFEST,
    Manifest,
    NewerVersionError,
    Place,
    arrays_name,
    folder_name,
    place_of,
    values_name,
)
from umem.snapshots.operations import FileOperations
from umem.snapshots.shards import ArraysOfRanks

_PIECE = 4 << 20
"""Bytes read at once: enough for a disk, little compared with a run; a guess."""


class SavedRun:
    """An opened snapshot whose checksums were verified; `close` closes its file.

    Attributes:
        path: its directory.
        step: number of updates that the run had made.
        values: this rank's JSON values.
        arrays: the saved arrays, read one by one.
        ranks: number of ranks that have written it.
        readers: number of ranks that read it together.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        values: dict[str, Any],
        arrays: SafetensorsFile | ArraysOfRanks,
        ranks: int = 1,
        readers: int = 1,
    ) -> None:
        self.path, self.step, self.values, self.arrays = path, step, values, arrays
        self.ranks, self.readers = ranks, readers

    def close(self) -> None:
        """Close its file."""
        self.arrays.close()


def places_in(operations: FileOperations, folder: Path) -> list[Place]:
    """List the folders named like snapshots, complete or not, oldest first."""
    try:
        names = operations.names(folder)
    except FileNotFoundError:
        return []
    return sorted(place for name in names if (place := place_of(name)) is not None)


def read_newest(operations: FileOperations, folder: Path) -> tuple[SavedRun | None, list[str]]:
    """Read the complete snapshot with the highest step; file times do not matter.

    Returns:
        the snapshot, or None; and for each newer one a sentence on its defect.

    Raises:
        SnapshotError: the newest has a newer version of the format.
        FileError: the folder cannot be read.
    """
    skipped: list[str] = []
    try:
        places = places_in(operations, folder)
    except OSError as error:
        raise FileError(f"{short(folder)} cannot be read: {reason(error)}") from error
    for place in reversed(places):
        try:
            return read(operations, folder / folder_name(place)), skipped
        except TornError as error:
            skipped.append(str(error))
    return None, skipped


def read(operations: FileOperations, path: Path, rank: int = 0, count: int = 1) -> SavedRun:
    """Open one snapshot: verify this reader's share, and read the values of all ranks.

    Reads that share once, for its SHA-256. Arrays stay in their files until they are used.

    Args:
        rank: the reader, one of ``count``: each verifies its share of the files with arrays.

    Raises:
        TornError: it is incomplete, damaged or not umem's. SnapshotError: it has a newer version.
    """
    try:
        manifest = _manifest(operations, path)
        for writer in range(rank, manifest.ranks, count):
            _check(operations, path / arrays_name(writer), manifest.files[arrays_name(writer)])
        values = [_values(operations, path, manifest, each) for each in range(manifest.ranks)]
        arrays = [SafetensorsFile(path / arrays_name(writer)) for writer in range(manifest.ranks)]
    except NewerVersionError as error:
        raise NewerVersionError(f"{short(path)}: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise TornError(f"{short(path)} is not whole: files are missing") from None
    except UmemError:
        raise
    except Exception as error:  # after any error an older snapshot is tried
        raise TornError(f"{short(path)} is not whole: {reason(error)}") from error
    own = values[rank % manifest.ranks]
    if manifest.ranks == 1:
        return SavedRun(path, manifest.step, own, arrays[0], readers=count)
    try:
        of_ranks = ArraysOfRanks(arrays, values, rank)
    except Exception as error:  # invalid spans
        raise TornError(f"{short(path)} is not whole: {reason(error)}") from error
    return SavedRun(path, manifest.step, own, of_ranks, manifest.ranks, count)


def _values(
    operations: FileOperations, path: Path, manifest: Manifest, rank: int
) -> dict[str, Any]:
    name = values_name(rank)
    values = json.loads(_check(operations, path / name, manifest.files[name], content=True))
    if not isinstance(values, dict):
        raise ValueError(f"{name} is not a dictionary")
    return values


class TornError(SnapshotError):
    """The snapshot is incomplete, damaged or not umem's; nothing was loaded."""


def _manifest(operations: FileOperations, path: Path) -> Manifest:
    """Read a snapshot's manifest, and check that its step matches the folder's name.

    Raises:
        ValueError: the folder is a link, or the manifest is too long or for another step.
    """
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise ValueError("it is a link")
    with operations.open(path / MANIFEST) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise ValueError("its manifest is too long")
    manifest = Manifest.from_json(text)
    place = place_of(path.name)
    if place is None or manifest.step != place[0]:
        raise ValueError(f"its manifest is for step {manifest.step}")
    return manifest


def _check(
    operations: FileOperations, path: Path, wanted: FileSum, *, content: bool = False
) -> bytes:
    """Compare a file with its checksum; returns its content if ``content``."""
    summing, parts = Summing(), []
    with operations.open(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        while piece := file.read(_PIECE):
            summing.add(piece)
            parts += [piece] if content else []
    found = summing.result()
    if found.size_bytes != wanted.size_bytes:
        raise ValueError(f"{path.name} has {found.size_bytes:,} bytes of {wanted.size_bytes:,}")
    if found != wanted:
        raise ValueError(f"{path.name} has another SHA-256 than when it was written")
    return b"".join(parts)
