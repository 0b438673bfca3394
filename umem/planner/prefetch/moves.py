"""The blocks to move while each operation runs, so that the driver never chooses itself.

A pure function of the blocks that an iteration uses; the iteration repeats for ever in ``capacity``
blocks of VRAM. If they do not fit, some blocks must be out of VRAM while they are not used: sent to
the host and fetched again, which is two copies over the link; only sent, if the program still holds
an array that it no longer uses; or discarded at almost no cost, if every array in them has died.

Choosing the blocks is a set cover of the operations that are short of room, by the times for which
blocks are out of VRAM, at the least cost. Two rules are tried, and the cheaper plan is taken. One
takes repeatedly the time that covers most for its cost (Chvatal, "A greedy heuristic for the
set-covering problem", Mathematics of Operations Research 4, 1979). The other takes, operation by
operation, the time that reaches furthest for its cost, which is Belady's rule if all costs are
equal (IBM Systems Journal 5, 1966).

Blocks are sent right after their last use, and fetched as early as there is room, at most ``depth``
operations ahead of their next use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from umem.planner.prefetch.block_footprint import Footprint, Gap

BOTH_WAYS, ONE_WAY, READY = 2.0, 1.0, 0.05
"""Costs of a block that is sent and fetched, of one that is only sent, and of a discarded one.

The first two count copies over the link. The third is a guess: a discarded block is not copied.
"""
COSTS = BOTH_WAYS, ONE_WAY, READY


class SomeBlocks(NamedTuple):
    """Some blocks, and the slots whose arrays are in all of them."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass
class Moves:
    """Moves to make after an operation was issued: first discard, then send, then fetch.

    ``ready``: blocks to make ready in VRAM, whose contents are not needed.
    """

    discards: list[SomeBlocks] = field(default_factory=list)
    sends: list[SomeBlocks] = field(default_factory=list)
    fetches: list[SomeBlocks] = field(default_factory=list)
    ready: list[SomeBlocks] = field(default_factory=list)


MovePlan = Sequence[Moves]
"""The moves of each operation; empty if everything has room."""
NOTHING: MovePlan = ()


class _Way(NamedTuple):
    """A time for which a gap's blocks can be out of VRAM: from ``start`` until before ``stop``."""

    gap: Gap
    start: int
    stop: int
    cost: float


def plan_moves(used: Footprint, depth: int, capacity: int) -> MovePlan:
    """Plan the moves that keep each operation's blocks in VRAM of ``capacity`` blocks.

    Cost: n log n in the ways to make room, and proportional to the operations for each taken way.
    """
    if not _Room(used, capacity).is_short:
        return NOTHING
    tried = [choose(used, _Room(used, capacity)) for choose in (_by_gain, _in_order)]
    room, taken = min(tried, key=lambda pair: (pair[0].shortage, _price(pair[1])))
    plan = [Moves() for _ in used.used]
    for gap in sorted(used.gaps, key=lambda gap: gap.next):
        contents, early, dead = (taken.get((id(gap), cost), 0) for cost in COSTS)
        if contents:
            _send(plan, gap, contents)
            _bring_back(plan, room, gap, contents, depth)
        if early or dead:
            _send(plan, gap, early)
            _discard(plan, room, gap, early, dead, depth)
    return plan


class _Room:
    """The number of blocks that each operation lacks; a negative number is spare room."""

    def __init__(self, used: Footprint, capacity: int) -> None:
        self.count = len(used.used)
        self._short = np.array(used.used, np.int64) - capacity
        for gap in used.gaps:
            self.take(gap.last + 1, gap.next, len(gap.group.blocks))
        self._tallied: Any = None

    @property
    def is_short(self) -> bool:
        """True if any operation lacks room."""
        return bool((self._short > 0).any())

    @property
    def shortage(self) -> int:
        """Return the number of missing blocks, summed over the operations."""
        return int(self._short.clip(0).sum())

    def from_the_emptiest(self) -> Iterator[int]:
        """Iterate over the operations in cyclic order, beginning with the one with most room."""
        first = int(self._short.argmin())
        return ((first + number) % self.count for number in range(self.count))

    def take(self, start: int, stop: int, blocks: int) -> None:
        """Count blocks as in VRAM from ``start`` until before ``stop``; negative: as out of it."""
        self._tallied = None
        for low, high in self._pieces(start, stop):
            self._short[low:high] += blocks

    def worst(self, start: int, stop: int) -> int:
        """Return the most blocks that an operation in a range lacks."""
        return max((int(self._short[a:b].max()) for a, b in self._pieces(start, stop)), default=0)

    def short_count(self, start: int, stop: int) -> int:
        """Return the number of operations in a range that lack room."""
        if self._tallied is None:
            lacks = self._short > 0
            self._tallied = np.concatenate(([0], np.cumsum(np.concatenate((lacks, lacks)))))
        return int(self._tallied[stop] - self._tallied[start])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        if start < self.count:
            yield start, min(stop, self.count)
        if stop > self.count:
            yield max(0, start - self.count), stop - self.count


