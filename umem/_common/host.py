"""The host: its memory that is left, what its files say of it, arrays over it, and its GPU.

Managed memory overcommits: the driver hands out addresses, and memory is found when pages are
written. When there is none, the kernel kills the process instead of failing the allocation, so umem
checks before.
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
"""cgroup v1 says "no limit" with a number near 2**63."""
HOST_SHARE = 0.9
"""Managed and pinned memory may use at most this share of the host memory available. The rest is
for the program itself: staging buffers, page tables, the page cache. A guess that no measurement
supports."""
PINNED_SHARE = 0.5
"""Pinned memory of offload targets and of `umem.blocks` may use at most this share: the system can
neither swap nor move it, and needs the rest for everything else that runs. A guess that no
measurement supports; nine tenths were the bound before."""
GPU_NODES: set[int] = set()
"""NUMA nodes of a GPU's memory, which the kernel counts as the host's (Grace Hopper); added when a
GPU is opened."""

_is_asked = True


def leave_host_unknown() -> None:
    """Have `available_bytes` return None from now on: a dry run is not for the host it runs on."""
    global _is_asked
    _is_asked = False


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the host bytes available without swapping or being killed; None if unknown.

    The least of the kernel's own estimate (MemAvailable) and what every control group above this
    process leaves, version 1 or 2; page cache that a group can drop counts as free, and the memory
    of a GPU that is a NUMA node (`GPU_NODES`) is not the host's. None after `leave_host_unknown`.

    Costs about ten small file reads (well under a millisecond). Safe from any thread. Raises
    nothing: a file that cannot be read says nothing.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    if not _is_asked:
        return None
    rooms = [*_machine(root), *_control_groups(root)]
    return max(0, min(rooms)) if rooms else None


CONTEXT_FAULTS = range(700, 720)
"""Of cudaError (driver_types.h), when a kernel has ended the context: no want of memory."""


def pinned_room(pinned_bytes: int = 0) -> int | None:
    """Return how much more may be pinned beside what is; None if unknown."""
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
    """Return the most that a node may have added to the kernel's estimate."""
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
    # Inside a container the group's own path is often not visible and the mount's root is the
    # group; outside, a parent's limit binds as well. Looking at all of them covers both.
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

    Args:
        root: where ``proc`` is found. Raises nothing; a file that cannot be read says no.
    """
    return "microsoft" in _read(root / "proc/version").lower()


def kernel_driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver ("550.54.14"); None if unknown."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", _nvidia(root), re.MULTILINE)
    return found[1] if found else None


def _nvidia(root: Path) -> str:
    return _read(root / "proc/driver/nvidia/version")


def host_view(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any, owner: Any
) -> np.ndarray[Any, Any]:
    """Return the memory at ``address`` as a writable array that keeps ``owner`` alive.

    Nothing is copied or checked: the host must be able to reach every byte. Any strides will do.
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
    """Tell whether there is an NVIDIA GPU: its driver's devices, or Windows' ones under WSL."""
    if any(root.glob("dev/nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
