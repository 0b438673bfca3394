"""The folder of compiled kernels as a whole: what is in it, its size, and archives of it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from umem.units import parse_bytes

VARIABLE = "UMEM_KERNEL_CACHE_SIZE"
LIMIT_BYTES = 2 << 30
UNFINISHED = ".part-"
"""Stands in the name of what a compiler still writes."""
FRESH_SECONDS = 60.0
"""What was used so recently may be about to be loaded: it stays."""


def cache_limit() -> int:
    """Return the bytes that compiled kernels may take, of ``UMEM_KERNEL_CACHE_SIZE``.

    Raises:
        SizeError: it is no size.
    """
    wanted = os.environ.get(VARIABLE)
    return parse_bytes(wanted, VARIABLE) if wanted else LIMIT_BYTES


def mark_used(path: Path) -> None:
    """Note that a file is used now, in its time of access, whatever the drive does by itself."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim(folder: Path, limit: int, suffix: str = ".so") -> list[Path]:
    """Remove the least recently used files beyond a number of bytes; return them.

    A process that has loaded one keeps it; one that needs it again compiles it again.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat().st_atime, entry.stat().st_size, Path(entry.path)))
    total, removed = sum(size for _, size, _ in found), []
    for used, size, path in sorted(found):
        if total <= limit or time.time() - used < FRESH_SECONDS:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
            total -= size
    return removed
