"""A plan's computations in order, the bytes in use during each, and windows for offloading."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from umem.planner.graph import Graph, Numbered
from umem.planner.link import Key, Link
from umem.planner.plans import Reruns
from umem.planner.usage_of_actions import gradient_bytes


class OffloadWindow(NamedTuple):
    """The time for which a value or function state may be offloaded between forward and backward.

    Attributes:
        key: the value or function state.
        nbytes: its bytes.
        last: the computation of forward that uses it last.
        first: the computation of backward that uses it first.
        back: the computation before which it has to be fetched at the latest: the first of the
            step of backward that uses it first.
    """

    key: Key
    nbytes: int
    last: int
    first: int
    back: int


class Timetable(NamedTuple):
    """The computations of a step, in order: forward, then before each step its recomputations.

    Attributes:
        calls: the number of calls of forward, which come first.
        cost: by computation, its cost.
        used: by computation, the bytes in use during it, with nothing offloaded.
        step_starts: the computation at which each step of backward begins, in order of time.
        step_of: by place in ``step_starts``, the node.
        windows: the values and function state that may be offloaded.
    """

    calls: int
    cost: list[float]
    used: list[int]
    step_starts: list[int]
    step_of: list[int]
    windows: list[OffloadWindow]


def timetable(graph: Graph, reruns: Reruns, link: Link | None = None) -> Timetable:
    """List the computations of a step. Cost: proportional to the calls and their inputs.

    Without a link nothing may be offloaded. The lists are cached: do not change them.
    """
    g, count = graph.numbered, len(reruns)
    cost, used, step_starts, spans = _computations(graph, reruns)
    turn_of = [0] * len(cost)
    for turn in step_starts:
        turn_of[turn] = turn
    turn_of = list(accumulate(turn_of, max))
    windows = []
    for holder, start, end, last, first in spans if link is not None and link.moves else ():
        nbytes = g.size[holder] if holder < count else g.stash[holder - count]
        if start < count <= end and link is not None and link.takes(nbytes):
            key: Key = ("value", holder) if holder < count else ("stash", holder - count)
            windows.append(OffloadWindow(key, nbytes, last, first, turn_of[first]))
    windows.sort(key=lambda one: (one.last, -one.first, one.key))
    return Timetable(count, cost, used, step_starts, list(range(count - 1, -1, -1)), windows)


def bytes_during(graph: Graph, reruns: Reruns) -> list[int]:
    """Return the bytes in use during each computation, with nothing offloaded; read-only."""
    return _computations(graph, reruns).used


class _Span(NamedTuple):
    """The time for which a value or function state is live; times are places of computations.

    Attributes:
        holder: the node whose value it is; for function state, the node plus the number of nodes.
        start, end: the computation that makes it, and the last that uses it.
        last, first: its last use in forward, and its first in backward.
    """

    holder: int
    start: int
    end: int
    last: int
    first: int


class _Computations(NamedTuple):
    cost: list[float]
    used: list[int]
    step_starts: list[int]
    spans: list[_Span]


@lru_cache(maxsize=16)
def _computations(graph: Graph, reruns: Reruns) -> _Computations:
    """List the computations with their costs, bytes and live spans; cached for both callers."""
    g, count = graph.numbered, len(reruns)
    beside = gradient_bytes(graph)
    cost: list[float] = list(g.cost)
    used = [g.forward_bytes + workspace for workspace in g.workspace]
    made, step_starts = list(range(count)), []
    for step in range(count - 1, -1, -1):
        step_starts.append(len(cost))
        before, during = beside[step]
        for v in reruns[step]:
            made.append(v)
            cost.append(g.cost[v])
            used.append(before + g.workspace[v])
        made.append(-1 - step)
        cost.append(g.backward_cost[step])
        used.append(during)
    spans = list(_spans(g, made))
    change = [0] * (len(cost) + 1)
    for holder, start, end, _, _ in spans:
        nbytes = g.size[holder] if holder < count else g.stash[holder - count]
        change[start] += nbytes
        change[end + 1] -= nbytes
    used = [own + there for own, there in zip(used, accumulate(change), strict=False)]
    return _Computations(cost, used, step_starts, spans)


def _spans(g: Numbered, made: list[int]) -> Iterator[_Span]:
    """Yield the live spans of values and function state.

    ``made``: by computation, the node that runs; for a step of backward, -1 less the node. Going
    through them from the end, the first use that is met is the last.
    """
    count = len(g.names)
    holder = (*g.root, *range(count, 2 * count))
    ends, last, first = [-1] * (2 * count), [-1] * (2 * count), [-1] * (2 * count)
    found: dict[int, list[tuple[int, int]]] = {}
    for at in range(len(made) - 1, -1, -1):
        v = made[at]
        if v >= 0:
            cells: tuple[int, ...] = (v, v + count) if g.stash[v] else (v,)
            read = (*cells, *g.preds[v])
        else:
            v, cells = -1 - v, ()
            read = (*g.needs[v], v + count) if g.stash[v] else g.needs[v]
        for cell in read:
            held = holder[cell]
            if at >= count:
                first[held] = at
            elif last[held] < 0:
                last[held] = at
            if ends[cell] < 0:
                ends[cell] = at
        for cell in cells:
            found.setdefault(holder[cell], []).append((at, ends[cell]))
            ends[cell] = -1
    for held, spans in found.items():
        for start, end in _joined(spans) if len(spans) > 1 else spans:
            yield _Span(held, start, end, last[held], first[held])


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join spans that overlap."""
    spans.sort()
    start, end = spans[0]
    for begin, finish in spans[1:]:
        if begin > end:
            yield start, end
            start, end = begin, finish
        else:
            end = max(end, finish)
    yield start, end


def least_bytes(table: Timetable) -> int:
    """Return the peak with every window's bytes offloaded for the whole of the window."""
    change = [0] * (len(table.used) + 1)
    for one in table.windows:
        change[one.last + 1] += one.nbytes
        change[one.back] -= one.nbytes
    away = peak = 0
    for at, used in enumerate(table.used):
        away += change[at]
        peak = max(peak, used - away)
    return peak
