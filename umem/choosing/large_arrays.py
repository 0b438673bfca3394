"""Large arrays of a program with CuPy alone: which lines make them, and advice as they are made."""

from __future__ import annotations

from collections import Counter

import cupy

import umem
from umem.devices.presets import Preset
from umem.trace.stacks import program_line

SHARE = 8
"""An array is large from this part of VRAM on: advice by array is worth its line of code for the
few arrays that fill the GPU, and eight of these do."""


class LargeArrays(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Follows CuPy's allocations of an eighth of VRAM and more, while the block is entered.

    Args:
        preset: the advice that each gets as it is made (`umem.preset`); None: none.

    Attributes:
        made: for each of the program's lines, the bytes of the largest array that it made.
    """

    def __init__(self, preset: Preset | None = None) -> None:
        self.name = f"umem.large_arrays.{preset}"  # CuPy has one hook of a name
        self._least, self._preset = cupy.cuda.runtime.memGetInfo()[1] // SHARE, preset
        self.made: Counter[str] = Counter()

    def malloc_postprocess(
        self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int
    ) -> None:
        """Note an allocation; CuPy calls this."""
        if size < self._least or not mem_ptr:  # 0 where memory ran out
            return
        line = program_line()
        self.made[line] = max(self.made[line], size)
        if self._preset is not None:
            memory = cupy.cuda.UnownedMemory(mem_ptr, size, self, device_id)
            whole = cupy.ndarray(size, "u1", cupy.cuda.MemoryPointer(memory, 0))
            umem.preset(whole, self._preset)
