"""Run a script on several MPI ranks: mpiexec starts them, and stops all if one dies.

``umem run -n`` uses it. Only cli imports this room, and it does not import Chainer. `run_ranks` is
in this file.

    job.py    runs mpiexec, prints the ranks' output, and reports which rank failed and why
    rank.py   runs in a rank's process: it reports an uncaught error, and exits without MPI_Finalize
    mpi.py    finds the MPI of mpi4py, and the mpiexec that belongs to it
    hosts.py  reads the hosts file, and checks that the hosts can be reached

- A rank reports its error by a marked line on standard error, which the job reads.
- If mpiexec fails, the job kills the ranks' remaining processes on this machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from umem._common.printable import short
from umem.errors import LaunchError
from umem.launch import hosts, mpi
from umem.launch.job import Job
from umem.launch.mpi import describe_mpi
from umem.launch.rank import UNDER_UMEM, Rank, local_count, this_rank
from umem.units import format_bytes

BACKING = "OMPI_MCA_btl_sm_backing_directory"
"""Variable with Open MPI's folder for messages between ranks of one machine."""

__all__ = ["AskedRanks", "Rank", "describe_mpi", "local_count", "run_ranks", "this_rank"]


class AskedRanks(NamedTuple):
    """The options of a job; ``threads``: None is one a rank unless the environment sets it."""

    ranks: int
    hosts: Path | None = None
    allow_root: bool = False
    verbose: bool = False
    threads: int | None = None


def run_ranks(command: list[str], asked: AskedRanks, say: Callable[[str], None]) -> int:
    """Run a command as several ranks; returns its exit status once all processes have ended.

    Prints the ranks' output here, line by line, each with the number of its rank. If a rank fails,
    all others are stopped, and the last line names the rank, its host and the cause.

    Args:
        command: the command of each rank; it must call `this_rank`.
        asked: the number of ranks, their hosts and other options.
        say: prints a line of the job's own.

    Raises:
        MissingDependencyError: mpi4py or mpiexec is missing; no rank was started.
        LaunchError: mpi4py and mpiexec belong to different MPIs, a host does not answer, or root
            was not allowed; no rank was started.
    """
    if not mpi.may_run_as_root(asked.allow_root):
        raise LaunchError(
            "you are root, and a faulty program could harm the whole machine; use umem run "
            "--allow-root to run it all the same, such as in a container"
        )
    machines = hosts.read_hosts(asked.hosts) if asked.hosts is not None else []
    program = mpi.find_mpiexec(mpi.library())
    hosts.reach(machines)
    cores = len(os.sched_getaffinity(0))
    is_crowded = not machines and asked.ranks > cores
    if is_crowded:
        say(f"umem: {asked.ranks} ranks on {cores} cores: they take turns")
    variables = mpi.environment(program, asked.threads, is_crowded) | {UNDER_UMEM: "1"}
    with ExitStack() as stack:
        if not machines and BACKING not in os.environ:
            variables |= small_shm(asked.ranks, say)
            variables |= own_place(variables.get(BACKING, str(mpi.SHM)), stack)
        file = stack.enter_context(hosts.listed(machines, program.family))
        starts = mpi.arguments(program, asked.ranks, file, variables)
        job = Job([*starts, *command], variables, None if machines else socket.gethostname())
        status, last = job.run()
    if asked.verbose or job.is_unexplained:
        for line in job.mpiexec_lines[0 if asked.verbose else 1 :]:
            say(line)
    if last is not None:
        say(f"umem: {last}")
    return status


def small_shm(count: int, say: Callable[[str], None]) -> dict[str, str]:
    """Return the variable that moves Open MPI's messages to a disk, if /dev/shm is too small."""
    room, needed = mpi.room_in_shm(), count * mpi.SHM_BYTES_A_RANK
    if room is None or room >= needed:
        return {}
    place = os.environ.get("TMPDIR", "/tmp")
    say(
        f"umem: {format_bytes(room)} are free in {mpi.SHM} and {count} ranks may need "
        f"{format_bytes(needed)}: messages use files in {short(place)}, which is slower "
        "(docker run --shm-size gives more)"
    )
    return {BACKING: place}


def own_place(place: str, stack: ExitStack) -> dict[str, str]:
    """Put Open MPI's messages into a folder that is removed at the end of this job.

    Open MPI does not remove the files of a killed rank, 16 MiB each.
    """
    if not os.path.isdir(place):
        return {}
    own = TemporaryDirectory(prefix="umem-ranks-", dir=place, ignore_cleanup_errors=True)
    return {BACKING: stack.enter_context(own)}
