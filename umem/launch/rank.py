"""A rank's own process under `umem run -n`: it reports errors, and exits without MPI_Finalize."""

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
"""Prefix of a line on a rank's standard error that the launcher reads and does not print: the
rank's error, or an empty text when its script has ended."""
UNDER_UMEM = "UMEM_LAUNCH_RANK"
"""Variable that marks a rank that `umem run -n` has started; removed before the script runs."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables of Open MPI and MPICH with a rank's number."""
INTERRUPT = signal.SIGUSR1
"""Signal that interrupts the ranks like Ctrl-C: mpiexec forwards it, but not SIGINT."""
INTERRUPT_SECONDS = 2.0
"""Time for interrupted ranks to clean up before mpiexec ends them. A choice: no measurement
supports it."""
DEATH_SIGNAL = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
CLEAN_UP_SECONDS = 2.0
"""Time for a failing rank to clean up. A choice: no measurement supports it."""
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables of Open MPI and MPICH with the number of ranks on a machine."""
_LARGEST_STATUS = 2**63 - 1
_LONGEST = 1000
"""Most characters of an error's text. A choice: no measurement supports it."""


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
        """Report an uncaught exception; the rank then has two seconds to clean up."""
        where = f" in the thread {short(thread)}" if thread else ""
        self._tell_launcher(f"on {socket.gethostname()} raised {describe(error)}{where}")
        self._fail(1)

    def over(self, code: object) -> None:
        """Report the script's end, with the argument of `sys.exit`.

        A forked child of the script exits here: it must not finalise MPI, which belongs to its
        parent.
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
        """Raise KeyboardInterrupt, and delay the exit until other ranks have cleaned up.

        mpiexec ends all ranks as soon as one has ended.
        """
        self._stays_until = time.monotonic() + INTERRUPT_SECONDS
        raise KeyboardInterrupt

    def _fail(self, status: int) -> None:
        """End this process with a status: after its clean-up, but in two seconds at most."""
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
    """End this process without MPI_Finalize, which may wait for ever for other ranks."""
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
    """Return the number of ranks on this machine, ChainerMN's ``intra_size``; 1 without ranks."""
    if _here is None:
        return 1
    found = (os.environ.get(name, "") for name in _LOCAL)
    return next((int(text) for text in found if text.isdigit()), 1)
