"""Programs on a software GPU, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from umem.devices.software.versions import known_cupy
from umem.errors import UmemError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def _why_not() -> str:
    """Why there is no software GPU here; nothing where there is."""
    try:
        known_cupy()
    except UmemError as error:
        return str(error)
    return ""


needs_cupy = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "CuPy is there")
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


def lines(program: str, cache: Path, *, start: str = START) -> list[str]:
    """The lines that a program prints."""
    return run(program, cache, start=start).splitlines()
