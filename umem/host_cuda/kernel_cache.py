"""The folder of compiled kernels: its path, contents and size."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from umem.units import parse_bytes

VARIABLE = "UMEM_KERNEL_CACHE_SIZE"
TEMPORARY = "UMEM_REAL_TMPDIR"
"""Names another folder for temporary files, if the process's own ends with it, as in a dry run."""
LIMIT_BYTES = 2 << 30
"""The cache's default size, without `VARIABLE` (a guess)."""
KERNEL = re.compile(r"(native|portable)-[0-9a-f]{8}-[0-9a-f]{32}\.so")
"""File names of compiled kernels: target, compiler, and a hash of the source."""
UNFINISHED = ".part-"
"""Part of the name of an unfinished file of a compiler."""
LARGE = (".so", ".gch")
"""Files counted as the cache's size; caches of earlier versions contain precompiled headers."""
FRESH_SECONDS = 60.0
"""A file used within this time is kept, because a process may be about to load it (a guess)."""


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "umem" / "software-gpu"


def headers_folder() -> Path:
    """Return this user's folder of precompiled headers, shared by all caches of the machine."""
    return Path(os.environ.get(TEMPORARY) or tempfile.gettempdir()) / f"umem-headers-{os.getuid()}"


def kernel_cache_limit() -> int:
    """Return the limit of the cache in bytes, from ``UMEM_KERNEL_CACHE_SIZE``.

    Raises:
        SizeError: it is not a size.
    """
    wanted = os.environ.get(VARIABLE)
    return parse_bytes(wanted, VARIABLE) if wanted else LIMIT_BYTES


def mark_used(path: Path) -> None:
    """Set a file's access time to now, whatever the mount's options."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim_kernels(folder: Path, limit: int) -> list[Path]:
    """Remove the least recently used files beyond a number of bytes; returns the removed files.

    A process that has loaded a file keeps it; other processes compile it again when needed.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.endswith(LARGE) and entry.is_file(follow_symlinks=False):
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


def clear_kernels(folder: Path) -> int:
    """Remove umem's files from a folder; returns their bytes."""
    total = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in {*LARGE, ".h", ".map", ".lock"} and not path.is_dir():
            with contextlib.suppress(OSError):
                size = path.lstat().st_size
                path.unlink()
                total += size
    return total


@dataclass(frozen=True)
class KernelGroup:
    """The compiled kernels of one compiler for one target.

    Attributes:
        label: the prefix of their names.
        count: the number of kernels.
        nbytes: the bytes of their files.
        made: the time when the oldest was compiled, in seconds since the epoch.
        used: the time of the last use of one of them.
    """

    label: str
    count: int
    nbytes: int
    made: float
    used: float


def kernel_groups(folder: Path) -> list[KernelGroup]:
    """List the kernels in a folder by group, the most recently used first."""
    found: dict[str, list[os.stat_result]] = {}
    for path in folder.glob("*.so"):
        with contextlib.suppress(OSError):
            label = path.name.rpartition("-")[0] if KERNEL.fullmatch(path.name) else ""
            found.setdefault(label, []).append(path.stat())
    made = [
        KernelGroup(
            label,
            len(files),
            sum(file.st_size for file in files),
            min(file.st_mtime for file in files),
            max(file.st_atime for file in files),
        )
        for label, files in found.items()
    ]
    return sorted(made, key=lambda group: -group.used)
