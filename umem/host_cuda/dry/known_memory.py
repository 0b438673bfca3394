"""A map of the known memory in a dry run, by address."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

KNOWN, GUESSED, UNKNOWN = range(3)
"""Levels: as on a GPU; zeros for a small skipped result; anything."""


class Origin(NamedTuple):
    """The state of a range, and its source.

    Attributes:
        level: `KNOWN`, `GUESSED` or `UNKNOWN`.
        name: the call that would have written the range.
        itemsize: bytes of an item, 0 if unknown.
        low: the start of the written range.
        weight: the flags that an item counts if all are set; 0 if it is not a count.
        is_running: whether each item also counts the items before it.
        is_whole: whether items are whole numbers or flags.
    """

    level: int
    name: str = ""
    itemsize: int = 0
    low: int = 0
    weight: float = 0.0
    is_running: bool = False
    is_whole: bool = False

    def count(self, number: int) -> int:
        """Return an item's value if all flags are set."""
        so_far = round(self.weight * (number + 1))
        return so_far if self.is_running else so_far - round(self.weight * number)


FULLY_KNOWN = Origin(KNOWN)


class KnownMemory:
    """A map of the whole address space into ranges of one origin; everything is known at first."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._origins: list[Origin] = [FULLY_KNOWN]

    def put(self, low: int, high: int, origin: Origin) -> None:
        """Set the origin of a range; joins adjacent ranges of one origin."""
        if low >= high:
            return
        starts, origins = self._starts, self._origins
        first = bisect_left(starts, low)
        end = bisect_right(starts, high)
        behind = origins[end - 1]  # of the range in which `high` lies
        new_starts, new_origins = [], []
        if not first or origins[first - 1] != origin:
            new_starts.append(low)
            new_origins.append(origin)
        if behind != origin:
            new_starts.append(high)
            new_origins.append(behind)
        starts[first:end], origins[first:end] = new_starts, new_origins

    def worst(self, low: int, high: int) -> Origin:
        """Return the origin with the lowest level in a range."""
        first = bisect_right(self._starts, low) - 1
        found = self._origins[first : bisect_left(self._starts, high)]
        return max(found, key=lambda origin: origin.level) if found else FULLY_KNOWN
