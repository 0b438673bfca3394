"""Versions that all ranks must share, and mpi4py's MPI."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from umem.extras import installed_version


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share; umem's includes a hash of its source."""
    names = ("python", "numpy", "mpi4py", "chainer")
    return {"umem": _umem(), **{name: installed_version(name) or "none" for name in names}}


def _umem() -> str:
    total = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{installed_version('umem') or 'checkout'} ({total.hexdigest()[:12]})"


def mpi_library() -> str:
    """Return the MPI that mpi4py loads, without MPI_Init, or why it cannot.

    A child by fork asks, so that none is loaded into this process.
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
    """Return the library version of mpi4py's MPI, or the error of loading it."""
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
