"""Allocation of extents in a file or slab, which grows only if no free extent fits."""

from __future__ import annotations

import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

PAGE = mmap.ALLOCATIONGRANULARITY
"""Extents begin at a multiple of this many bytes, as a memory map must."""
MOST_MAPPINGS = 1 << 14
"""At most this many arrays are mapped at a time: each map takes one file descriptor.
A guess, below Linux's 65,530 maps a process (vm.max_map_count)."""


def most_mappings() -> int:
    """Return the most maps at a time: `MOST_MAPPINGS`, or half of the file descriptors."""
    import resource  # available on POSIX

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_MAPPINGS if descriptors < 0 else min(MOST_MAPPINGS, descriptors // 2)


class Extent:
    """A range of bytes of the file, allocated while this object is referenced."""

    __slots__ = ("__weakref__", "nbytes", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes


class Extents:
    """A best-fit allocator of whole pages in a file, which grows if no free extent fits.

    Attributes:
        end_bytes: the size of the file.

    Thread-safety: one thread at a time calls `take`; any thread may free extents, at any moment.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._free: list[tuple[int, int]] = []  # start and end, in order, never touching
        self._dead: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int, may_grow: Callable[[int], bool]) -> Extent | None:
        """Allocate the smallest free extent that fits, or grow the file.

        Args:
            nbytes: the least size.
            may_grow: called with the bytes to grow by; tells whether the file may.

        Returns:
            The extent; None if no free one fits and the file may not grow.
        """
        while self._dead:
            self._free_range(*self._dead.popleft())
        size = -(-nbytes // PAGE) * PAGE
        fits = [(end - start, start) for start, end in self._free if end - start >= size]
        if fits:
            length, start = min(fits)
            self._free.remove((start, start + length))
            if length > size:
                insort(self._free, (start + size, start + length))
        elif may_grow(size):
            start = self.end_bytes
            self.end_bytes += size
        else:
            return None
        extent = Extent(start, size)
        weakref.finalize(extent, self._dead.append, (start, start + size)).atexit = False
        return extent

    def _free_range(self, start: int, end: int) -> None:
        """Free a range, merged with the free ranges that touch it."""
        joined = [span for span in self._free if span[1] == start or span[0] == end]
        for span in joined:
            self._free.remove(span)
        lows, highs = zip((start, end), *joined, strict=True)
        insort(self._free, (min(lows), max(highs)))
