"""Bringing a pass to the state of a planned forward, for a plan that is made when forward has run.

The pass has evicted arrays by its own rule by then. It drops what the plan does not keep, and
recomputes what is missing of the rest, in the order of forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile

from umem.chainer.recompute.facts import Observed
from umem.chainer.recompute.seen import Carried, SeenGraph, TapeAction, drops_of
from umem.chainer.recompute.tape import Call, needed_again
from umem.planner import actions, usage


class LatePlan:
    """A plan for the backward of a pass whose forward has run.

    Args:
        seen, plan: the graph of the pass, and its plan.

    Attributes:
        forward_bytes: by call, the bytes in use during its forward if that was planned.
    """

    def __init__(self, seen: SeenGraph, plan: Carried) -> None:
        self.seen, self.plan = seen, plan
        self.forward_bytes = _forward_bytes(seen, plan)

    def drops(self, calls: Sequence[Call]) -> Iterator[TapeAction]:
        """Yield the drops of the arrays that a planned forward does not keep."""
        kept = _kept(calls, self.plan)
        yield from (
            action for call in calls for action in drops_of(call.index) if action not in kept
        )

    def missing(self, calls: Sequence[Call]) -> set[Call]:
        """Return the calls that must run again for the arrays that a planned forward keeps.

        Drops some of those that are alive. A view of an array that is made again would keep the
        old array alive. And while a call runs again, arrays of later calls are alive that a planned
        forward makes after it: the last of them are dropped until the rest fits beside it.

        Args:
            calls: all calls of the pass, after `drops`.
        """
        kept, observed = _kept(calls, self.plan), self.seen.tape.observed
        peak = self.plan.solution.plan.peak_bytes
        while True:
            needed = set(needed_again(call for call in calls if _lacks(call, kept)))
            needed.update(_views_on_old(calls, observed, needed))
            before = list(accumulate(_held(calls, observed), initial=0))
            count = len(calls)  # of those that may stay alive, the first ones
            for call in needed:
                if not call.find(0):
                    room = peak - self.forward_bytes[call.index]
                    count = min(count, bisect_right(before, before[call.index + 1] + room) - 1)
            late = [call for call in calls[count:] if call.may_drop and call.find(0)]
            if not late:
                return needed
            for call in late:
                call.drop()
                call.drop_stash()


def _forward_bytes(seen: SeenGraph, plan: Carried) -> list[int]:
    """Return the bytes in use during each call of a planned forward."""
    graph = plan.solution.graph
    forward = takewhile(lambda a: a.kind != "backward", actions(graph, plan.solution.plan))
    pairs = zip(*usage(graph, forward), strict=True)
    found = {action.node: nbytes for action, nbytes in pairs if action.kind == "forward"}
    return [found[name] for name in seen.problem.names]


def _views_on_old(
    calls: Sequence[Call], observed: Sequence[Observed], needed: set[Call]
) -> Iterator[Call]:
    """Drop views of arrays that are made again; yield the calls that this needs."""
    for call in calls:
        alias = observed[call.index].alias
        base = None if alias is None else calls[alias]
        if base in needed and not base.find(0) and call.may_drop:
            call.drop()
            yield from needed_again([call])


def _held(calls: Sequence[Call], observed: Sequence[Observed]) -> Iterator[int]:
    """Yield the bytes that each call's outputs and function state hold; memory counts once."""
    counted = set[int]()
    for call in calls:
        one, root = observed[call.index], call.index
        while (base := observed[root].alias) is not None:
            root = base
        is_new = call.find(0) and root not in counted
        if is_new:
            counted.add(root)
        stash = 0 if call.stash.is_dropped else one.stash_bytes
        yield stash + (observed[root].nbytes if is_new else 0)


def _lacks(call: Call, kept: set[TapeAction]) -> bool:
    """Tell whether a call that has its graph lacks arrays that should be kept."""
    value, stash = drops_of(call.index)
    is_missing = call.values is None and value in kept
    return call.has_graph and (is_missing or (call.stash.is_dropped and stash in kept))


def _kept(calls: Sequence[Call], plan: Carried) -> set[TapeAction]:
    """Return the drops that a planned forward does not make: of the arrays that it keeps."""
    kept = {action for call in calls for action in drops_of(call.index)}
    for call in calls:
        for action in plan.after_forward.get(call.index, ()):
            if action.drops:
                kept.discard(action)
            elif action.kind == "recompute":
                kept.update(drops_of(action.call))
    return kept
