"""Snapshots that several ranks write together, and any number of ranks can resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from chainer.backends import cuda

from umem._common.checksums import FileSum, sum_of
from umem.chainer.agreement import Result, on_all
from umem.chainer.parallel.shard_exchange import mpi_of
from umem.chainer.resume.collecting import Collector
from umem.chainer.resume.run_state import RunState
from umem.chainer.resume.saver import RunSaver
from umem.errors import FileError
from umem.snapshots import (
    SPAN,
    FileOperations,
    SavedRun,
    TornError,
    check_room,
    folder_name,
    needed_bytes,
    new_directory,
    places_in,
    publish,
    read,
    remove_left,
    write_part,
)


class SaverOfRanks(RunSaver):
    """Saves one run of several ranks to one folder, each rank writing its part.

    A snapshot is complete or missing: the first rank gives it its name once all have written and
    synchronised their files. Arrays that a rank shares with the first one, such as weights, are
    written once; every rank writes its own shards of state, and none ever holds the whole.

    Every rank calls each method except `wait` and `close`, in the same order. A call returns once
    the snapshot is on the disk: nothing is written in the background, where MPI must not be called.

    Args:
        comm: a communicator of ChainerMN or of mpi4py.
        folder: one that all ranks see; the first one's path is used.

    Raises:
        As `RunSaver`, the same error on all ranks.
    """

    def __init__(
        self,
        comm: Any,
        folder: Path,
        keep: int = 3,
        on_error: str = "raise",
        operations: FileOperations | None = None,
    ) -> None:
        self._mpi = mpi_of(comm)
        self._rank = self._mpi.Get_rank()
        super().__init__(self._mpi.bcast(folder), keep, on_error, operations)

    def _take_folder(self) -> None:
        self._on_first(super()._take_folder)

    def _print(self, text: str) -> None:
        if self._rank == 0:
            super()._print(text)

    def _read_newest(self) -> tuple[SavedRun | None, list[str]]:
        """Read the newest complete snapshot; each rank verifies its share of the files.

        Returns:
            The snapshot, or None if there is no complete one; and for each newer one that was
            skipped, the reason.
        """
        places = self._on_first(lambda: places_in(self._operations, self.folder))
        skipped: list[str] = []
        for place in reversed(places):
            path = self.folder / folder_name(place)
            found = self._together(lambda path=path: self._read(path))  # type: ignore[misc]
            torn = [one for one in self._mpi.allgather(_wrong_with(found)) if one]
            if not torn:
                return found, skipped
            skipped += torn[:1]
        return None, skipped

    def _read(self, path: Path) -> Any:
        try:
            return read(self._operations, path, self._rank, self._mpi.Get_size())
        except TornError as error:
            return error

    def save(self, step: int, state: RunState) -> None:
        """Write the run, and wait until it is on the disk.

        Raises:
            FileError: the disk has no room, or it cannot be written; not if ``on_error`` is
                "warn". StateError: see `RunSaver.save`. The same error on all ranks.
        """
        collected = state.collect()
        arrays = self._own(collected)
        self._on_first(lambda: self._expect_no_later(step))
        try:
            needed = sum(self._mpi.allgather(needed_bytes(arrays)))
            self._on_first(lambda: check_room(self._operations, self.folder, needed))
            self._write_together(step, arrays, collected.values)
        except FileError as error:
            self._raise_or_warn(error)
        else:
            self._last = step

    def _write_together(self, step: int, arrays: Any, values: Any) -> None:
        """Write all ranks' parts, publish them as one snapshot, and remove snapshots beyond `keep`.

        A snapshot that could not be written is removed.

        Raises:
            FileError: a rank's part cannot be written, or an old snapshot cannot be removed; the
                same error on all ranks.
        """
        directory = self._on_first(lambda: new_directory(self._operations, self.folder))
        try:
            mine = self._together(
                lambda: write_part(self._operations, directory, arrays, values, self._rank)
            )
            files: dict[str, FileSum] = {}
            for theirs in self._mpi.allgather(mine):
                files |= theirs
            path = self._on_first(lambda: publish(self._operations, directory, step, files))
        finally:
            if self._rank == 0:
                remove_left(self._operations, directory)
        self._on_first(lambda: self._prune(path))

    def _own(self, collected: Collector) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays that this rank writes: shards, and those that differ from the first
        rank's.
        """
        sums = {name: sum_of(name, _on_host(array)) for name, array in collected.arrays.items()}
        of_first = self._mpi.bcast(sums)
        return {
            name: _on_host(array)
            for name, array in collected.arrays.items()
            if self._rank == 0
            or name + SPAN in collected.values
            or of_first.get(name) != sums[name]
        }

    def _on_first(self, work: Callable[[], Result]) -> Result:
        """Run an action on rank 0; every rank gets its result, or its error."""
        done = self._together(work if self._rank == 0 else lambda: None)
        result: Result = self._mpi.bcast(done if self._rank == 0 else None)
        return result

    def _together(self, work: Callable[[], Result]) -> Result:
        """Run an action on every rank; if one raises, every rank raises that error."""
        return on_all(self._mpi.allgather, work)


def _wrong_with(found: SavedRun | TornError) -> str:
    return str(found) if isinstance(found, TornError) else ""


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    array = cuda.to_cpu(array)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(array.shape)
