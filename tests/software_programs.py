"""Programs on a software GPU, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def _cupy() -> bool:
    if find_spec("cupy") is None:
        return False
    try:
        return version("cupy-cuda12x").startswith("14.")
    except PackageNotFoundError:
        return False


needs_cupy = pytest.mark.skipif(not _cupy(), reason="no CuPy 14 for CUDA 12")
START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "64MiB", force=True)
import cupy as cp
"""


def run(program: str, cache: Path, *, start: str = START) -> str:
    """What a program prints; anything on its standard error fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "CUPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout
