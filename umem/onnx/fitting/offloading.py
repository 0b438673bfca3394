"""The plan that offloads every saved tensor, as `umem.chainer.Offload` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from umem.planner.link import AHEAD_BYTES, IN_FLIGHT_BYTES, Link, Move
from umem.planner.plans import Plan
from umem.planner.problem import Problem
from umem.planner.timetable import OffloadWindow, timetable


def all_offloaded(problem: Problem, link: Link) -> Plan:
    """Return the plan that keeps all saved tensors, with all offloaded that the link takes."""
    kept = problem.keep_all
    windows = timetable(kept.graph, ((),) * len(problem.calls), link).windows
    return replace(kept.plan, moves=tuple(_moves(problem.names, windows)))


def _moves(names: tuple[str, ...], windows: list[OffloadWindow]) -> Iterator[Move]:
    """Yield the move of each saved tensor, in the order of their last uses.

    As in `umem.chainer.Offload`, copies lag: a tensor stays until `IN_FLIGHT_BYTES` more are on
    their way, and is back `AHEAD_BYTES` before backward needs it.
    """
    count = len(names)
    leaves: dict[OffloadWindow, int] = {}
    going: deque[OffloadWindow] = deque()
    for one in sorted(windows, key=lambda one: (one.last, one.key[1], one.key[0] == "stash")):
        going.append(one)
        while sum(each.nbytes for each in going) > IN_FLIGHT_BYTES:
            leaves[going.popleft()] = min(one.last + 1, count - 1)
    before: dict[OffloadWindow, int] = {}
    ahead: deque[OffloadWindow] = deque()
    for one in sorted(leaves, key=lambda one: one.first):
        ahead.append(one)
        while len(ahead) > 1 and sum(each.nbytes for each in ahead) > AHEAD_BYTES:
            ahead.popleft()
        before[one] = 2 * count - 1 - ahead[0].first  # nothing is recomputed in between
    for one, after in leaves.items():
        what, call = one.key
        yield Move(names[call], what, names[after], names[before[one]])
