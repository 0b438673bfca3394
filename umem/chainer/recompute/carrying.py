"""Plans of seen graphs, the fate of each value under a plan, and advice on caps of workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, starmap
from typing import Literal, NamedTuple, TypeVar

from umem.chainer.recompute.gradients import contended
from umem.chainer.recompute.seen import Carried, SeenGraph, TapeAction
from umem.errors import BudgetError
from umem.planner import Graph, Node
from umem.planner.link import Link
from umem.planner.plans import Method
from umem.planner.pool_gaps import PoolGaps
from umem.planner.problem import CallFacts, Problem, Solution
from umem.planner.schedule import actions, agenda
from umem.planner.usage import usage
from umem.trace.analysis.capping import CAPPED, CAPS, advice
from umem.units import format_bytes

Budget = int | float | None
"""Total bytes of a step, a share of a plain step's peak, or None for the least peak."""


class Target(NamedTuple):
    """The budget, the planning method and how strict to be; see `umem.chainer.Recompute`.

    ``is_card``: the budget is what the GPU has to spare when the first pass begins.
    """

    budget: Budget
    method: Method
    strict: bool
    thrash: str = "warn"
    is_card: bool = False


NO_GAPS = PoolGaps()


def carried(
    seen: SeenGraph, target: Target, link: Link | None = None, gaps: PoolGaps = NO_GAPS
) -> tuple[Carried, str | None]:
    """Plan a seen graph within the budget; where a plain step fits, the plan drops nothing.

    A budget in bytes is to hold the pool's gaps, too. If no plan leaves room for them, the plan of
    the least peak is taken, as long as that is within the budget by itself.

    With a link, saved tensors may be offloaded. If the budget is a share of a plain step's peak and
    no plan fits, the plan of the least peak is returned with a warning; with ``strict``, or for a
    budget in bytes, that is an error.

    Returns:
        the plan, and the warning or None.

    Raises:
        BudgetError: no plan fits; names the least peak, the floor and what forces the floor.
    """
    problem = seen.problem
    room = _room(seen, target.budget, gaps)
    plain_room = _room(seen, target.budget, gaps, plain=True)
    if plain_room is not None and plain_room >= problem.left_alone_bytes:
        return _carried(seen, problem.keep_all, plain_room), None
    try:
        solution = problem.within(room, target.method, link=link)
    except BudgetError as error:
        if gaps.planned > 1 and isinstance(target.budget, int):
            return _least_or_more(seen, target, link), None
        least = _carried(seen, problem.least(target.method, link=link), room)
        advised = cap_advice(seen, least)
        told = f"{error}, {problem.why_not_less(target.method, link=link)}"
        told += f". {advised.rstrip('.')}" if advised else ""
        if target.strict or not isinstance(target.budget, float):
            raise BudgetError(told) from None
        return least, f"{told}. The budget is a share, so this graph is run at its least"
    return _carried(seen, solution, room), None


def _least_or_more(seen: SeenGraph, target: Target, link: Link | None) -> Carried:
    """Plan for the least peak, or if that is above a budget in bytes, for the whole budget.

    Raises:
        BudgetError: no plan is within the budget, even without gaps.
    """
    assert isinstance(target.budget, int)
    least = seen.problem.least(target.method, link=link)
    if least.peak_bytes <= target.budget - seen.slack_bytes:
        return _carried(seen, least, None)
    return carried(seen, target, link)[0]


def _room(seen: SeenGraph, budget: Budget, gaps: PoolGaps, *, plain: bool = False) -> int | None:
    """Return the bytes that a graph's plan may have in use; None: as few as possible."""
    if budget is None:
        return None
    if isinstance(budget, float):
        return round(budget * seen.problem.plain_bytes)
    return gaps.room(budget, plain=plain) - seen.slack_bytes


def _carried(seen: SeenGraph, solution: Solution, room: int | None) -> Carried:
    """Return the plan of a solution as passes follow it, with its actions by when they are due."""
    names = seen.problem.names
    place = {name: at for at, name in enumerate(chain.from_iterable(solution.plan.blocks))}
    order = [place[name] for name in names]
    due = agenda(solution.graph, solution.plan, names)
    alone = seen.problem.left_alone_bytes
    twice = 2 * alone - seen.facts.outside_bytes
    return Carried(
        solution,
        seen.problem.plain_bytes,
        alone,
        fits=room is not None and room >= alone,
        fits_twice=room is not None and room >= twice,
        after_forward={
            call: list(starmap(TapeAction, ts)) for call, ts in due.after_forward.items()
        },
        backward=list(starmap(TapeAction, due.backward)),
        places=due.places,
        order=order,
        contended=contended(seen.tape.readers, seen.facts.order, order),
    )


