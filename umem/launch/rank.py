"""A rank's own process under `umem run -n`: it reports errors, and leaves without MPI_Finalize."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from umem._common.printable import short
from umem.errors import OutOfMemoryError
from umem.launch.mpi import first_line

MARK = "\x1eumem: "
"""Prefix of a line on a rank's standard error that is for the launcher, which does not print it:
the rank's error, or nothing once its script is over."""
UNDER_UMEM = "UMEM_LAUNCH_RANK"
"""Variable that tells a rank that `umem run -n` has started it; removed before the script runs."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables in which Open MPI and MPICH give a rank's number."""
INTERRUPT = signal.SIGUSR1
"""Signal that interrupts the ranks as Ctrl-C does a single process: mpiexec forwards it, but not
SIGINT."""
INTERRUPT_SECONDS = 2.0
"""Interrupted ranks have this long for their clean-up before mpiexec ends them. A choice: no
measurement supports it."""
DEATH_SIGNAL = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
CLEAN_UP_SECONDS = 2.0
"""A failing rank has this long for its own clean-up. A choice: no measurement supports it."""
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables in which Open MPI and MPICH give the number of ranks on a machine."""
_LARGEST_STATUS = 2**63 - 1
_LONGEST = 1000
"""An error's text of more characters is shortened. A choice: no measurement supports it."""


class Rank:
    """This process as one of several ranks; created once, before the script runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._process = os.getpid()
        self._stderr = os.fstat(2)
        self._status = 0
        self._stays_until = 0.0
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # without mpiexec, no rank
        signal.signal(INTERRUPT, self._interrupt)
        atexit.register(self._leave_if_failed)  # runs after the script's own, before MPI_Finalize
        threading.excepthook = self._thread_failed
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def raised(self, error: BaseException, thread: str | None = None) -> None:
        """Report an uncaught exception; the rank has two seconds left to clean up."""
        where = f" in the thread {short(thread)}" if thread else ""
        self._tell_launcher(f"on {socket.gethostname()} raised {describe(error)}{where}")
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
            self._tell_launcher("")

    def _interrupt(self, *_: object) -> NoReturn:
        """Raise KeyboardInterrupt, and stay until others have cleaned up.

        mpiexec ends all ranks as soon as one has ended.
        """
        self._stays_until = time.monotonic() + INTERRUPT_SECONDS
        raise KeyboardInterrupt

    def _fail(self, status: int) -> None:
        """End this process with a status: after its clean-up, or in two seconds."""
        if os.getpid() == self._process:
            self._status = self._status or status
            timer = threading.Timer(CLEAN_UP_SECONDS, os._exit, [self._status])
            timer.daemon = True
            timer.start()

    def _leave_if_failed(self) -> None:
        if self._status and os.getpid() == self._process:
            time.sleep(max(0.0, self._stays_until - time.monotonic()))
            _leave(self._status)

    def _thread_failed(self, args: Any) -> None:
        threading.__excepthook__(args)
        if args.exc_type is not SystemExit:  # how a thread ends itself
            self.raised(args.exc_value or args.exc_type(), args.thread and args.thread.name)

    def _tell_launcher(self, what: str) -> None:
        """Send a line to the launcher, unless the script has replaced standard error's file."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(2), self._stderr):
                os.write(2, f"{MARK}{what}\n".encode("utf-8", "backslashreplace"))


def _leave(status: int) -> None:
    """End this process without MPI_Finalize, which may wait for other ranks for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


def describe(error: BaseException) -> str:
    """Describe an exception in one line.

    >>> describe(ValueError("no such\\nfile")), describe(MemoryError())
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
    if os.environ.pop(UNDER_UMEM, None) is not None:
        _here = Rank(int(next(os.environ[name] for name in RANKS if name in os.environ)))
    return _here


def local_count() -> int:
    """Return the number of ranks on this machine, ChainerMN's ``intra_size``; 1 outside of
    ranks.
    """
    if _here is None:
        return 1
    found = (os.environ.get(name, "") for name in _LOCAL)
    return next((int(text) for text in found if text.isdigit()), 1)
