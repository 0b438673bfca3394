"""The plan that offloads every saved tensor, as `umem.chainer.Offload` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from umem.onnx.fitting.gpu_times import SMALLEST_BYTES
from umem.planner.link import AHEAD_BYTES, IN_FLIGHT_BYTES, Move, What
from umem.planner.plans import Plan
from umem.planner.problem import Problem


def all_offloaded(problem: Problem) -> Plan:
    """Return the plan that keeps all saved tensors, with all of them offloaded."""
    plan = problem.keep_all.plan
    return replace(plan, moves=tuple(_moves(problem)))


class _Saved(NamedTuple):
    """A saved tensor of a call: when forward uses it last, and backward first."""

    call: int
    what: What
    nbytes: int
    last_use: int
    first_need: int


def _moves(problem: Problem) -> Iterator[Move]:
    """Yield the move of each saved tensor that is large enough, in the order of their last uses.

    As in `umem.chainer.Offload`, copies lag: a tensor stays until `IN_FLIGHT_BYTES` more are on
    their way, and is back `AHEAD_BYTES` before backward needs it.
    """
    saved = sorted(_saved(problem), key=lambda one: one.last_use)
    leaves: dict[_Saved, int] = {}
    going: deque[_Saved] = deque()
    for one in saved:
        going.append(one)
        while sum(each.nbytes for each in going) > IN_FLIGHT_BYTES:
            leaves[going.popleft()] = min(one.last_use + 1, len(problem.calls) - 1)
    fetched: dict[_Saved, int] = {}
    ahead: deque[_Saved] = deque()
    for one in sorted(leaves, key=lambda one: -one.first_need):  # backward
        ahead.append(one)
        while len(ahead) > 1 and sum(each.nbytes for each in ahead) > AHEAD_BYTES:
            ahead.popleft()
        fetched[one] = ahead[0].first_need
    for one, after in leaves.items():
        names = problem.names
        yield Move(names[one.call], one.what, names[after], names[fetched[one]])


def _saved(problem: Problem) -> Iterator[_Saved]:
    """Yield the saved tensors that are large enough."""
    calls = problem.calls
    root = list(range(len(calls)))
    for index, call in enumerate(calls):
        if call.alias is not None:
            root[index] = root[call.alias]
    last, first = list(range(len(calls))), [-1] * len(calls)
    for source, user in problem.edges:
        last[root[source]] = max(last[root[source]], user)
    for index, call in enumerate(calls):
        for need in () if call.dead else call.needs:
            first[root[need]] = max(first[root[need]], index)
    for index, call in enumerate(calls):
        if first[index] >= 0 and call.nbytes >= SMALLEST_BYTES:
            yield _Saved(index, "value", call.nbytes, last[index], first[index])
        if not call.dead and call.stash_bytes >= SMALLEST_BYTES:
            yield _Saved(index, "stash", call.stash_bytes, index, index)
