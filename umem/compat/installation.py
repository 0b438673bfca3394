"""Finds the Chainer that Python would import, and its release."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from umem._common import extras
from umem.errors import CompatError

BESIDE = ("chainermn", "onnx_chainer")
"""Other packages that are installed with Chainer."""
SUPPORTED = re.compile(r"7\.8\.\d+")
_VERSION = re.compile(r"""^__version__ = ['"]([^'"]+)['"]""", re.MULTILINE)


def find_package(name: str = "chainer") -> Path | None:
    """Return the folder of an installed package without importing it, or None."""
    spec = PathFinder.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def module_file(module: str) -> Path | None:
    """Return the source file of a module of Chainer or of `BESIDE`, without importing it."""
    top, *rest = module.split(".")
    package = find_package(top)
    if package is None:
        return None
    base = package.joinpath(*rest)
    candidates = (base.with_suffix(".py") if rest else base / "__init__.py", base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def package_version(package: Path) -> str:
    """Return the version that the package itself states, or "unknown"."""
    try:
        text = (package / "_version.py").read_text("utf-8")
    except OSError:
        return "unknown"
    match = _VERSION.search(text)
    return match.group(1) if match else "unknown"


def require_supported(module_path: str) -> str:
    """Return the version of the Chainer that the file belongs to.

    Raises:
        CompatError: Chainer is not a 7.8 release.
    """
    package = _chainer_folder(Path(module_path))
    version = package_version(package)
    if SUPPORTED.match(version) is None:
        raise CompatError(
            f"Chainer {version} at {package} is not supported: the compatibility layer knows only "
            f"the source of Chainer 7.8.{_shadowed(package)} "
            f"Install that release: {extras.command('chainer', 'chainer')}"
        )
    return version


def _chainer_folder(path: Path) -> Path:
    """Return the ``chainer`` folder above a file; `BESIDE` lists packages in the same folder."""
    for parent in path.parents:
        if parent.name == "chainer":
            return parent
        if parent.name in BESIDE:
            return parent.with_name("chainer")
    return path.parent


def _shadowed(package: Path) -> str:
    folders = [Path(entry or ".") / "chainer" for entry in sys.path]
    others = [f for f in folders if f != package and (f / "_version.py").is_file()]
    if not others:
        return ""
    return f" It hides Chainer {package_version(others[0])} at {others[0]}."
