"""The blocks of CuPy's pools in one allocation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class PoolBlocks:
    """The blocks of one allocation. A later block removes the blocks that it overlaps.

    Not thread-safe. Costs a binary search for each block.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, low: int, high: int) -> None:
        """Add a block at addresses ``low`` to ``high``."""
        first = bisect_right(self._ends, low)  # blocks do not overlap: ends ascend, too
        last = bisect_left(self._starts, high)
        self._starts[first:last], self._ends[first:last] = [low], [high]

    def end_of(self, address: int) -> int | None:
        """Return the end of the block that contains an address; None if there is none."""
        index = bisect_right(self._ends, address)
        is_inside = index < len(self._starts) and self._starts[index] <= address
        return self._ends[index] if is_inside else None
