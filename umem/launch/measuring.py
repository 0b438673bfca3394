"""The link between two ranks, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem.errors import LaunchError
from umem.launch import hosts, mpi
from umem.printable import short

PROGRAM = Path(__file__).with_name("ping_pong.py")
SECONDS = 120.0
"""Two ranks have this long to start and to measure."""


@dataclass(frozen=True)
class MeasuredLink:
    """Measured times of messages between two ranks.

    Attributes:
        hosts: where the two ran.
        seconds: by size in bytes, the time of a message.
    """

    hosts: tuple[str, ...]
    seconds: tuple[tuple[int, float], ...]

    @property
    def latency_seconds(self) -> float:
        """Return the time of the shortest message."""
        return self.seconds[0][1]

    @property
    def bandwidth(self) -> float:
        """Return bytes a second, from the longest message less the latency.

        With it where the machine was so busy that the shortest message took longer.
        """
        nbytes, seconds = self.seconds[-1]
        beyond = seconds - self.latency_seconds
        return nbytes / (beyond if beyond > 0 else seconds)

    @property
    def option(self) -> str:
        """Return the value for ``umem ranks --link``: GB/s and microseconds.

        >>> MeasuredLink(("a", "b"), ((1, 2e-6), (10**9, 0.500002))).option
        '2,2'
        """
        return f"{self.bandwidth / 1e9:.3g},{1e6 * self.latency_seconds:.3g}"

    def to_json(self) -> dict[str, Any]:
        """Return the record for a JSON file, which ``umem ranks --link`` reads."""
        link = {"bandwidth": self.bandwidth, "latency_seconds": self.latency_seconds}
        rows = [{"message_bytes": n, "seconds": s} for n, s in self.seconds]
        return {"ok": True, "hosts": list(self.hosts), "link": link, "messages": rows}


def measure_link(hosts_file: Path | None = None, *, allow_root: bool = False) -> MeasuredLink:
    """Start two ranks and measure messages between them, which takes some seconds.

    Args:
        hosts_file: machines, one a line; the two ranks are on the first two. None: on this one,
            where messages go through its memory.
        allow_root: start them as root, too.

    Raises:
        MissingDependencyError: mpi4py or mpiexec is missing; nothing was started.
        LaunchError: mpi4py and mpiexec do not match, a host does not answer, root was not allowed,
            or the ranks failed; no process is left.
    """
    if not mpi.may_run_as_root(allow_root):
        raise LaunchError("you are root: umem doctor --mpi --allow-root starts ranks all the same")
    there = [] if hosts_file is None else hosts.read_hosts(hosts_file)
    program = mpi.find_mpiexec(mpi.library_kind())
    hosts.reach(there)
    variables = mpi.environment(program, None, is_crowded=len(os.sched_getaffinity(0)) < 2)
    with hosts.listed(there, program.kind.family) as file:
        line = mpi.arguments(program, 2, file, variables, apart=bool(there))
        return _said(_run([*line, sys.executable, str(PROGRAM)], variables))


def _run(command: list[str], variables: dict[str, str]) -> str:
    """Run the measuring command, and return its output.

    Raises:
        LaunchError: it failed or took too long.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"two ranks did not measure their link within {SECONDS:g} s") from None
    if done.returncode:
        texts = [line for line in done.stderr.splitlines() if line.strip("- ")]
        said = next(iter(texts[-1:]), "they said nothing")
        raise LaunchError(f"two ranks failed with status {done.returncode}: {short(said)}")
    return done.stdout


def _said(text: str) -> MeasuredLink:
    for line in text.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            rows = tuple((int(size), float(seconds)) for size, seconds in found["seconds"])
            return MeasuredLink(tuple(found["hosts"]), rows)
    raise LaunchError("two ranks ended and did not say what they measured")
