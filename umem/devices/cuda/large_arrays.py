"""Finds the large arrays of a CuPy program and the lines that make them, and applies advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cupy

from umem._common.stacks import program_line

SHARE = 8
"""An array is large from this share of VRAM on: advice for one array is worth a line of code for
the few arrays that fill the GPU, and eight such arrays do. A choice that no measurement supports.
"""


class LargeArrays(cupy.cuda.MemoryHook):
    """Follows CuPy's allocations of an eighth of VRAM or more, inside the block.

    Args:
        advise: called with each new array as an array of bytes; None calls nothing.

    Attributes:
        made: for each line of the program, the bytes of its largest array.
    """

    def __init__(self, advise: Callable[[Any], object] | None = None) -> None:
        self.name = f"umem LargeArrays {id(self):x}"  # CuPy has one hook of a name
        self._least, self._advise = cupy.cuda.runtime.memGetInfo()[1] // SHARE, advise
        self.made: Counter[str] = Counter()

    def malloc_postprocess(
        self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int
    ) -> None:
        """Note an allocation; CuPy calls this."""
        if size < self._least or not mem_ptr:  # 0 where memory ran out
            return
        line = program_line()
        self.made[line] = max(self.made[line], size)
        if self._advise is not None:
            memory = cupy.cuda.UnownedMemory(mem_ptr, size, self, device_id)
            self._advise(cupy.ndarray(size, "u1", cupy.cuda.MemoryPointer(memory, 0)))
