"""What of a plan's values is moved, when each leaves, and when each comes back.

What is sent leaves as soon as its copy is over, and before that only where the next call needs its
room: then that waits. What comes back is fetched in the order of its use, each as early as there
is room up to its use. So no copy begins later than it could in that order, and nothing waits that
need not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from umem.planner.graph import Graph
from umem.planner.link import Key, Link, LinkClock, Move
from umem.planner.plans import Plan
from umem.planner.reruns import Reruns, plan_of
from umem.planner.timetable import OffloadWindow, Timetable, timetable

NEVER_LESS = 1 + 1e-12
"""A time within this of what keeping all takes is as good."""


class Transfer(NamedTuple):
    """One absence: the call of forward after which it begins, and the turn at which it is fetched.

    Attributes:
        one: what is away.
        leaves: the place of that call.
        fetched: the place in the timetable's step_starts.
    """

    one: OffloadWindow
    leaves: int
    fetched: int


class Transfers(NamedTuple):
    """What is moved, and the time of the step."""

    seconds: float
    copies: tuple[Transfer, ...]


def schedule_transfers(
    table: Timetable, chosen: Iterable[OffloadWindow], budget_bytes: int, link: Link
) -> Transfers | None:
    """Send, let go and fetch these as early as can be; None: they do not fit the budget.

    Cost: proportional to the computations.
    """
    items = sorted(chosen, key=lambda one: (one.last, -one.first, one.key))
    clock = LinkClock(link)
    left = _forward(table, items, budget_bytes, clock)
    if left is None:
        return None
    fetched = _backward(table, items, budget_bytes, clock)
    if fetched is None:
        return None
    transfers = tuple(Transfer(one, left[one.key], fetched[one.key]) for one in items)
    return Transfers(clock.now, transfers)


def _forward(
    table: Timetable, items: Sequence[OffloadWindow], budget: int, clock: LinkClock
) -> dict[Key, int] | None:
    """By what is moved, the call after which it leaves."""
    used, cost, left = table.used, table.cost, dict[Key, int]()
    queue: deque[tuple[float, OffloadWindow]] = deque()
    away = next_ = 0
    for at in range(table.calls):
        while used[at] - away > budget and queue:
            done, one = queue.popleft()
            clock.now = max(clock.now, done)
            left[one.key] = at - 1
            away += one.nbytes
        if used[at] - away > budget:
            return None
        clock.run(cost[at])
        while next_ < len(items) and items[next_].last == at:
            one = items[next_]
            queue.append((clock.send(one.key, one.nbytes), one))
            next_ += 1
        while queue and queue[0][0] <= clock.now:
            done, one = queue.popleft()
            left[one.key] = at
            away += one.nbytes
    for done, one in queue:
        clock.now = max(clock.now, done)
        left[one.key] = table.calls - 1
    return left


def _backward(
    table: Timetable, items: Sequence[OffloadWindow], budget: int, clock: LinkClock
) -> dict[Key, int] | None:
    """By what is moved, the turn at which it is fetched."""
    used, cost, fetched = np.array(table.used, np.int64), table.cost, dict[Key, int]()
    order = sorted(items, key=lambda one: (one.first, one.key))
    away = sum(one.nbytes for one in order)
    ends = [*table.step_starts[1:], len(cost)]
    next_ = waits = 0
    free_from = -1  # the place from which on there is room for the next one
    for turn, (begin, end) in enumerate(zip(table.step_starts, ends, strict=True)):
        while next_ < len(order):
            one = order[next_]
            if free_from < 0:
                full = np.flatnonzero(used[begin : one.back] > budget + away - one.nbytes)
                free_from = begin + int(full[-1]) + 1 if full.size else begin
            if begin < free_from:
                break
            clock.fetch(one.key, one.nbytes)
            fetched[one.key] = turn
            away -= one.nbytes
            next_, free_from = next_ + 1, -1
        for at in range(begin, end):
            if table.used[at] - away > budget:
                return None
            while waits < next_ and order[waits].first == at:
                clock.wait(order[waits].key)
                waits += 1
            clock.run(cost[at])
    return fetched


def choose_offloaded(
    table: Timetable,
    budget_bytes: int,
    chosen: Collection[OffloadWindow] = (),
    banned: Collection[OffloadWindow] = (),
) -> list[OffloadWindow] | None:
    """Choose what to move besides, so that it fits wherever that may be away; None: it cannot.

    Of what could be away where there is no room, that goes which is used last (Belady 1966).
    """
    found, taken = list(chosen), {one.key for one in (*chosen, *banned)}
    change = [0] * (len(table.used) + 1)
    for one in found:
        change[one.last + 1] += one.nbytes
        change[one.back] -= one.nbytes
    others = [one for one in table.windows if one.key not in taken]
    ready: list[tuple[int, int, int]] = []  # a heap; what is used last is back last
    away = next_ = 0
    for at, used in enumerate(table.used):
        away += change[at]
        while next_ < len(others) and others[next_].last < at:
            heappush(ready, (-others[next_].first, -others[next_].nbytes, next_))
            next_ += 1
        while used - away > budget_bytes:
            if not ready:
                return None
            one = others[heappop(ready)[2]]
            if one.back <= at:
                return None
            found.append(one)
            away += one.nbytes
            change[one.back] -= one.nbytes
    return found


# -- whole plans -------------------------------------------------------------------------------


class Decision(NamedTuple):
    """What runs again and what is moved, of a graph whose forward has the order of its nodes."""

    graph: Graph
    reruns: Reruns
    table: Timetable
    transfers: Transfers

    @property
    def seconds(self) -> float:
        """The time of the step, in units of cost."""
        return self.transfers.seconds

    @property
    def moved(self) -> frozenset[Key]:
        """What is moved."""
        return frozenset(way.one.key for way in self.transfers.copies)

    @property
    def moved_bytes(self) -> int:
        """The bytes that go down."""
        return sum(way.one.nbytes for way in self.transfers.copies)


def is_best(decision: Decision) -> bool:
    """Tell whether nothing can be quicker: nothing runs again, and nothing waits."""
    g = decision.graph.numbered
    return decision.seconds <= (sum(g.cost) + sum(g.backward_cost)) * NEVER_LESS


def decided(
    graph: Graph,
    reruns: Reruns,
    budget_bytes: int,
    link: Link,
    moved: Collection[Key] = (),
    banned: Collection[Key] = (),
) -> Decision | None:
    """With this run again and this moved, as much moved besides as does not fit, but for what is
    banned; None: it does not fit even so.
    """
    table = timetable(graph, reruns, link)
    chosen = choose_offloaded(
        table,
        budget_bytes,
        [one for one in table.windows if one.key in moved],
        [one for one in table.windows if one.key in banned],
    )
    way = None if chosen is None else schedule_transfers(table, chosen, budget_bytes, link)
    return None if way is None else Decision(graph, reruns, table, way)


def plan_of_decision(decision: Decision, budget_bytes: int, link: Link, method: str) -> Plan:
    """The plan that carries decision out."""
    names, table = decision.graph.names, decision.table
    moves = tuple(
        Move(
            names[way.one.key[1]],
            way.one.key[0],
            names[way.leaves],
            names[table.step_of[way.fetched]],
        )
        for way in decision.transfers.copies
    )
    return plan_of(decision.graph, decision.reruns, budget_bytes, method, moves, link)
