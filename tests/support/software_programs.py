"""Programs on a software GPU, each in a process of its own."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from processes import python

from umem.errors import UmemError
from umem.host_cuda import known_cupy

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def _why_not() -> str:
    """Why there is no software GPU here; nothing where there is."""
    try:
        known_cupy()
    except UmemError as error:
        return str(error)
    return ""


needs_cupy = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "CuPy is there")
is_installed = pytest.mark.skipif(
    not Path(sysconfig.get_path("purelib"), "umem_software_gpu.pth").exists()
    or "umem" not in {entry.name for entry in entry_points(group="pytest11")},
    reason="umem is not installed in this environment, but on its path",
)


def needs_software_gpu(test: Any) -> Any:
    """Mark a test, or a class of tests, whose programs run on a software GPU."""
    return needs_compiler(needs_cupy(test))


START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "64MiB", force=True)
import cupy as cp
"""
GOES_ON = START.replace("force=True", "force=True, sticky=False")
"""For programs that use the GPU after a fault."""


def run(program: str, cache: Path, *, start: str = START) -> str:
    """What a program prints; anything on its standard error fails the test."""
    # With UMEM_DRY a dry GPU does not say that files are really written.
    variables = {"XDG_CACHE_HOME": cache, "CUPY_CACHE_DIR": cache, "UMEM_DRY": "1"}
    done = python("-c", start + program, **variables)
    assert not done.stderr, done.stderr
    return done.stdout


def lines(program: str, cache: Path, *, start: str = START) -> list[str]:
    """The lines that a program prints."""
    return run(program, cache, start=start).splitlines()
