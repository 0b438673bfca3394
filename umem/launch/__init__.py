"""Several ranks of one script: mpiexec starts them, each is watched from outside, all end as one.

It knows no Chainer. The launcher (`job.py`) starts mpiexec, which starts a watcher a rank
(`watcher.py`), which starts the script's Python; `rank.py` is what that one says of itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from umem.errors import LaunchError
from umem.launch import hosts, mpi
from umem.launch.job import Job
from umem.launch.measuring import MeasuredLink, measure_link
from umem.launch.rank import Rank, local_count, this_rank
from umem.printable import shown
from umem.units import format_bytes

BACKING = "OMPI_MCA_btl_sm_backing_directory"
"""The variable that tells Open MPI where ranks of one machine put their messages."""
SESSION = "PRTE_MCA_prte_tmpdir_base"
"""The one that tells it where mpiexec makes its own folder."""
_PREFIX = "umem-ranks-"
_NEW_SECONDS = 60

__all__ = [
    "AskedRanks",
    "MeasuredLink",
    "Rank",
    "local_count",
    "measure_link",
    "run_ranks",
    "this_rank",
]


class AskedRanks(NamedTuple):
    """What is asked of a job; ``threads`` None: one a rank, unless the environment says it."""

    ranks: int
    hosts: Path | None = None
    allow_root: bool = False
    verbose: bool = False
    threads: int | None = None


def run_ranks(command: list[str], asked: AskedRanks, say: Callable[[str], None]) -> int:
    """Run a command as so many ranks, and return its exit status once no process is left.

    What the ranks write is written here, a line at a time, each with the number of its rank. Where
    one fails, all others are ended, and the last line is a sentence with rank, host and cause.

    Args:
        command: what each rank runs; it must make a `Rank` of itself and check in.
        asked: how many, and where.
        say: prints a line of the job's own.

    Raises:
        MissingDependencyError: mpi4py or mpiexec is missing; nothing was started.
        LaunchError: they do not belong together, a host does not answer, root was not allowed;
            nothing was started.
    """
    if not mpi.may_run_as_root(asked.allow_root):
        raise LaunchError(
            "you are root, and a wrong program could harm the whole machine; umem run "
            "--allow-root runs it all the same, such as in a container"
        )
    there = hosts.read_hosts(asked.hosts) if asked.hosts is not None else []
    program = mpi.find_mpiexec(mpi.library_kind())
    hosts.reach(there)
    cores = len(os.sched_getaffinity(0))
    is_crowded = not there and asked.ranks > cores
    if is_crowded:
        say(f"umem: {asked.ranks} ranks on {cores} cores: they take turns")
    variables = mpi.environment(program, asked.threads, is_crowded)
    with ExitStack() as stack:
        if not there and BACKING not in os.environ:
            variables |= small_shm(asked.ranks, say)
            variables |= own_place(variables.get(BACKING, str(mpi.SHM)), stack)
        file = stack.enter_context(hosts.listed(there, program.kind.family))
        job = Job(program, command, asked.ranks, file, there, variables)
        status, last = job.run()
    if asked.verbose or job.is_unexplained:
        for line in job.mpiexec_lines:
            say(line)
    if last is not None:
        say(f"umem: {last}")
    return status


def small_shm(count: int, say: Callable[[str], None]) -> dict[str, str]:
    """Where /dev/shm is too small for the ranks' messages, have Open MPI use files elsewhere."""
    room, needed = mpi.room_in_shm(), count * mpi.SHM_BYTES_A_RANK
    if room is None or room >= needed:
        return {}
    place = os.environ.get("TMPDIR", "/tmp")
    say(
        f"umem: {format_bytes(room)} are free in {mpi.SHM} and {count} ranks may need "
        f"{format_bytes(needed)}: messages go by files in {shown(place)}, which is slower "
        "(docker run --shm-size gives more)"
    )
    return {BACKING: place}


def own_place(place: str, stack: ExitStack) -> dict[str, str]:
    """Have Open MPI's files in a folder of this job's own, which goes with it.

    Open MPI leaves them where it is killed, 16 MiB a rank, and this process cannot remove them
    where that is killed: the next job does.
    """
    import fcntl  # POSIX has it

    if not os.path.isdir(place):
        return {}
    sweep(Path(place))
    own = TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True)
    folder = stack.enter_context(own)
    held = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, held)
    fcntl.flock(held, fcntl.LOCK_EX)
    is_long = place != str(mpi.SHM)  # the paths of sockets may not be
    return {BACKING: folder} | ({} if is_long or SESSION in os.environ else {SESSION: folder})


def sweep(place: Path) -> None:
    """Remove what jobs that are gone have left: folders of ours that nobody holds."""
    import fcntl

    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if time.time() - folder.stat().st_mtime < _NEW_SECONDS:
                continue  # perhaps not held yet
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
