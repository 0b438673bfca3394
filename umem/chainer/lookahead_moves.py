"""Which arrays to move while which operation runs.

A pure function of a learned order. It walks the order twice, as if it repeated for ever, with
whole arrays in ``capacity`` bytes of VRAM, and notes what it does the second time. What goes out
is what is used again furthest in the future, and only as much as there must be room for: Belady,
"A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (1966).

Differs from it: an array that dies within the window is left where it is, because its memory
comes back for nothing; what the operation at hand uses stays until the next.

Models: sizes, births and deaths of arrays. Does not model: blocks, the pool's gaps, workspace.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

from umem.chainer.order import Order


@dataclass(frozen=True)
class Moves:
    """For each operation, the slots to send to the host, and then those to bring to the GPU.

    Both are empty everywhere where all arrays have room.
    """

    sends: tuple[tuple[int, ...], ...]
    fetches: tuple[tuple[int, ...], ...]

    @property
    def any(self) -> bool:
        """Whether anything moves at all."""
        return any(self.sends) or any(self.fetches)


def plan_moves(order: Order, depth: int, capacity_bytes: int) -> Moves:
    """The moves that keep the arrays of ``depth`` operations ahead in VRAM.

    Cost: about one pass over the order; evictions cost the logarithm of the arrays in VRAM.
    """
    walk = _Walk(order, depth, capacity_bytes)
    walk.round(0)
    first = walk.round(1)
    return first


@dataclass
class _Walk:
    """The state of the walk: what is in VRAM, and when each of it is used next."""

    order: Order
    depth: int
    capacity: int
    resident: set[int] = field(default_factory=set)
    used: int = 0
    next_use: dict[int, float] = field(default_factory=dict)
    heap: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = self.order.steps
        self.touched = [tuple(dict.fromkeys((*step.reads, *step.writes))) for step in steps]
        self.touches: dict[int, list[int]] = {}
        for number, slots in enumerate(self.touched):
            for slot in slots:
                self.touches.setdefault(slot, []).append(number)
        self.deaths: dict[int, list[int]] = {}
        for slot, end in self.order.ends.items():
            self.deaths.setdefault(end, []).append(slot)

    def round(self, number: int) -> Moves:
        """Walk the order once."""
        count = len(self.touched)
        for slot in [s for s in self.resident if s not in self.order.kept]:
            self._leave(slot)
        self.later = {slot: iter(touches[1:]) for slot, touches in self.touches.items()}
        sends, fetches = [], []
        for k in range(count):
            for slot in self.deaths.get(k, ()):
                self._leave(slot)
            self._touch(k, number * count)
            out, into = self._look_ahead(k, number * count)
            sends.append(tuple(out))
            fetches.append(tuple(into))
            for slot in self.touched[k]:  # from the next operation on they may go
                heapq.heappush(self.heap, (-self.next_use[slot], slot))
        return Moves(tuple(sends), tuple(fetches))

    def _touch(self, k: int, base: int) -> None:
        count = len(self.touched)
        for slot in self.touched[k]:
            self._enter(slot)
            after = next(self.later[slot], None)
            if after is not None:
                self.next_use[slot] = base + after
            elif slot in self.order.kept:
                self.next_use[slot] = base + count + self.touches[slot][0]
            else:
                self.next_use[slot] = inf

    def _look_ahead(self, k: int, base: int) -> tuple[list[int], list[int]]:
        """Make room for the operations after ``k``, and bring in what exists of their arrays."""
        sends: list[int] = []
        fetches: list[int] = []
        unborn: set[int] = set()
        room = 0
        for j in range(k + 1, k + 1 + self.depth):
            wraps, number = divmod(j, len(self.touched))
            for slot in self.touched[number]:
                if slot in self.resident or slot in unborn:
                    continue
                size = self.order.sizes[slot]
                if not self._make_room(size + room, k, base, sends):
                    return sends, fetches
                exists = slot in self.order.kept or (not wraps and self.touches[slot][0] <= k)
                if exists:
                    self._enter(slot)
                    fetches.append(slot)
                else:
                    unborn.add(slot)
                    room += size
        return sends, fetches

    def _make_room(self, nbytes: int, k: int, base: int, sends: list[int]) -> bool:
        while self.used + nbytes > self.capacity:
            slot = self._furthest(k, base)
            if slot is None:
                return False
            self._leave(slot)
            sends.append(slot)
        return True

    def _furthest(self, k: int, base: int) -> int | None:
        """The array that is used again last of all, if that is after the window."""
        while self.heap:
            use, slot = self.heap[0]
            stale = slot not in self.resident or self.next_use[slot] != -use
            if not stale and -use <= base + k + self.depth:
                return None
            heapq.heappop(self.heap)
            dies = -use == inf and self.order.ends.get(slot, len(self.touched)) <= k + self.depth
            if not stale and not dies:
                return slot
        return None

    def _enter(self, slot: int) -> None:
        if slot not in self.resident:
            self.resident.add(slot)
            self.used += self.order.sizes[slot]

    def _leave(self, slot: int) -> None:
        if slot in self.resident:
            self.resident.discard(slot)
            self.used -= self.order.sizes[slot]
