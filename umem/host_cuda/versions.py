"""The supported builds of CuPy, checked before CuPy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from umem._common.extras import CUPY_DISTRIBUTIONS
from umem.errors import DeviceError, MissingDependencyError

KNOWN = {11: ("13.6",), 12: ("13.6", "14"), 13: ("13.6", "14")}
"""Supported versions of CuPy, by the CUDA version they were built for."""
_CUBLAS = re.compile(rb"libcublas\.so\.(\d+)")
_INSTALL = {
    11: "CuPy for CUDA 11: pip install 'cupy-cuda11x==13.6.*'",
    12: "CuPy for CUDA 12: pip install 'cupy-cuda12x>=14.0,<15' (umem's extra: software)",
    13: "CuPy for CUDA 13: pip install 'cupy-cuda13x>=14.0,<15' (umem's extra: software13)",
}


def known_cupy() -> Path:
    """Return the folder of the installed CuPy; raises for an unsupported version.

    Raises:
        MissingDependencyError: CuPy is not installed.
        DeviceError: it is an unsupported version, or for another CUDA, or there are several.
    """
    spec = find_spec("cupy")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"the software GPU runs the real CuPy. {_INSTALL[12]}")
    folder = Path(spec.origin).parent
    refuse_unknown(dict(_installed()), built_for(folder))
    return folder


def refuse_unknown(installed: dict[str, str], cuda: int | None) -> None:
    """Check that one known distribution of CuPy is installed.

    Args:
        installed: versions by distribution.
        cuda: the CUDA version it was built for, None if not for CUDA.

    Raises:
        DeviceError: an unsupported distribution or several ones are installed.
    """
    names = " and ".join(f"{name} {found}" for name, found in installed.items())
    if len(installed) > 1:
        raise DeviceError(f"several distributions of CuPy are installed, {names}: keep one")
    if not names:
        raise DeviceError(f"CuPy is not installed as any of {', '.join(CUPY_DISTRIBUTIONS)}")
    (found,) = installed.values()
    if cuda not in KNOWN or not _is_of(found, KNOWN[cuda]):
        what = "something other than CUDA" if cuda is None else f"CUDA {cuda}"
        raise DeviceError(f"the software GPU supports CuPy {_listed()}; {names} is for {what}")


def built_for(folder: Path) -> int | None:
    """Return the major CUDA version that a CuPy was built for."""
    for path in folder.parent.glob("cupy_backends/cuda/libs/cublas.*.so"):
        if found := _CUBLAS.search(path.read_bytes()):
            return int(found[1])
    return None


def _installed() -> Iterator[tuple[str, str]]:
    for name in CUPY_DISTRIBUTIONS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _is_of(found: str, known: tuple[str, ...]) -> bool:
    return any(found == first or found.startswith(f"{first}.") for first in known)


def _listed() -> str:
    return ", ".join(f"{' and '.join(known)} for CUDA {cuda}" for cuda, known in KNOWN.items())
