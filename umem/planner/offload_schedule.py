"""The schedule of offloading: the values, and when each leaves memory and begins to be fetched.

A sent value leaves memory as soon as its copy is over; if the next call needs the room earlier, the
call waits for the copy. Values are fetched in the order of their use, each as early as it has room
until its use. So no copy begins later than it could in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from umem.planner.graph import Graph
from umem.planner.link import Key, Link, LinkClock, Move
from umem.planner.link_timetable import OffloadWindow, Timetable, timetable
from umem.planner.plans import Plan, Reruns
from umem.planner.rematerialize import plan_of

NEVER_LESS = 1 + 1e-12
"""A step within this factor of the time with all values kept counts as the quickest."""


class OffloadTimes(NamedTuple):
    """The time for which one value or function state is offloaded.

    Attributes:
        one: the value or function state.
        leaves: the call of forward after which its bytes are free.
        fetched: the step of backward before which its fetch begins, by its place in the
            timetable's ``step_starts``.
    """

    one: OffloadWindow
    leaves: int
    fetched: int


def _forward(
    table: Timetable, items: Sequence[OffloadWindow], budget: int, clock: LinkClock
) -> dict[Key, int] | None:
    """Return by key the call of forward after which its bytes are free; None: no fit."""
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
    """Return by key the place of the step of backward before which it is fetched; None: no fit."""
    used, cost, fetched = np.array(table.used, np.int64), table.cost, dict[Key, int]()
    order = sorted(items, key=lambda one: (one.first, one.key))
    away = sum(one.nbytes for one in order)
    ends = [*table.step_starts[1:], len(cost)]
    next_ = waits = 0
    free_from = -1  # the computation from which on the next one has room
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


def choose_offloaded(table: Timetable, budget_bytes: int) -> list[OffloadWindow] | None:
    """Choose the values to offload, so that the step fits a budget; None: it cannot.

    When memory is short, the value whose next use is latest is offloaded (Belady 1966).
    """
    found: list[OffloadWindow] = []
    back = [0] * (len(table.used) + 1)
    ready: list[tuple[int, int, int]] = []  # a heap, the value used last in backward first
    away = next_ = 0
    for at, used in enumerate(table.used):
        away -= back[at]
        while next_ < len(table.windows) and table.windows[next_].last < at:
            one = table.windows[next_]
            heappush(ready, (-one.first, -one.nbytes, next_))
            next_ += 1
        while used - away > budget_bytes:
            if not ready:
                return None
            one = table.windows[heappop(ready)[2]]
            if one.back <= at:
                return None
            found.append(one)
            away += one.nbytes
            back[one.back] += one.nbytes
    return found


# -- whole plans -------------------------------------------------------------------------------


class Decision(NamedTuple):
    """Recomputations and copies of a step whose forward runs in the order of the nodes.

    ``seconds`` is the time of the step, in units of cost.
    """

    graph: Graph
    reruns: Reruns
    table: Timetable
    seconds: float
    copies: tuple[OffloadTimes, ...]


def is_best(decision: Decision) -> bool:
    """Tell whether no decision can be quicker: no recomputation, and no waiting for copies."""
    g = decision.graph.numbered
    return decision.seconds <= (sum(g.cost) + sum(g.backward_cost)) * NEVER_LESS


def rank(decision: Decision) -> tuple[float, int]:
    """Return the sort key of decisions: seconds to twelve digits, then bytes over the link."""
    moved = sum(way.one.nbytes for way in decision.copies)
    return float(f"{decision.seconds:.12g}"), moved


def decided(graph: Graph, reruns: Reruns, budget_bytes: int, link: Link) -> Decision | None:
    """Decide on offloading, as much as a budget requires, for given recomputations; None: no fit.

    Copies begin as early as can be. Cost: proportional to the computations.

    Args:
        graph: the graph, with its nodes in the order of forward.
        reruns: the recomputations.
        budget_bytes: the most bytes at once.
        link: the link to the offload target.
    """
    table = timetable(graph, reruns, link)
    chosen = choose_offloaded(table, budget_bytes)
    if chosen is None:
        return None
    items = sorted(chosen, key=lambda one: (one.last, -one.first, one.key))
    clock = LinkClock(link)
    left = _forward(table, items, budget_bytes, clock)
    if left is None:
        return None
    fetched = _backward(table, items, budget_bytes, clock)
    if fetched is None:
        return None
    copies = tuple(OffloadTimes(one, left[one.key], fetched[one.key]) for one in items)
    return Decision(graph, reruns, table, clock.now, copies)


def plan_of_decision(decision: Decision, budget_bytes: int, link: Link, method: str) -> Plan:
    """Make the plan of a decision, with its moves over the link."""
    names, table = decision.graph.names, decision.table
    moves = tuple(
        Move(
            names[way.one.key[1]],
            way.one.key[0],
            names[way.leaves],
            names[table.step_of[way.fetched]],
        )
        for way in decision.copies
    )
    return plan_of(decision.graph, decision.reruns, budget_bytes, method, moves, link)
