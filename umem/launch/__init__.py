"""Several ranks of one script: mpiexec starts them, and ends all if one dies.

``umem run -n`` uses it. Only cli imports this room, and it knows no Chainer. `run_ranks` stands in
this file.

    job.py    runs mpiexec, passes on what ranks write, and says in a sentence which rank failed and
              why
    rank.py   is a rank's own process: it reports an uncaught error, and leaves without MPI_Finalize
    mpi.py    finds the MPI of mpi4py, and the mpiexec that belongs to it
    hosts.py  reads the file of machines, and checks that they can be reached

- A rank reports its error by a marked line on standard error, which the job reads.
- Where mpiexec fails, the job kills what ranks leave behind on this machine.
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
"""Variable that tells Open MPI where to put messages between ranks of one machine."""

__all__ = ["AskedRanks", "Rank", "describe_mpi", "local_count", "run_ranks", "this_rank"]


class AskedRanks(NamedTuple):
    """The options of a job; ``threads`` None: one a rank, unless the environment sets it."""

    ranks: int
    hosts: Path | None = None
    allow_root: bool = False
    verbose: bool = False
    threads: int | None = None


def run_ranks(command: list[str], asked: AskedRanks, say: Callable[[str], None]) -> int:
    """Run a command as several ranks; returns its exit status once no process is left.

    The ranks' output is printed here, a line at a time, each with the number of its rank. If one
    fails, all others are ended, and the last line is a sentence with rank, host and cause.

    Args:
        command: the command of each rank; it must call `this_rank`.
        asked: how many, and where.
        say: prints a line of the job's own.

    Raises:
        MissingDependencyError: mpi4py or mpiexec is missing; nothing was started.
        LaunchError: mpi4py and mpiexec are of two MPIs, a host does not answer, root was not
            allowed; nothing was started.
    """
    if not mpi.may_run_as_root(asked.allow_root):
        raise LaunchError(
            "you are root, and a wrong program could harm the whole machine; umem run "
            "--allow-root runs it all the same, such as in a container"
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
    """Return the variable that moves Open MPI's messages to files, if /dev/shm is too small."""
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
    """Put Open MPI's messages into a folder of this job, which is removed with it.

    Open MPI leaves the files of a rank that is killed there, 16 MiB a rank.
    """
    if not os.path.isdir(place):
        return {}
    own = TemporaryDirectory(prefix="umem-ranks-", dir=place, ignore_cleanup_errors=True)
    return {BACKING: stack.enter_context(own)}
