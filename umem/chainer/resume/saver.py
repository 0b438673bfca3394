"""Saving of one run: it is copied while it waits, and written in the background."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from umem._common.files import reason
from umem._common.printable import quoted, short
from umem.chainer.resume.run_state import RunState
from umem.errors import FileError, SizeError, SnapshotWarning, StateError, warn_at_program
from umem.snapshots import (
    BackgroundWriter,
    Claim,
    FileOperations,
    SavedRun,
    check_room,
    needed_bytes,
    places_in,
    prune,
    read_newest,
    sweep,
    write_snapshot,
)


@dataclass(frozen=True)
class Resumed:
    """The result of resuming a run.

    Attributes:
        step: the updates that it had made; 0 if there was no snapshot.
        path: the snapshot; None if there was none.
        values: the plain values that were saved with it.
    """

    step: int = 0
    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class RunSaver:
    """Saves one run to a folder and resumes it; claims the folder until `close`.

    Thread-safety: none; it belongs to the training thread. Copies are written in the background.

    Args:
        folder: created with its parents if missing.
        keep: how many of the newest snapshots to keep.
        on_error: the reaction to one that cannot be written: "raise", or "warn" and continue.
        operations: the disk.

    Raises:
        StateError: another run writes to the folder. FileError: it cannot be created or written.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        on_error: str = "raise",
        operations: FileOperations | None = None,
    ) -> None:
        check_options(keep, on_error)
        self.folder, self.keep, self.on_error = folder, keep, on_error
        self._operations = FileOperations() if operations is None else operations
        self._writer = BackgroundWriter()
        self._last: int | None = None
        """The step at which the run was last saved or restored; None before."""
        self._claim: Claim | None = None
        self._take_folder()

    def _take_folder(self) -> None:
        """Claim the folder, and remove the remains of killed runs in it.

        Raises:
            StateError: another run writes to it.
            FileError: it cannot be written to.
        """
        try:
            self._make_folder(self.folder)
            self._claim = Claim(self.folder)
            sweep(self._operations, self.folder)
        except FileError:
            raise
        except OSError as error:
            raise FileError(
                f"no snapshots can be written to {short(self.folder)}: {reason(error)}; name "
                "another folder"
            ) from error

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if not folder.parent.exists():
            self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):  # another process was quicker
            self._operations.make_folder(folder)
        self._operations.synchronize_folder(folder.parent)

    def resume(self, state: RunState) -> Resumed:
        """Restore the run from the newest complete snapshot, if there is one, and report it.

        Raises:
            SnapshotError: the newest is of another model, or of a newer version of the format.
        """
        self.wait()
        snapshot, skipped = self._read_newest()
        for problem in skipped:
            instead = "the run begins anew" if snapshot is None else f"taking {snapshot.path.name}"
            warn_at_program(f"{problem}; {instead}", SnapshotWarning)
        if snapshot is None:
            self._last = 0
            return Resumed()
        try:
            values = state.restore(snapshot)
        finally:
            snapshot.close()
        self._last = snapshot.step
        self._print(f"umem: resumed from {short(snapshot.path)}")
        return Resumed(snapshot.step, snapshot.path, values)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr)

    def _read_newest(self) -> tuple[SavedRun | None, list[str]]:
        return read_newest(self._operations, self.folder)

    def save(self, step: int, state: RunState) -> None:
        """Copy the run and write the copy in the background; waits for the previous snapshot.

        Raises:
            FileError: the disk has no room, or the snapshot before could not be written; not if
                ``on_error`` is "warn".
            StateError: there is a later snapshot, from which this run was not resumed.
        """
        self.wait()
        collected = state.collect()
        try:
            check_room(self._operations, self.folder, needed_bytes(collected.arrays))
        except FileError as error:
            self._raise_or_warn(error)
            return
        self._expect_no_later(step)
        self._last = step
        self._writer.start(partial(self._write, step, collected.copies(), collected.values))

    def _expect_no_later(self, step: int) -> None:
        """Raise if the folder has a later snapshot, which a resumed run would use as its own."""
        if self._last is not None and step >= self._last:
            return  # a snapshot later than the restored one was not complete
        places = places_in(self._operations, self.folder)
        if places and places[-1][0] > step:
            raise StateError(
                f"step {step} cannot be saved: {short(self.folder)} has step {places[-1][0]} of a "
                "run from which this one was not resumed, and a resumed run would use that. "
                "Call resume_run before the loop, or name another folder to begin anew"
            )

    def _write(self, step: int, arrays: Any, values: Any) -> None:
        self._prune(write_snapshot(self._operations, self.folder, step, arrays, values))

    def _prune(self, path: Path) -> None:
        try:
            prune(self._operations, path, self.keep)
        except OSError as error:
            raise FileError(
                f"an old snapshot in {short(self.folder)} cannot be removed: {reason(error)}"
            ) from error

    def wait(self) -> None:
        """Wait until the last snapshot is on the disk.

        Raises:
            FileError: it could not be written; not if ``on_error`` is "warn".
        """
        try:
            self._writer.wait()
        except FileError as error:
            self._raise_or_warn(error)

    def close(self) -> None:
        """Wait as `wait` does, and release the folder.

        If another error is propagating already, a write error is only a warning.
        """
        if sys.exc_info()[0] is not None:
            self.on_error = "warn"
        try:
            self.wait()
        finally:
            if self._claim is not None:
                self._claim.close()

    def _raise_or_warn(self, error: FileError) -> None:
        if self.on_error == "raise":
            raise error
        warn_at_program(f"{error}; training continues", SnapshotWarning)


def check_options(keep: Any, on_error: Any) -> None:
    """Check the options of a saver.

    Raises:
        SizeError: one is invalid; the message lists the valid values.
    """
    if type(keep) is not int or keep < 1:
        raise SizeError(f"keep must be a whole number from 1 on, got {quoted(keep)}")
    if on_error not in ("raise", "warn"):
        raise SizeError(f'on_error must be "raise" or "warn", got {quoted(on_error)}')


def as_path(folder: Any) -> Path:
    """Return a folder as an absolute path, which stays valid if the program changes directory."""
    return Path(os.path.abspath(folder))
