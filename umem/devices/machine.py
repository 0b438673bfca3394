"""What files say of the machine: Windows' subsystem for Linux, NVIDIA's kernel driver."""

from __future__ import annotations

import re
from pathlib import Path


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this Linux runs under Windows, where managed memory has Windows' rules.

    Args:
        root: where ``proc`` is found. Raises nothing; a file that cannot be read says no.
    """
    return "microsoft" in _read(root / "proc/version").lower()


def kernel_driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel driver, such as ``"550.54.14"``, or None where none says."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", _nvidia(root), re.MULTILINE)
    return found[1] if found else None


def _nvidia(root: Path) -> str:
    return _read(root / "proc/driver/nvidia/version")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
