"""What optional parts of umem need, and the command that installs it."""

from __future__ import annotations

import shlex

PACKAGES = {
    "plot": ("matplotlib>=3.7",),
    "chainer": ("chainer>=7.8.1,<7.9", "scipy>=1.10", "packaging>=22.0"),
    "cuda12": ("cupy-cuda12x[ctk]>=14.0", "cuda-core[cu12]>=1.1"),
    "cuda13": ("cupy-cuda13x[ctk]>=14.0", "cuda-core[cu13]>=1.1"),
}
"""The packages of each extra, as setup.py has them."""


def install(extra: str, name: str = "") -> str:
    """The command that installs the packages of an extra.

    It names packages, which can be installed wherever umem itself came from.

    Args:
        name: install only those whose name begins so.
    """
    wanted = [package for package in PACKAGES[extra] if package.startswith(name)]
    return f"pip install {shlex.join(wanted)}"


def command(extra: str, name: str = "") -> str:
    """The same, and which extra that is."""
    return f"{install(extra, name)} (umem's extra: {extra})"