# -- caps on workspace -----------------------------------------------------------------------------

_INSIDE = ("workspace_bytes", "backward_workspace_bytes")
_Capped = TypeVar("_Capped", CallFacts, Node)


def cap_advice(seen: SeenGraph, plan: Carried) -> str | None:
    """Describe the peaks of the same plan under caps on workspace; None where no cap applies.

    A cap applies if the peak is inside a call whose workspace can be capped.
    """
    problem = seen.problem
    graph, found = plan.solution.graph, plan.solution.plan
    step = problem.plain_step if plan.fits else usage(graph, actions(graph, found))
    action = step.highest
    call = problem.calls[problem.names.index(action.node)]
    inside = call.backward_workspace_bytes if action.kind == "backward" else call.workspace_bytes
    if call.label not in CAPPED or not inside or plan.peak_bytes == problem.update_peak_bytes:
        return None
    peaks = [_peak_under(problem, plan, cap) for cap in CAPS]
    return advice(call.label, inside, plan.peak_bytes, peaks)


def _peak_under(problem: Problem, plan: Carried, cap_bytes: int) -> int:
    if plan.fits:
        calls = [_capped(call, call.label, cap_bytes) for call in problem.calls]
        return replace(problem, calls=tuple(calls)).left_alone_bytes
    graph, found = plan.solution.graph, plan.solution.plan
    nodes = [_capped(n, n.name.rpartition("#")[0], cap_bytes) for n in graph.nodes]
    capped = Graph(nodes, graph.edges, graph.forward_bytes)
    step = usage(capped, actions(capped, found))
    return max(plan.solution.constant_bytes + step.peak_bytes, problem.update_peak_bytes)


def _capped(one: _Capped, label: str, cap_bytes: int) -> _Capped:
    if label not in CAPPED:
        return one
    return replace(one, **{name: min(getattr(one, name), cap_bytes) for name in _INSIDE})


# -- fates of values ------------------------------------------------------------------------------

Fate = Literal["kept", "recomputed", "offloaded", "not needed"]
FATES: tuple[Fate, ...] = ("kept", "recomputed", "offloaded")


class ValueFate(NamedTuple):
    """One row of `umem.chainer.Recompute.fates`.

    Attributes:
        call: the function, with its place in forward.
        what: ``value``, the call's outputs, or ``stash``, its function state.
        nbytes: their bytes.
        fate: ``kept`` from forward into backward, ``recomputed``, ``offloaded`` (and prefetched),
            or ``not needed`` in backward.
    """

    call: str
    what: str
    nbytes: int
    fate: Fate


def fates_of(seen: SeenGraph) -> tuple[ValueFate, ...]:
    """Return the fates of each call's outputs and function state, in the order of forward.

    Empty if the graph has no plan.
    """
    return () if seen.plan is None else tuple(_fates(seen, seen.plan))


def _fates(seen: SeenGraph, carried: Carried) -> Iterator[ValueFate]:
    """Yield the fate of outputs and function state of each call, where they have bytes."""
    plan = carried.solution.plan
    moved = {(move.node, move.what) for move in plan.moves}
    again = {name for block in plan.recomputed for name in block}
    for name, call in zip(seen.problem.names, seen.problem.calls, strict=True):
        for what, nbytes, kept in (
            ("value", call.nbytes, plan.kept),
            ("stash", call.stash_bytes, plan.stashed),
        ):
            fate: Fate = "not needed"
            if (name, what) in moved:
                fate = "offloaded"
            elif name in kept or carried.fits or not call.again:
                fate = "kept"
            elif name in again:
                fate = "recomputed"
            if nbytes:
                yield ValueFate(name, what, nbytes, fate)


def fates_summary(seen: SeenGraph) -> str:
    """Format in one line the bytes and the number of values of each fate."""
    rows = fates_of(seen)
    parts = []
    for fate in FATES:
        found = [row.nbytes for row in rows if row.fate == fate]
        parts.append(f"{format_bytes(sum(found))} {fate} ({len(found)})")
    return ", ".join(parts)
