"""An exclusive claim on a folder: only one run at a time writes to it."""

from __future__ import annotations

import os
from pathlib import Path

from umem._common.printable import short
from umem.errors import StateError

NAME = "run.lock"
_held: dict[tuple[int, str], int] = {}
"""The lock's file handle for each folder that this process has claimed."""


class Claim:
    """An exclusive claim on a folder, held until `close` or the end of the process.

    The lock belongs to the process (POSIX ``fcntl``): forked children do not hold it, and the
    system releases it when the process dies. On systems without such locks there is none.

    Raises:
        StateError: another run has claimed the folder; nothing was changed. OSError: it cannot be
            locked.
    """

    def __init__(self, folder: Path) -> None:
        self._key = os.getpid(), os.path.realpath(folder)
        if self._key in _held:
            raise StateError(_taken(folder, "another run of this process"))
        _held[self._key] = -1  # no second handle: closing it would release the lock
        try:
            _held[self._key] = _locked(folder)
        except BaseException:
            del _held[self._key]
            raise

    def close(self) -> None:
        """Release the folder; calling it again does nothing."""
        handle = _held.pop(self._key, -1) if self._key[0] == os.getpid() else -1
        if handle >= 0:
            os.close(handle)


def _locked(folder: Path) -> int:
    """Lock a folder's claim file, and write this process's id into it.

    Returns the open file's descriptor; -1 on Windows, without a lock.

    Raises:
        StateError: another process holds the lock; the message names it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return -1
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(folder / NAME, flags, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
        os.close(handle)
        who = f"the run of process {holder}" if holder.isdigit() else "another run"
        raise StateError(_taken(folder, who)) from None
    except BaseException:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _taken(folder: Path, who: str) -> str:
    return f"{who} writes its snapshots to {short(folder)}: end it, or give each run its own folder"
