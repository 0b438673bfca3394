"""Print a value for OPENBLAS_CORETYPE: other kernels than NumPy's OpenBLAS takes on this machine.

Sums of a matrix product come in another order with each kernel, so that results may differ in the
last bit; what umem promises to the bit has to hold with any of them. Nothing is printed where the
processor can run no other kernel, or NumPy has another BLAS.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SYMBOLS = "scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"
"""What NumPy's wheels from 2.0, from 1.22, and distributions call the function."""

KERNELS = (
    ("Haswell", {"avx2", "fma"}, {"Haswell", "Zen"}),
    ("Sandybridge", {"avx"}, {"Sandybridge"}),
)
"""A kernel, what of the processor it needs, and the names under which it is taken."""


def taken() -> str | None:
    """Name the kernels that NumPy's OpenBLAS takes here."""
    np.ones((2, 2)) @ np.ones((2, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for symbol in SYMBOLS:
            if hasattr(library, symbol):
                function = getattr(library, symbol)
                function.restype = ctypes.c_char_p
                return str(function().decode())
    return None


def other(name: str | None, flags: set[str]) -> str | None:
    """Choose kernels that the processor can run and that are not those of ``name``."""
    if name is None:
        return None
    return next(
        (k for k, needs, own in KERNELS if needs <= flags and name not in own and runs(k)), None
    )


def runs(kernel: str) -> bool:
    """Tell whether a large product comes to its end.

    OpenBLAS of NumPy 2.5.5 ends the process where an AVX-512 processor is told to be a Haswell.
    """
    given = {**os.environ, "OPENBLAS_CORETYPE": kernel}
    product = "import numpy; numpy.ones((2100, 3000)) @ numpy.ones((3000, 2000))"
    return not subprocess.run([sys.executable, "-c", product], env=given, check=False).returncode


if __name__ == "__main__":
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    print(other(taken(), flags) or "")
