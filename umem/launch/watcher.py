"""One rank, seen from outside: mpiexec starts this file, and this file starts the script's Python.

It uses the standard library alone, so that it starts in a few hundredths of a second. mpiexec ends
a job of which a rank dies. Added here: the cause in words, and the end of what the rank started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

SAYS = "\x1eumem: "
"""Prefix of a line on a rank's standard error that is for the launcher, which does not print it."""
RANK = "UMEM_LAUNCH_RANK"
"""Variable with the rank's number, removed before the script runs."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables in which Open MPI and MPICH give a rank's number."""
TICK_SECONDS = 0.2
TOLD_SECONDS = 0.15
"""A rank has this long between SIGTERM and SIGKILL: mpiexec kills this process after 0.25 s."""
INTERRUPT = signal.SIGUSR1
"""Signal that interrupts the ranks as Ctrl-C does a single process: mpiexec forwards it, but not
SIGINT."""
INTERRUPT_SECONDS = 2.0
"""Interrupted ranks have this long for their clean-up before mpiexec ends them."""
DEATH_SIGNAL, SUBREAPER = 1, 36
"""Options of prctl."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, INTERRUPT)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def watch(number: str, command: list[str]) -> int:
    """Run a command as a rank until it ends; returns its exit status, 128 + the signal if killed.

    Orphans of the rank become children of this process. Where the status is not 0, all descendants
    are killed before the return; where it is 0, they live on. SIGTERM, SIGINT, SIGHUP and the end
    of mpiexec end the rank by SIGTERM, then SIGKILL. `INTERRUPT` is passed on as SIGINT; the return
    then waits for mpiexec's SIGTERM, until `INTERRUPT_SECONDS` after it. The launcher is told the
    cause of a status that is not 0, unless SIGTERM, SIGINT, SIGHUP or the end of mpiexec came
    before.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kills_before = _killed_for_memory()
    variables = {**os.environ, RANK: number}
    process = subprocess.Popen(command, env=variables, preexec_fn=_begin)
    ends_at = stays_until = None
    while (status := _exit_status(process.pid)) is None:
        received = signal.sigtimedwait(_SIGNALS, TICK_SECONDS)
        if received is not None and received.si_signo == INTERRUPT:
            stays_until = time.monotonic() + INTERRUPT_SECONDS
            os.kill(process.pid, signal.SIGINT)
            continue
        is_told = received is not None and received.si_signo != signal.SIGCHLD
        is_orphan = os.getppid() != parent
        if ends_at is None and (is_told or is_orphan):
            ends_at = time.monotonic() + (0 if is_orphan else TOLD_SECONDS)
            os.kill(process.pid, signal.SIGTERM)
        if ends_at is not None:
            time.sleep(0.02)
            if time.monotonic() > ends_at:
                os.kill(process.pid, signal.SIGKILL)
    is_its_own = ends_at is None and signal.SIGTERM not in signal.sigpending()
    if stays_until is not None:  # mpiexec ends all as soon as one has ended
        signal.sigtimedwait([signal.SIGTERM], max(0.0, stays_until - time.monotonic()))
    if status:
        end_children()
    if status and is_its_own:
        had_no_memory = status == -signal.SIGKILL and _killed_for_memory() > kills_before
        say(number, _cause(status, had_no_memory))
    return 128 - status if status < 0 else status


def say(number: str, what: str) -> None:
    """Send a line about this rank to the launcher."""
    line = f"{SAYS}rank {number} on {socket.gethostname()} {what}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode("utf-8", "backslashreplace"))


def _begin() -> None:
    os.setpgid(0, 0)  # mpiexec's signals to a group are for the watcher, which knows what to do
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _exit_status(child: int) -> int | None:
    """Return the child's exit status, or None while it runs; negative: a signal. Reaps orphans."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if not pid:
            return None


def _cause(status: int, had_no_memory: bool) -> str:
    if had_no_memory:
        return "was killed by the kernel, which had no memory left (SIGKILL)"
    if status > 0:
        return f"ended with status {status}"
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    return f"{'crashed' if -status in _CRASHES else 'was killed'} ({name})"


def _killed_for_memory() -> int:
    """Count the processes that the kernel has killed here for want of memory; 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    return 0


def end_children(but: frozenset[int] = frozenset(), seconds: float = 5.0) -> None:
    """Kill all descendants but ``but``, and reap them, for at most ``seconds``.

    Descendants become children of this process as orphans, once their parents are killed.
    """
    deadline = time.monotonic() + seconds
    while (left := children() - but) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def children() -> frozenset[int]:
    """List the children of this process, zombies included."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b") ")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return frozenset(found)


if __name__ == "__main__":
    sys.exit(watch(next(os.environ[name] for name in RANKS if name in os.environ), sys.argv[1:]))
