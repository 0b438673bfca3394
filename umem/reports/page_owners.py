"""Division of moves of pages among the arrays in those pages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from umem._common.stacks import Places, Reader
from umem.devices import PageMove

ELSEWHERE = "memory from before the block, of other threads or inside of operations"


class PagePart(NamedTuple):
    """The part of a move in one array; ``low`` and ``high`` are shares of the array."""

    move: PageMove
    place: str
    nbytes: int
    low: float
    high: float


class OwnedRange(NamedTuple):
    """The memory of an array, the time of its allocation, and the frames that allocated it."""

    seconds: float
    address: int
    nbytes: int
    places: Places


def divided(moves: Iterable[PageMove], arrays: Iterable[OwnedRange]) -> Iterator[PagePart]:
    """Yield the moves by time, divided among the arrays that were allocated there last.

    A freed array keeps its bytes until a later array has them. The last array of a page also gets
    the page's bytes that no array has; the first gets its faults.
    """
    reader, owners = Reader(), Owners()
    names: dict[Places, str] = {}
    by_time = sorted(arrays, key=lambda array: array.seconds)
    index = 0
    for move in sorted(moves, key=lambda move: move.seconds):
        while index < len(by_time) and by_time[index].seconds <= move.seconds:
            owners.own(by_time[index])
            index += 1
        rest = move.nbytes
        overlaps = list(owners.overlaps(move.address, move.stop))
        if not overlaps:
            yield PagePart(move, ELSEWHERE, rest, 0.0, 1.0)
        for number, (low, high, array) in enumerate(overlaps):
            if array.places not in names:
                stack = reader.read(array.places)
                names[array.places] = str(stack[0]) if stack else "an unknown line"
            begin = (low - array.address) / array.nbytes
            end = (high - array.address) / array.nbytes
            nbytes = rest if number == len(overlaps) - 1 else min(rest, high - low)
            rest -= nbytes
            yield PagePart(move, names[array.places], nbytes, begin, end)
            move = move._replace(gpu_faults=0, host_faults=0)


class Owners:
    """The last array at each byte of the address space."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._owned: list[tuple[int, OwnedRange]] = []  # where the range ends, and whose it is

    def own(self, array: OwnedRange) -> None:
        """Give an array its range, and remove the range from earlier arrays."""
        low, high = array.address, array.address + array.nbytes
        first, last = self._touched(low, high)
        kept: list[tuple[int, int, OwnedRange]] = [(low, high, array)]
        for start, (stop, other) in zip(
            self._starts[first:last], self._owned[first:last], strict=True
        ):
            if start < low:
                kept.append((start, low, other))
            if stop > high:
                kept.append((high, stop, other))
        kept.sort(key=lambda one: one[0])
        self._starts[first:last] = [start for start, _, _ in kept]
        self._owned[first:last] = [(stop, one) for _, stop, one in kept]

    def overlaps(self, low: int, high: int) -> Iterator[tuple[int, int, OwnedRange]]:
        """Yield the owned parts of a range."""
        first, last = self._touched(low, high)
        for index in range(first, last):
            stop, array = self._owned[index]
            yield max(low, self._starts[index]), min(high, stop), array

    def _touched(self, low: int, high: int) -> tuple[int, int]:
        """Return the first range that ends behind ``low``, and the first that begins at ``high``
        or later.
        """
        first = bisect_right(self._starts, low)
        if first and self._owned[first - 1][0] > low:
            first -= 1
        return first, bisect_left(self._starts, high)
