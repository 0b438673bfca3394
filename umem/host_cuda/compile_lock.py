"""Lets one process compile a file for all, with a lock file beside it.

The lock belongs to an open file, so the kernel releases it whenever its process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".lock"
WAIT_SECONDS = 60.0
"""A process waits this long for another one's compiler, then compiles itself (a guess)."""
_PAUSE_SECONDS = 0.005, 0.05
"""Polling interval, at first and at most (guesses)."""


@contextmanager
def only_maker(made: Path) -> Iterator[bool]:
    """Lock a file to be compiled; yields False if it exists by then.

    Threads exclude one another, as processes do. If the folder does not support locks, each
    compiles the file.
    """
    lock = made.with_name(made.name + SUFFIX)
    number = _wait(made, lock)
    try:
        yield not made.exists()
    finally:
        if number is not None:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)  # while it is held: whoever has it open looks again
                fcntl.flock(number, fcntl.LOCK_UN)  # a forked child may have it open, too
            os.close(number)


def _wait(made: Path, lock: Path) -> int | None:
    """Wait for the lock and return it; None if the file exists, or there are no locks."""
    pause, longest = _PAUSE_SECONDS
    end = time.monotonic() + WAIT_SECONDS
    while not made.exists() and time.monotonic() < end:
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # no room, gone, or not to be written
            return None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(number).st_nlink:
                return number
        except BlockingIOError:
            pass
        except OSError:  # a drive without locks
            os.close(number)
            lock.unlink(missing_ok=True)
            return None
        os.close(number)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return None
