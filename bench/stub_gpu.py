"""umem's CUDA device over pools that hand out one and the same pointer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from umem.devices.cuda import CudaDevice

NBYTES = 64 << 10


def stub_device() -> CudaDevice:
    """umem's CUDA device over stub pools; imports CuPy, asks for no GPU."""
    import cupy

    from umem.devices.cuda.driver import Driver

    buffer = np.empty(NBYTES, np.uint8)
    memory = cupy.cuda.UnownedMemory(buffer.ctypes.data, NBYTES, buffer, device_id=0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)

    class Pool:
        def malloc(self, nbytes: int) -> Any:
            return pointer

        def free_all_blocks(self) -> None: ...
        def n_free_blocks(self) -> int:
            return 0

        def set_limit(self, size: int) -> None: ...
        def used_bytes(self) -> int:
            return 0

        def total_bytes(self) -> int:
            return 0

    class StubDriver(Driver):
        default_pool = Pool()

        def __init__(self) -> None:
            self.ordinal, self.name, self.cuda_major = 0, "stub", 12
            self.vram_bytes, self.integrated = 1 << 30, False

        def current(self) -> Any:
            return nullcontext()

        def make_pool(self, grow: Callable[[int], Any]) -> Any:
            return Pool()

        def capturing(self) -> bool:
            return False

        def gpu_count(self) -> int:
            return 1

        def managed_problem(self) -> str | None:
            return None

    return CudaDevice(StubDriver())
