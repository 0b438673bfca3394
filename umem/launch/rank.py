"""A rank's own process under `umem run -n`: it reports errors, and leaves without MPI_Finalize."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Any

from umem._common.printable import short
from umem.errors import OutOfMemoryError
from umem.launch.mpi import first_line
from umem.launch.watcher import RANK, say

CLEAN_UP_SECONDS = 2.0
"""A failing rank has this long for its own clean-up."""
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables in which Open MPI and MPICH give the number of ranks on a machine."""
_LARGEST_STATUS = 2**63 - 1
_LONGEST = 1000


class Rank:
    """This process as one of several ranks; created once, before the script runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._process = os.getpid()
        self._stderr = os.fstat(2)
        self._status = 0
        atexit.register(self._leave_if_failed)  # runs after the script's own, before MPI_Finalize
        threading.excepthook = self._thread_failed
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def raised(self, error: BaseException, thread: str | None = None) -> None:
        """Report an uncaught exception; the rank has two seconds left to clean up."""
        where = f" in the thread {short(thread)}" if thread else ""
        self._say(f"raised {describe(error)}{where}")
        self._fail(1)

    def over(self, code: object) -> None:
        """Report the script's end, with the argument of `sys.exit`.

        A child of the script by fork ends here: it must not finalise MPI, which is its parent's.
        """
        status = 0 if code is None else code if isinstance(code, int) else 1
        status = status & 255 if abs(status) <= _LARGEST_STATUS else 255  # as Python does
        if os.getpid() != self._process:
            _leave(status)
        if status:
            self._fail(status)
        else:
            self._say("is over")

    def _fail(self, status: int) -> None:
        """End this process with a status: after its clean-up, or in two seconds."""
        if os.getpid() == self._process:
            self._status = self._status or status
            timer = threading.Timer(CLEAN_UP_SECONDS, os._exit, [self._status])
            timer.daemon = True
            timer.start()

    def _leave_if_failed(self) -> None:
        if self._status and os.getpid() == self._process:
            _leave(self._status)

    def _thread_failed(self, args: Any) -> None:
        threading.__excepthook__(args)
        if args.exc_type is not SystemExit:  # how a thread ends itself
            self.raised(args.exc_value or args.exc_type(), args.thread and args.thread.name)

    def _say(self, what: str) -> None:
        """Send a line to the launcher, unless the script has replaced standard error's file."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(2), self._stderr):
                say(str(self.number), what)


def _leave(status: int) -> None:
    """End this process without MPI_Finalize, which may wait for other ranks for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


def describe(error: BaseException) -> str:
    """Describe an exception in one line.

    >>> describe(ValueError("no such\nfile")), describe(MemoryError())
    ('ValueError: no such', 'MemoryError (out of memory)')
    """
    kind = type(error).__name__
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        kind += " (out of memory)"
    text = short(first_line(str(error)), _LONGEST)
    return f"{kind}: {text}" if text else kind


_here: Rank | None = None


def this_rank() -> Rank | None:
    """Return this process as a rank of `umem run -n`, or None if it is not one."""
    global _here
    number = os.environ.pop(RANK, None)
    if number is not None:
        _here = Rank(int(number))
    return _here


def local_count() -> int:
    """Return the number of ranks on this machine, ChainerMN's ``intra_size``; 1 outside of
    ranks.
    """
    if _here is None:
        return 1
    found = (os.environ.get(name, "") for name in _LOCAL)
    return next((int(text) for text in found if text.isdigit()), 1)
