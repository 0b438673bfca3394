"""The hosts of a job: reads the file that lists them, and checks that they can be reached."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from umem._common.files import reason
from umem._common.printable import quoted, short
from umem.errors import LaunchError
from umem.launch import mpi

CONNECT_SECONDS = 8
REACH_SECONDS = 20
"""Time for a host to answer ssh; all are checked at once. Choices: no measurement supports them."""
_ROOT = Path(__file__).parents[2]
_CHECK = f"import sys; sys.path[0] = {str(_ROOT)!r}; import umem, mpi4py"
"""Program that checks whether a host can run ranks."""
_SSH_FAILED = 255
_LINE = re.compile(r"(?P<name>[\w.@-]+)(?::(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?")


class Host(NamedTuple):
    """A machine, and the number of ranks that run on it; None is one for each core."""

    name: str
    slots: int | None = None


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file, one host a line: ``a.example``, ``a.example slots=4`` or ``a.example:4``.

    Raises:
        LaunchError: the file cannot be read, a line is invalid or has 0 slots, or no host is
            listed.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not a text file"
        raise LaunchError(f"the hosts in {short(path)} cannot be read: {why}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if match is not None and not match["name"].startswith("-"):
            slots = match["count"] or match["slots"]
            if slots is not None and not int(slots):
                raise LaunchError(f"{short(path)}, line {number}: {quoted(text)} runs no rank")
            found.append(Host(match["name"], None if slots is None else int(slots)))
        elif text:
            raise LaunchError(
                f"{short(path)}, line {number}: {quoted(text)} names no host; write a.example, "
                "a.example slots=4 or a.example:4"
            )
    if not found:
        raise LaunchError(f"{short(path)} names no host; write one a line, such as a.example:4")
    return found


@contextlib.contextmanager
def listed(hosts: Sequence[Host], family: str) -> Iterator[Path | None]:
    """Write a hosts file in an mpiexec's format for the duration of the block; None without hosts.

    Open MPI reads ``a.example:4`` as a name, and refuses files with Windows line ends or with two
    lines that give the slots of one host. MPICH does not support ``slots=4``.
    """
    if not hosts:
        yield None
        return
    sign = " slots=" if family == mpi.OPEN_MPI else ":"
    lines = [
        each.name + ("" if each.slots is None else f"{sign}{each.slots}") for each in _merged(hosts)
    ]
    with tempfile.NamedTemporaryFile("w", prefix="umem-hosts-", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        yield Path(file.name)


def _merged(hosts: Sequence[Host]) -> list[Host]:
    """Merge lines of the same host, adding their slots; a line without slots then counts as one.

    >>> _merged([Host("a", 2), Host("b"), Host("a")])
    [Host(name='a', slots=3), Host(name='b', slots=None)]
    """
    same: dict[str, list[Host]] = {}
    for each in hosts:
        same.setdefault("localhost" if is_here(each.name) else each.name, []).append(each)
    return [
        lines[0] if len(lines) == 1 else Host(lines[0].name, sum(one.slots or 1 for one in lines))
        for lines in same.values()
    ]


def reach(hosts: Sequence[Host]) -> None:
    """Check that each host answers ssh without prompting, and runs this Python and umem.

    Cost: the time of the slowest host, at most about 20 seconds.

    Raises:
        LaunchError: there is no ssh, or a host does not answer or lacks a package; the message
            names the first such host and the reason.
    """
    others = [host.name for host in hosts if not is_here(host.name)]
    if not others:
        return
    if shutil.which("ssh") is None:
        raise LaunchError(
            f"the host {short(others[0])} is reached by ssh, which is not on PATH: install it "
            "(such as apt install openssh-client)"
        )
    with ThreadPoolExecutor(min(32, len(others))) as pool:
        for problem in pool.map(_problem, others):
            if problem is not None:
                raise LaunchError(problem)


def is_here(name: str) -> bool:
    """Tell whether a host is this machine."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def _problem(name: str) -> str | None:
    """Return why a host cannot run ranks, such as no ssh or no umem; None if it can."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    check = shlex.join([sys.executable, "-c", _CHECK])
    try:
        result = subprocess.run(
            ["ssh", *options, name, check],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=REACH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _no_answer(name, f"no reply in {REACH_SECONDS} s")
    except OSError as error:
        return _no_answer(name, reason(error))
    if result.returncode == 0:
        return None
    errors = result.stderr.decode(errors="replace").strip().splitlines()
    why = mpi.first_line(errors[-1]) if errors else f"status {result.returncode}"
    if result.returncode == _SSH_FAILED:
        return _no_answer(name, why)
    return (
        f"the host {short(name)} cannot run umem by {short(sys.executable)}: {short(why)}. Each "
        "host needs the same Python at the same path, with the same packages"
    )


def _no_answer(name: str, why: str) -> str:
    """Return the message for a host that does not answer."""
    return (
        f"the host {short(name)} does not answer: {short(why)}. umem run needs "
        f"`ssh {short(name)} true` to work without prompting"
    )
