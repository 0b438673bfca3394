"""Host memory in the place of a GPU: what the CUDA device is tested on where there is none.

`HostDriver` stands for the driver, `HostPool` for CuPy's pool (which asks the driver for the
current device and so cannot work without one). CuPy itself is real: its allocator hooks, its
arrays, its memory pointers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import cupy
import numpy as np

from umem.devices.cuda import Driver

GIB = 1 << 30
PREFER_HOST, PREFETCH = "prefer_host", "prefetch"


class DriverError(Exception):
    """What CuPy's CUDARuntimeError looks like to us; that class cannot be made without a GPU."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def host_memory(nbytes: int, device: int = 0):
    """A CuPy memory pointer to host memory that nobody has touched."""
    buffer = np.empty(max(nbytes, 1), dtype=np.uint8)
    memory = cupy.cuda.UnownedMemory(buffer.ctypes.data, nbytes, buffer, device_id=device)
    return cupy.cuda.MemoryPointer(memory, 0)


class _InUse:
    """Returns a block to its pool when the last array lets go."""

    def __init__(self, pool: HostPool, block) -> None:
        self.pool, self.block = pool, block

    def __del__(self) -> None:
        self.pool.take_back(self.block)


class HostPool:
    """A cache of blocks by exact size, with the methods of CuPy's MemoryPool that we use."""

    def __init__(self, grow) -> None:
        self.grow = grow
        self.limits: list[int] = []
        self.limit = _environment_limit()
        self._free = defaultdict(list)
        self._used = self._total = 0

    def malloc(self, nbytes: int):
        if not nbytes:
            return host_memory(0)
        size = -(-nbytes // 512) * 512
        cached = self._free[size]
        block = cached.pop() if cached else self._new(size)
        self._used += size
        memory = cupy.cuda.UnownedMemory(block.ptr, size, _InUse(self, block), device_id=0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def _new(self, size: int):
        if self.limit and self._total + size > self.limit:
            self.free_all_blocks()
            if self._total + size > self.limit:
                raise cupy.cuda.memory.OutOfMemoryError(size, self._total, self.limit)
        block = self.grow(size)
        self._total += size
        return block

    def take_back(self, block) -> None:
        self._used -= block.mem.size
        self._free[block.mem.size].append(block)

    def free_all_blocks(self) -> None:
        self._total -= sum(size * len(blocks) for size, blocks in self._free.items())
        self._free.clear()

    def n_free_blocks(self) -> int:
        return sum(map(len, self._free.values()))

    def used_bytes(self) -> int:
        return self._used

    def total_bytes(self) -> int:
        return self._total

    def set_limit(self, size: int) -> None:
        self.limits.append(size)
        self.limit = size


def _environment_limit() -> int:
    """CuPy's own reading of CUPY_GPU_MEMORY_LIMIT, which every new pool starts with."""
    return int(cupy.cuda.memory._parse_limit_string()["size"] or 0)


class HostDriver(Driver):
    """A GPU of 1 GiB beside a host with 2 GiB, made of host memory."""

    def __init__(self, vram: int = GIB, host: int | None = 2 * GIB) -> None:
        self.ordinal, self.name, self.cuda_major = 0, "Host GPU", 12
        self.vram_bytes, self.host, self.integrated = vram, host, False
        self.gpus, self.gpu_in_use = 1, 0
        self.problem: str | None = None
        self.attributes = {
            "ManagedMemory": 1,
            "ConcurrentManagedAccess": 1,
            "CanMapHostMemory": 1,
            "UnifiedAddressing": 1,
        }
        self.pinned_left = 2 * GIB
        self.pinned_blocks: set[int] = set()
        self.is_capturing = False
        self.synchronize_count = 0
        self.captured_streams: set[int] = set()
        self.unmanaged_left = vram
        self.managed_blocks: set[int] = set()
        self.calls: list[tuple] = []
        self._default = HostPool(self.allocate)

    def current(self, ordinal: int | None = None):
        return contextlib.nullcontext()

    def bind(self) -> None:
        self.calls.append(("bind",))

    def gpu_count(self) -> int:
        return self.gpus

    def is_current(self) -> bool:
        return self.gpu_in_use == self.ordinal

    def here(self) -> int:
        return self.gpu_in_use

    def allocate(self, nbytes: int):
        """cudaMalloc: fails with the driver's status when VRAM is full."""
        if nbytes > self.unmanaged_left:
            raise DriverError(2)
        self.unmanaged_left -= nbytes
        pointer = host_memory(nbytes)
        self.managed_blocks.discard(pointer.ptr)  # of a block that was freed
        owner = _Vram(self, nbytes, pointer.mem)
        memory = cupy.cuda.UnownedMemory(pointer.ptr, nbytes, owner, device_id=0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def allocate_managed(self, nbytes: int):
        pointer = host_memory(nbytes)
        self.managed_blocks.add(pointer.ptr)
        return pointer

    def allocate_pinned(self, nbytes: int):
        """cudaHostAlloc: fails with the driver's status when the system pins no more."""
        if nbytes > self.pinned_left:
            raise DriverError(2)
        self.pinned_left -= nbytes
        pointer = host_memory(nbytes)
        self.pinned_blocks.add(pointer.ptr)
        return pointer

    def is_on_host(self, address: int) -> bool:
        return address in self.pinned_blocks

    def attribute(self, name: str) -> int | None:
        return self.attributes.get(name, 0)

    def versions(self) -> dict[str, str | None]:
        return {"nvidia driver": "550.54.14", "cuda of driver": "12.4", "cuda of cupy": "12.9"}

    def make_pool(self, grow) -> HostPool:
        return HostPool(grow)

    @property
    def default_pool(self) -> HostPool:
        return self._default

    def default_pool_bytes(self) -> int:
        return self._default.total_bytes()

    def free_bytes(self) -> int:
        return self.unmanaged_left

    def host_available_bytes(self) -> int | None:
        return self.host

    def capturing(self, stream: int | None = None) -> bool:
        return self.is_capturing if stream is None else stream in self.captured_streams

    def is_managed(self, address: int) -> bool:
        return address in self.managed_blocks

    def prefer_host(self, address: int, nbytes: int) -> None:
        self.calls.append((PREFER_HOST, nbytes))

    def advise(self, address: int, nbytes: int, advice, place) -> None:
        if self.core is None:
            self.calls.append((advice, place, nbytes))
        else:
            super().advise(address, nbytes, advice, place)

    def prefetch_here(self, address: int, nbytes: int) -> None:
        self.calls.append((PREFETCH, nbytes))

    def is_any_captured(self) -> bool:
        return self.is_capturing

    def synchronize(self) -> None:
        self.synchronize_count += 1

    def stream_address(self, stream) -> int:
        return 0 if stream is None else super().stream_address(stream)

    def managed_problem(self) -> str | None:
        return self.problem


class _Vram:
    def __init__(self, driver: HostDriver, nbytes: int, memory) -> None:
        self.driver, self.nbytes, self.memory = driver, nbytes, memory

    def __del__(self) -> None:
        self.driver.unmanaged_left += self.nbytes


@contextlib.contextmanager
def installed(device, policy, everywhere: bool = False) -> Iterator[None]:
    """A policy, for the length of a block."""
    restore = device.install(policy, everywhere=everywhere)
    try:
        yield
    finally:
        restore()
