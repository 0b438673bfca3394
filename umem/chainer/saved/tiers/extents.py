"""Places in a file that does not grow while places are free."""

from __future__ import annotations

import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

PAGE = mmap.ALLOCATIONGRANULARITY
"""What can be mapped begins at a multiple of it."""
MOST_MAPPINGS = 1 << 14
"""So many arrays are mapped at a time, or half of the file descriptors: each takes one."""


def most_mappings() -> int:
    """How many arrays are mapped at a time: others need file descriptors, too."""
    import resource  # POSIX has it

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_MAPPINGS if descriptors < 0 else min(MOST_MAPPINGS, descriptors // 2)


class Extent:
    """Bytes of the file, held by whoever reads or writes there; free when nobody does."""

    __slots__ = ("__weakref__", "nbytes", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes


class Extents:
    """The places of a file, in whole pages: the smallest free one that fits, else the file grows.

    Attributes:
        end_bytes: the size of the file.

    Thread-safety: `take` is for one thread at a time; extents may die in any, at any moment.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._free: list[tuple[int, int]] = []  # start and end, in order, never touching
        self._dead: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int, may_grow: Callable[[int], bool]) -> Extent | None:
        """Return a place of at least this size; None where there is none and it may not grow."""
        while self._dead:
            self._give_back(*self._dead.popleft())
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

    def _give_back(self, start: int, end: int) -> None:
        joined = [span for span in self._free if span[1] == start or span[0] == end]
        for span in joined:
            self._free.remove(span)
        lows, highs = zip((start, end), *joined, strict=True)
        insort(self._free, (min(lows), max(highs)))
