"""The arrays to move while each operation runs.

A pure function of a learned order. It walks the order as if it repeated for ever, with whole
arrays in ``capacity`` bytes of VRAM. Where the arrays of the next operations have no room, what
is used again furthest in the future gives way: Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5 (1966).

Differs from it: what gives way is sent as soon as its last use before that is over, while the
link may be idle, rather than when the room is needed; arrays that die within the window stay,
because their memory comes back for nothing; arrays below one block stay, because sending one
takes its neighbours along.

Models: sizes, births and deaths of arrays. Does not model: blocks, the pool's gaps, workspace.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

from umem.planner.prefetch.order import Order
from umem.units import BLOCK_BYTES

ROOM = 0.9
"""The share of usable VRAM to plan with; gaps in the pool and workspace take the rest."""
ROUNDS = 3
"""The second round starts as every later one; its moves of the end are noted in the third."""


@dataclass(frozen=True)
class MovePlan:
    """For each operation, the slots to bring to the GPU and to send to the host while it runs.

    There are none at all where all arrays have room.
    """

    fetches: tuple[tuple[int, ...], ...]
    sends: tuple[tuple[int, ...], ...]

    @property
    def any(self) -> bool:
        """Tell whether anything moves at all."""
        return any(self.sends) or any(self.fetches)


NOTHING = MovePlan((), ())


def plan_moves(order: Order, depth: int, capacity_bytes: int) -> MovePlan:
    """The moves that keep the arrays of ``depth`` operations ahead in VRAM.

    Fetched is what exists and has room, once for each operation that will use it, resident or
    not: asking for what is there moves nothing, and makes it the last that the driver evicts.

    Cost: three passes over the order; evictions cost the logarithm of the arrays in VRAM.
    """
    walk = _Walk(order, depth, capacity_bytes)
    for _ in range(ROUNDS):
        walk.round()
    if not walk.short:
        return NOTHING
    return MovePlan(tuple(map(tuple, walk.fetches)), tuple(map(tuple, walk.sends)))


@dataclass
class _Walk:
    """The state of the walk: what is in VRAM, and when each of it is used next.

    Times are operations counted over all rounds.
    """

    order: Order
    depth: int
    capacity: int
    short: bool = False
    fetches: list[list[int]] = field(default_factory=list)
    sends: list[list[int]] = field(default_factory=list)
    _resident: set[int] = field(default_factory=set)
    _used: int = 0
    _start: int = 0
    _handled: set[tuple[int, int]] = field(default_factory=set)
    _last_use: dict[int, int] = field(default_factory=dict)
    _next_use: dict[int, float] = field(default_factory=dict)
    _heap: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._touched = [tuple(dict.fromkeys((*s.reads, *s.writes))) for s in self.order.steps]
        self._uses: dict[int, list[int]] = {}
        for number, slots in enumerate(self._touched):
            for slot in slots:
                self._uses.setdefault(slot, []).append(number)
        self._deaths: dict[int, list[int]] = {}
        for slot, end in self.order.ends.items():
            self._deaths.setdefault(end, []).append(slot)

    def round(self) -> None:
        """Walk the order once."""
        self.short, self.fetches = False, []
        self.sends = [[] for _ in self._touched]
        for slot in [s for s in self._resident if s not in self.order.kept]:
            self._leave(slot)
        later = {slot: iter(uses[1:]) for slot, uses in self._uses.items()}
        for k, slots in enumerate(self._touched):
            for slot in self._deaths.get(k, ()):
                self._leave(slot)
            for slot in slots:
                self._touch(slot, k, next(later[slot], None))
            self.fetches.append(self._look_ahead(k))
            self._handled -= {(self._start + k + 1, slot) for slot in slots}
        self._start += len(self._touched)

    def _touch(self, slot: int, k: int, after: int | None) -> None:
        self._enter(slot)
        use: float = inf
        if after is not None:
            use = self._start + after
        elif slot in self.order.kept:
            use = self._start + len(self._touched) + self._uses[slot][0]
        self._last_use[slot], self._next_use[slot] = self._start + k, use
        if self.order.sizes[slot] >= BLOCK_BYTES:
            heapq.heappush(self._heap, (-use, slot))

    def _look_ahead(self, k: int) -> list[int]:
        """Make room for the operations after ``k``; returns what is new among their arrays."""
        fetches: list[int] = []
        unborn: dict[int, int] = {}
        for number in range(k + 1, k + 1 + self.depth):
            for slot in self._touched[number % len(self._touched)]:
                exists = self._exists(slot, k, number)
                if slot not in self._resident and slot not in unborn:
                    size = self.order.sizes[slot]
                    if not self._make_room(size + sum(unborn.values()), k):
                        return fetches
                    if exists:
                        self._enter(slot)
                    else:
                        unborn[slot] = size
                use = (self._start + number, slot)
                if exists and use not in self._handled:
                    fetches.append(slot)
                    self._handled.add(use)
        return list(dict.fromkeys(fetches))

    def _exists(self, slot: int, k: int, number: int) -> bool:
        """Tell whether an array is there during operation ``k`` that ``number`` will use."""
        if slot in self.order.kept:
            return True
        return number < len(self._touched) and self._uses[slot][0] <= k

    def _make_room(self, nbytes: int, k: int) -> bool:
        while self._used + nbytes > self.capacity:
            self.short = True
            slot = self._furthest(k)
            if slot is None:
                return False
            self._leave(slot)
            self.sends[self._last_use[slot] % len(self._touched)].append(slot)
        return True

    def _furthest(self, k: int) -> int | None:
        """The array that is used again last of all, None if that is within the window."""
        while self._heap:
            use, slot = -self._heap[0][0], self._heap[0][1]
            stale = slot not in self._resident or self._next_use[slot] != use
            if not stale and use <= self._start + k + self.depth:
                return None
            heapq.heappop(self._heap)
            end = self.order.ends.get(slot, len(self._touched))
            dies = use == inf and end <= k + self.depth
            if not stale and not dies:
                return slot
        return None

    def _enter(self, slot: int) -> None:
        if slot not in self._resident:
            self._resident.add(slot)
            self._used += self.order.sizes[slot]

    def _leave(self, slot: int) -> None:
        if slot in self._resident:
            self._resident.discard(slot)
            self._used -= self.order.sizes[slot]
