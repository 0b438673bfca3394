"""Runs a program and leaves nothing of it behind, whoever is killed.

`python keeper.py FD PROGRAM ARGUMENTS...` runs a program, and ends everything that it has started
when it is over, when a byte comes from FD (the program is asked first, as by Ctrl-C) or when the
other end of FD is closed, which a killed process's is. What loses its parent becomes this one's,
and a program whose keeper is killed dies with it (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 5.0
"""From asking a program to stop to making it."""
END_SECONDS = 30.0
"""The longest wait for killed processes to be gone: one may hang in a driver."""
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # prctl, of linux/prctl.h


def prctl(option: int, value: int) -> None:
    """Ask the kernel for something; elsewhere than on Linux nothing happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> set[int]:
    """List the processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    ahead = [os.getpid()]
    while ahead:
        ahead += (below := children.get(ahead.pop(), []))
        found.update(below)
    return found


def end_all() -> None:
    """Kill everything below this process, and wait until it is gone."""
    end = time.monotonic() + END_SECONDS
    while (below := descendants()) and time.monotonic() < end:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def keep(pipe: int, command: list[str]) -> int:
    """Run a program; its exit code, 128 and the signal's number where it died of one."""
    prctl(CHILD_SUBREAPER, 1)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL),
    )
    code: int | None = None
    while (code := process.poll()) is None:
        if select.select([pipe], [], [], 0.02)[0]:
            code = ask_to_stop(process) if os.read(pipe, 1) else -signal.SIGKILL
            break
    end_all()
    return code if code >= 0 else 128 - code


def ask_to_stop(process: subprocess.Popen[bytes]) -> int:
    """Ask a program to stop, and wait a while for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(GRACE_SECONDS)
    return -signal.SIGKILL


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
