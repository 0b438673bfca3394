"""The host: its available memory, its driver and GPU by their files, and arrays over its memory.

Managed memory overcommits: the driver reserves addresses, and pages get memory when they are first
written. If no memory is left then, the kernel kills the process instead of failing the allocation,
so umem checks in advance.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class _Files(NamedTuple):
    limit: str
    used: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""
HOST_SHARE = 0.9
"""Largest share of the available host memory for managed and pinned memory. The rest is for the
program itself: staging buffers, page tables, the page cache. A guess that no measurement
supports."""
PINNED_SHARE = 0.5
"""Largest share of the available host memory for pinned memory of offload targets and
`umem.blocks`: the system can neither swap nor move it, and needs the rest for other processes. A
guess that no measurement supports; the bound was nine tenths before."""
GPU_NODES: set[int] = set()
"""NUMA nodes of a GPU's memory, which the kernel counts as host memory (Grace Hopper); added when a
GPU is opened."""

_is_asked = True


def leave_host_unknown() -> None:
    """Make `available_bytes` return None from now on: a dry run predicts for another host."""
    global _is_asked
    _is_asked = False


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the host bytes available without swapping or being killed; None if unknown.

    The minimum of the kernel's estimate (MemAvailable) and the room in every control group above
    this process, version 1 or 2. Page cache that a group can drop counts as free; memory of a GPU
    that is a NUMA node (`GPU_NODES`) does not count. None after `leave_host_unknown`.

    Costs about ten small file reads (well under a millisecond). Safe from any thread. Never raises:
    unreadable files are ignored.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    if not _is_asked:
        return None
    rooms = [*_machine(root), *_control_groups(root)]
    return max(0, min(rooms)) if rooms else None


CONTEXT_FAULTS = range(700, 720)
"""Values of cudaError (driver_types.h) after a kernel's fault has ended the context; they do not
mean that memory is short."""


def pinned_room(pinned_bytes: int = 0) -> int | None:
    """Return how many more bytes may be pinned in addition to ``pinned_bytes``; None if unknown."""
    available = available_bytes()
    if available is None:
        return None
    return max(0, int(PINNED_SHARE * (available + pinned_bytes)) - pinned_bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024 - sum(_room_of_node(root, n) for n in GPU_NODES)


def _room_of_node(root: Path, node: int) -> int:
    """Return the most bytes that a node may have added to the kernel's estimate."""
    text = _read(root / f"sys/devices/system/node/node{node}/meminfo")
    found = re.findall(r"(?:MemFree|FilePages|SReclaimable):\s+(\d+) kB", text)
    return 1024 * sum(map(int, found))


def _control_groups(root: Path) -> Iterator[int]:
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms(mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _rooms(mount / "memory", path, _V1)


def _rooms(mount: Path, path: str, files: _Files) -> Iterator[int]:
    # Inside a container the group's own path is often hidden, and the mount's root is the group.
    # Outside, a parent's limit applies as well. Reading all of them covers both.
    inner = Path(path.lstrip("/"))
    for folder in (inner, *inner.parents):
        room = _room(mount / folder, files)
        if room is not None:
            yield room


def _room(folder: Path, files: _Files) -> int | None:
    limit, used = _read(folder / files.limit).strip(), _read(folder / files.used).strip()
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= _UNLIMITED:
        return None
    return int(limit) - int(used) + _reclaimable(folder, files.reclaimable)


def _reclaimable(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def is_wsl(root: Path = Path("/")) -> bool:
    """Tell whether this Linux runs under Windows, whose rules apply to managed memory.

    Never raises: an unreadable file means no.

    Args:
        root: the folder that has ``proc``.
    """
    return "microsoft" in _read(root / "proc/version").lower()


def kernel_driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver ("550.54.14"); None if unknown."""
    text = _read(root / "proc/driver/nvidia/version")
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    return found[1] if found else None


def host_view(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any, owner: Any
) -> np.ndarray[Any, Any]:
    """Return the memory at ``address`` as a writable array that keeps ``owner`` alive.

    Copies and checks nothing: the host must be able to access every byte. Strides are arbitrary.
    """
    dtype = np.dtype(dtype)
    if not all(shape):
        return np.empty(shape, dtype)
    reach = [(count - 1) * step for count, step in zip(shape, strides, strict=True)]
    low = sum(step for step in reach if step < 0)
    nbytes = sum(step for step in reach if step > 0) - low + dtype.itemsize
    buffer: Any = (ctypes.c_ubyte * nbytes).from_address(address + low)
    buffer.owner = owner  # the array's base is the buffer, so both live as long as any view
    return np.ndarray(shape, dtype, buffer, -low, strides)


def unmanaged_text(shape: Sequence[int]) -> str:
    """Explain why an array has no host view."""
    return (
        f"an array of shape {tuple(shape)} is not managed memory of this device, so the host "
        "cannot see it; allocate it under umem.managed(), or copy it with .get()"
    )


def has_real_gpu(root: Path = Path("/")) -> bool:
    """Tell whether there is an NVIDIA GPU: its driver's device files, or those of WSL."""
    if any(root.glob("dev/nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
