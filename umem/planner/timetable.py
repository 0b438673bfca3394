"""A plan's computations in order, the bytes in use during each, and what may be away meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from umem.planner.graph import Graph, Numbered
from umem.planner.link import Link
from umem.planner.link_clock import Key
from umem.planner.reruns import Reruns


class Absence(NamedTuple):
    """A value or a stash that is kept from forward into backward, and when it may be away.

    Attributes:
        key: what it is.
        nbytes: its bytes.
        last: the computation of forward that uses it last.
        first: the computation of backward that uses it first.
        back: the computation before which it has to be fetched at the latest: the first one of the
            step of backward that uses it first.
    """

    key: Key
    nbytes: int
    last: int
    first: int
    back: int


class Timetable(NamedTuple):
    """The computations of a step, in order: forward, then for each step what runs again, backward.

    Attributes:
        calls: how many of them are forward's.
        cost: what each costs.
        used: the bytes in use during each, with nothing moved.
        turns: where each step of backward begins, in order of time.
        step_of: by place in ``turns``, the node.
        absences: what may be moved.
    """

    calls: int
    cost: list[float]
    used: list[int]
    turns: list[int]
    step_of: list[int]
    absences: list[Absence]


def timetable(graph: Graph, reruns: Reruns, link: Link | None = None) -> Timetable:
    """Work out when what is computed. Cost: proportional to the calls and what they read.

    Without a link nothing may be moved.
    """
    g, count = graph.numbered, len(reruns)
    beside = _beside(graph)
    cost: list[float] = list(g.cost)
    used = [g.forward_bytes + workspace for workspace in g.workspace]
    made, turns, steps = list(range(count)), [], list(range(count - 1, -1, -1))
    for step in steps:
        turns.append(len(cost))
        before, during = beside[step]
        for v in reruns[step]:
            made.append(v)
            cost.append(g.cost[v])
            used.append(before + g.workspace[v])
        made.append(-1 - step)
        cost.append(g.backward_cost[step])
        used.append(during)
    turn_of = [0] * len(cost)
    for turn in turns:
        turn_of[turn] = turn
    turn_of = list(accumulate(turn_of, max))
    absences = []
    change = [0] * (len(cost) + 1)
    for key, start, end, last, first in _spans(g, made):
        nbytes = g.size[key[1]] if key[0] == "value" else g.stash[key[1]]
        change[start] += nbytes
        change[end + 1] -= nbytes
        if start < count <= end and link is not None and link.takes(nbytes):
            absences.append(Absence(key, nbytes, last, first, turn_of[first]))
    used = [own + there for own, there in zip(used, accumulate(change), strict=False)]
    absences.sort(key=lambda one: (one.last, -one.first, one.key))
    return Timetable(count, cost, used, turns, steps, absences)


def _spans(g: Numbered, made: list[int]) -> Iterator[tuple[Key, int, int, int, int]]:
    """From when to when which bytes are in use, their last use in forward, their first after it."""
    count = len(g.names)
    ends: dict[int, int] = {}
    whole: dict[int, list[tuple[int, int]]] = {}  # by what holds the bytes; a stash is below zero
    uses: dict[int, tuple[int, int]] = {}

    def use(cell: int, at: int) -> None:
        holder = g.root[cell] if cell >= 0 else cell
        last, first = uses.get(holder, (-1, -1))
        uses[holder] = (max(last, at), first) if at < count else (last, at)
        ends.setdefault(cell, at)

    def make(cell: int, at: int) -> None:
        use(cell, at)
        whole.setdefault(g.root[cell] if cell >= 0 else cell, []).append((at, ends.pop(cell)))

    for at in range(len(made) - 1, -1, -1):
        v = made[at]
        if v >= 0:
            make(v, at)
            if g.stash[v]:
                make(~v, at)
            for x in g.preds[v]:
                use(x, at)
        else:
            step = -1 - v
            for x in g.needs[step]:
                use(x, at)
            if g.stash[step]:
                use(~step, at)
    for holder, found in whole.items():
        key: Key = ("value", holder) if holder >= 0 else ("stash", ~holder)
        for start, end in _joined(found):
            yield (key, start, end, *uses[holder])


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans that overlap as one."""
    spans.sort()
    start, end = spans[0]
    for begin, finish in spans[1:]:
        if begin > end:
            yield start, end
            start, end = begin, finish
        else:
            end = max(end, finish)
    yield start, end


@lru_cache(maxsize=8)
def _beside(graph: Graph) -> list[tuple[int, int]]:
    """By step, the bytes beside values and stashes: before its backward, and during it."""
    g = graph.numbered
    found = [(0, 0)] * len(g.names)
    alive, held, stayed = set[int](), 0, 0
    for v in reversed(range(len(g.names))):
        before = held + stayed
        for x in (v, *g.preds[v]):
            if x not in alive:
                alive.add(x)
                held += g.grad[x]
        stayed += g.stays[v]
        found[v] = before, held + stayed + g.backward_workspace[v]
        alive.remove(v)
        held -= g.grad[v]
    return found


def least_bytes(table: Timetable) -> int:
    """The peak where everything that may be moved is away as long as it may be."""
    change = [0] * (len(table.used) + 1)
    for one in table.absences:
        change[one.last + 1] += one.nbytes
        change[one.back] -= one.nbytes
    away = peak = 0
    for at, used in enumerate(table.used):
        away += change[at]
        peak = max(peak, used - away)
    return peak
