"""The installed MPI: mpi4py's library, the mpiexec that belongs to it, and mpiexec's arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from umem._common.extras import command, installed_version
from umem._common.printable import short
from umem.errors import LaunchError, MissingDependencyError, UmemError

OPEN_MPI, MPICH = "Open MPI", "MPICH"
_FAMILIES = {OPEN_MPI: re.compile(r"open mpi", re.I), MPICH: re.compile(r"mpich|hydra|intel", re.I)}
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""Variables that set the number of threads of NumPy's libraries."""
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables of this process to pass to ranks on other hosts."""
SHM = Path("/dev/shm")
SHM_BYTES_A_RANK = 24 << 20
"""Open MPI creates a file of 16 MiB there for each rank, and fills it as the rank sends."""


class Mpiexec(NamedTuple):
    """An mpiexec program, and the MPI that it belongs to."""

    path: Path
    family: str


def family_of(text: str) -> str:
    """Return the MPI that a text describes; the text's first line if it is unknown."""
    known = (name for name, words in _FAMILIES.items() if words.search(text))
    return next(known, short(first_line(text)))


def library() -> str:
    """Return the name and version of the MPI that mpi4py uses here, such as ``Open MPI v5.0.11``.

    Raises:
        MissingDependencyError: mpi4py is not installed.
        LaunchError: mpi4py finds no MPI.
    """
    if find_spec("mpi4py") is None:
        raise MissingDependencyError(f"several ranks need mpi4py; {command('mpi')}")
    text = _library_by_fork()
    if family_of(text) not in _FAMILIES:
        raise LaunchError(f"mpi4py is installed but not usable: {short(text)}; {command('mpi')}")
    return text.partition(",")[0]


def find_mpiexec(library: str) -> Mpiexec:
    """Find the mpiexec of an MPI: the one beside Python, or the first on PATH.

    Raises:
        MissingDependencyError: there is no mpiexec.
        LaunchError: every mpiexec belongs to another MPI, so that each rank would see only itself.
    """
    found = [Mpiexec(path, _family_of_program(path)) for path in _candidates()]
    if not found:
        raise MissingDependencyError(
            f"there is no mpiexec on PATH, nor beside {short(sys.executable)}; {command('mpi')}"
        )
    for candidate in found:
        if candidate.family == family_of(library):
            return candidate
    there = ", ".join(f"{short(each.path)} ({each.family})" for each in found)
    raise LaunchError(
        f"mpi4py is built for {library}, but mpiexec belongs to another MPI, so each rank would "
        f"see only itself: {there}. Install both from the same source; {command('mpi')}"
    )


def _candidates() -> list[Path]:
    folders = [str(Path(sys.executable).parent), *os.get_exec_path()]
    found = (shutil.which("mpiexec", path=folder) for folder in folders if folder)
    return list(dict.fromkeys(Path(path) for path in found if path is not None))


def _family_of_program(path: Path) -> str:
    """Return the MPI of an mpiexec, by its ``--version``."""
    try:
        result = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    return family_of((result.stdout + result.stderr).decode(errors="replace"))


def describe_mpi() -> str:
    """Describe in one line the MPI that `umem run -n` would use here, or why it cannot."""
    try:
        found = library()
        program = find_mpiexec(found)
    except UmemError as error:
        return str(error)
    return f"{found} by mpi4py {installed_version('mpi4py')}, started by {short(program.path)}"


def arguments(
    mpiexec: Mpiexec, count: int, hosts: Path | None, exported: Mapping[str, str]
) -> list[str]:
    """Return the mpiexec command for ranks, with each line of output marked by its rank."""
    line = [str(mpiexec.path), "-n", str(count)]
    if mpiexec.family == OPEN_MPI:
        line += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--tag-output"]
        line += ["--hostfile", str(hosts)] if hosts else []
        if hosts:
            for name in (*exported, *(name for name in _PATHS if name in os.environ)):
                line += ["-x", name]
        return line
    return [*line, *(["-f", str(hosts)] if hosts else []), "-prepend-rank"]


def may_run_as_root(allowed: bool) -> bool:
    """Tell whether this user may start ranks; root must allow it explicitly."""
    return os.geteuid() != 0 or allowed or all(os.environ.get(name) == "1" for name in _ROOT)


def environment(mpiexec: Mpiexec, threads: int | None, is_crowded: bool) -> dict[str, str]:
    """Return the environment variables to add for ranks."""
    found = {}
    if threads is not None or not any(os.environ.get(name) for name in THREADS):
        found = {name: str(threads or 1) for name in THREADS}
    if mpiexec.family == OPEN_MPI:
        found |= {name: "1" for name in _ROOT}
        if is_crowded:  # waiting ranks yield their core
            found.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return found


def room_in_shm() -> int | None:
    """Return the free bytes of /dev/shm, which ranks of one machine use for messages, or None."""
    try:
        found = os.statvfs(SHM)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _library_by_fork() -> str:
    """Return the MPI that mpi4py loads, without MPI_Init, or the reason of the failure.

    A forked child loads it, so that this process loads no MPI.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, _library().encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text


def _library() -> str:
    """Return the library version of mpi4py's MPI, or the error while loading it."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        return first_line(MPI.Get_library_version())
    except Exception as error:
        return f"{type(error).__name__}: {first_line(str(error))}"


def first_line(text: str) -> str:
    """Return the first line of a text."""
    return next(iter(text.strip().splitlines()), "").strip(" \0,")
