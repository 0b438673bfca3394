"""How benchmarks and tests start ranks on this machine: Open MPI's command line and variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def ranks_command(count: int, *options: str) -> list[str]:
    """Begin the command line of so many ranks; more than cores take turns."""
    return [str(MPIEXEC), "-n", str(count), "--map-by", ":OVERSUBSCRIBE", *options]


def ranks_environment(*folders: Path, **more: str) -> dict[str, str]:
    """Return the variables of ranks with one BLAS thread each, which find umem and the folders."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (ROOT, *folders)), *inherited]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **more,
    }