def _ways(gap: Gap) -> Iterator[_Way]:
    """Yield the ways to use a gap; a death is known when the next operation begins."""
    if gap.death is None or gap.death >= gap.next - 1:
        yield _Way(gap, gap.last + 1, gap.next, BOTH_WAYS)
        return
    yield _Way(gap, gap.death + 1, gap.next, READY)
    yield _Way(gap, gap.last + 1, gap.death + 1, ONE_WAY)


Taken = dict[tuple[int, float], int]
"""The number of blocks that take each way, by the id of its gap and the way's cost."""


def _price(taken: Taken) -> float:
    return sum(cost * blocks for (_, cost), blocks in taken.items())


def _take(room: _Room, taken: Taken, way: _Way, blocks: int) -> int:
    """Take a way for at most ``blocks`` of its blocks not taken yet; return their number."""
    key = id(way.gap), way.cost
    blocks = min(blocks, len(way.gap.group.blocks) - taken.get(key, 0))
    if blocks > 0:
        room.take(way.start, way.stop, -blocks)
        taken[key] = taken.get(key, 0) + blocks
    return blocks


def _by_gain(used: Footprint, room: _Room) -> tuple[_Room, Taken]:
    """Repeatedly take the way that covers most short operations for its cost."""
    taken: Taken = {}
    numbers = count()
    ways = [way for gap in used.gaps for way in _ways(gap)]
    heap = [(-room.short_count(way.start, way.stop) / way.cost, next(numbers), way) for way in ways]
    heapq.heapify(heap)
    while heap:
        known, number, way = heapq.heappop(heap)
        gain = room.short_count(way.start, way.stop) / way.cost
        if not gain:
            continue
        if gain == -known and not _take(room, taken, way, room.worst(way.start, way.stop)):
            continue
        heapq.heappush(heap, (-gain, number, way))
    return room, taken


def _in_order(used: Footprint, room: _Room) -> tuple[_Room, Taken]:
    """Take, for each operation that is short, the ways that reach furthest for their cost."""
    taken: Taken = {}
    at: list[list[_Way]] = [[] for _ in used.used]
    for gap in used.gaps:
        for way in _ways(gap):
            for time in range(way.start, way.stop):
                at[time % room.count].append(way)
    for time in room.from_the_emptiest():
        lacking = room.worst(time, time + 1)
        if lacking > 0:
            for way in sorted(at[time], key=lambda way: -_reach(room, way, time)):
                lacking -= _take(room, taken, way, lacking)
                if lacking <= 0:
                    break
    return room, taken


def _reach(room: _Room, way: _Way, time: int) -> float:
    """Return the number of short operations a way covers from ``time`` on, over its cost ** 1.5.

    The power is a guess: no bench compares others.
    """
    start = time if time >= way.start else time + room.count
    return float(room.short_count(start, way.stop) / way.cost**1.5)


def _send(plan: list[Moves], gap: Gap, blocks: int) -> None:
    """Plan to send the last ``blocks`` blocks of a gap after their last use."""
    if blocks:
        plan[gap.last].sends.append(_part(gap, 0, blocks))


def _bring_back(plan: list[Moves], room: _Room, gap: Gap, blocks: int, depth: int) -> None:
    """Plan to fetch the last ``blocks`` blocks of a gap, ``depth`` operations ahead at most."""
    part = _part(gap, 0, blocks)
    _before(plan, room, gap, blocks, max(gap.last + 1, gap.next - depth + 1)).fetches.append(part)


def _discard(plan: list[Moves], room: _Room, gap: Gap, early: int, dead: int, depth: int) -> None:
    """Plan to discard blocks whose arrays died, and to make them ready before their next use."""
    assert gap.death is not None
    blocks = max(early, dead)
    room.take(gap.death + 1, gap.next, dead - blocks)
    part = _part(gap, 0, blocks)
    plan[gap.death % len(plan)].discards.append(part)
    _before(plan, room, gap, blocks, max(gap.death + 1, gap.next - depth + 1)).ready.append(part)


def _before(plan: list[Moves], room: _Room, gap: Gap, blocks: int, first: int) -> Moves:
    """Return the earliest moves after which there is room for the blocks until the gap's end.

    They are the moves of operation ``first - 1`` at the earliest. The blocks are counted as in
    VRAM.
    """
    start = gap.next
    while start > first and room.worst(start - 1, start) <= -blocks:
        start -= 1
    room.take(start, gap.next, blocks)
    return plan[(start - 1) % len(plan)]


def _part(gap: Gap, low: int, high: int) -> SomeBlocks:
    """Return a range of the gap's blocks, counted from the last."""
    blocks, stop = gap.group.blocks, len(gap.group.blocks)
    return SomeBlocks(blocks[stop - high : stop - low], gap.group.slots)
