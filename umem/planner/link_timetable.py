"""A plan's computations in order, the bytes in use during each, and windows for offloading."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from umem.planner.graph import Graph
from umem.planner.link import Key, Link
from umem.planner.plans import Reruns, plan_by_reruns
from umem.planner.schedule import Cell, Computations
from umem.planner.usage_of_actions import usage


class OffloadWindow(NamedTuple):
    """The time for which a value or function state may be offloaded between forward and backward.

    Attributes:
        key: the value or function state.
        nbytes: its bytes.
        last: the computation of forward that uses it last.
        first: the computation of backward that uses it first.
        back: the computation before which it must be fetched at the latest: the first one of the
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


@lru_cache(maxsize=16)
def timetable(graph: Graph, reruns: Reruns, link: Link | None = None) -> Timetable:
    """List the computations of a step. Cost: proportional to the calls and their inputs.

    Without a link there are no windows. The lists are cached: do not change them.
    """
    plan = plan_by_reruns(graph, reruns, "")
    ordered, g = Computations(graph, plan), graph.numbered
    counted = usage(graph, ordered.actions())
    used = [
        nbytes
        for action, nbytes in zip(counted.actions, counted.during_bytes, strict=True)
        if action.kind in ("forward", "recompute", "backward")
    ]
    cost = [(g.backward_cost if s.kind == "backward" else g.cost)[s.node] for s in ordered.steps]
    turns = ordered.turns()
    starts = list(turns.values())
    last, first = ordered.uses()
    number = {name: v for v, name in enumerate(g.names)}
    kept: list[Key] = [("value", g.root[number[name]]) for name in plan.kept]
    kept += [("stash", number[name]) for name in plan.stashed]
    windows = []
    for key in dict.fromkeys(kept):
        nbytes = (g.size if key[0] == "value" else g.stash)[key[1]]
        if link is not None and link.takes(nbytes):
            cell = Cell(*key)
            back = starts[bisect_right(starts, first[cell]) - 1]
            windows.append(OffloadWindow(key, nbytes, last[cell], first[cell], back))
    windows.sort(key=lambda one: (one.last, -one.first, one.key))
    return Timetable(len(reruns), cost, used, starts, list(turns), windows)


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
