"""The public functions of planning, which choose the algorithms: plan, min_budget, pareto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from umem.errors import BudgetError, GraphError
from umem.planner import chains, keep_recompute_offload, lower_sets, rematerialize
from umem.planner.chains import METHODS
from umem.planner.checks import checked_budget, shown, whole_number
from umem.planner.graph import Graph
from umem.planner.link import Link
from umem.planner.offload_schedule import Decision, decided, is_best, plan_of_decision
from umem.planner.plans import (
    OBJECTIVES,
    Method,
    Model,
    Objective,
    Plan,
    checked_model,
    in_order_of,
)
from umem.planner.schedule import actions
from umem.planner.usage_of_actions import usage
from umem.units import format_bytes

AUTO_SETS = {"kusumoto": 600, "saved": 80}
"""By model, at most this many lower sets are all searched by ``auto``, in less than a second."""
EVERY_POINT = 64
"""At most this many nodes for which `pareto` looks for every point of chains."""
POINTS = 33
"""Number of budgets that `pareto` looks at in larger graphs."""
SEARCHED = 200
"""At most this many nodes for which a local search improves a plan that may offload."""


def plan(
    graph: Graph,
    budget_bytes: int | None = None,
    method: Method = "auto",
    objective: Objective = "time",
    model: Model = "saved",
    link: Link | None = None,
) -> Plan:
    """Decide what to keep, recompute or offload so that a step takes no more than a budget.

    Without a link nothing is offloaded, and the plan is that of least overhead. With one it is the
    quickest that is found, waiting for copies included: never slower than the plan without it,
    where that fits, nor than keeping or offloading everything.

    Cost: about a second for ``auto`` and ``lower_sets``, two with 10,000 nodes;
    ``lower_sets_exact`` grows with the square of the number of lower sets. Pure; tables of a
    graph are cached.

    Args:
        graph: the forward pass.
        budget_bytes: above the constant of parameters and state, which the caller adds; None:
            the least that the method can do.
        method: ``store_all``; ``chen``; ``lower_sets``, the approximate family;
            ``lower_sets_exact``, all lower sets; ``rematerialize``, which may recompute a call
            several times, under ``saved`` alone; ``auto``, the best of them within a second; or
            a name that was registered with `register_method`.
        objective: ``time``, the least overhead within the budget; ``memory``, the most overhead,
            whose coarse blocks leave more to be freed early.
        model: ``saved``, the bytes that a tape holds for backward, each freed after its last
            use; ``kusumoto``, the formula of Kusumoto et al.
        link: the link to the offload target, for the model ``saved`` and the objective ``time``.

    Raises:
        BudgetError: no plan of the method fits; names the smallest budget and what forces it.
        GraphError: too many lower sets for the exact method; a link under another model.

    >>> from umem.planner import Node
    >>> chain = [Node(name, 4, 1) for name in "abcdefghi"]
    >>> graph = Graph(chain, zip("abcdefgh", "bcdefghi"))
    >>> plan(graph, 30).overhead
    4
    """
    budget_bytes = _checked(graph, budget_bytes, method, objective, model)
    if not len(graph):
        return Plan((), (), (), (), 0, 0, method, objective, model, budget_bytes or 0)
    if link is not None and _moves(link, objective, model):
        return _with_moves(graph, budget_bytes, method, link)
    if budget_bytes is None:
        return _least(graph, method, objective, model)
    found = _of_chains(graph, budget_bytes, method, objective, model)
    if model == "saved" and method in ("auto", rematerialize.NAME):
        found = found or _least_that_fits(graph, budget_bytes, method)
        found += _rematerialized(graph, budget_bytes, found, objective)
    if not found:
        raise _too_small(graph, budget_bytes, method, model)
    return replace(_best(found, objective), budget_bytes=budget_bytes)


def min_budget(graph: Graph, method: Method = "auto", model: Model = "saved") -> int:
    """Return the smallest budget that a plan of the method fits, in bytes.

    Exact for chains of the method's family, by bisection over the peaks that they can have. Where
    calls may be recomputed several times (``auto`` and ``rematerialize`` under ``saved``), the
    least that is found, whose overhead may be several forward passes; see `least_once`.
    """
    return plan(graph, None, method, "time", model).peak_bytes


def least_once(graph: Graph, method: Method = "auto", model: Model = "saved") -> Plan:
    """Return the plan of least bytes, of those that recompute each call at most once.

    Its overhead is at most one forward pass, and its bytes do not depend on the costs of calls.
    """
    _checked(graph, None, method, "time", model)
    if not len(graph):
        return plan(graph, None, method, model=model)
    return _least(graph, method, "time", model, once=True)


def pareto(
    graph: Graph, method: Method = "auto", model: Model = "saved", points: int | None = None
) -> list[tuple[float, int]]:
    """Return overhead and peak bytes of the plans that no other beats in both; least bytes last.

    Args:
        graph: the forward pass.
        method: as in `plan`.
        model: as in `plan`.
        points: how many budgets to look at, evenly from the least to where nothing is gained;
            None: every point of chains on graphs of up to 64 nodes, 33 budgets on larger ones and
            where calls may be recomputed several times.
    """
    _checked(graph, None, method, "time", model)
    if points is not None:
        count = whole_number(points)
        if count is None or count < 2:
            raise GraphError(f"points is a whole number from 2 on; got {shown(points)}")
        points = count
    if not len(graph):
        return []
    every = points is None and len(graph) <= EVERY_POINT
    found = {
        (candidate.overhead, candidate.peak_bytes)
        for name in _methods(graph, method, model)
        for candidate in chains.front(graph, name, model, None if every else points or POINTS)
    }
    if model == "saved" and method in ("auto", rematerialize.NAME):
        found |= _budget_by_budget(graph, method, points or POINTS)
    front: list[tuple[float, int]] = []
    for overhead, peak in sorted(found):
        if not front or peak < front[-1][1]:
            front.append((overhead, peak))
    return front


# -- arguments and errors ----------------------------------------------------------------------


def _checked(
    graph: Graph, budget_bytes: int | None, method: Method, objective: Objective, model: Model
) -> int | None:
    """Check all arguments of `plan`, and return the budget as an int.

    Raises:
        GraphError: an argument is of the wrong type or unknown, or the method does not plan under
            the model.
        BudgetError: the budget is no whole number of zero or more.
    """
    for name, value, choices in (
        ("method", method, ("auto", rematerialize.NAME, *METHODS)),
        ("objective", objective, OBJECTIVES),
    ):
        if value not in choices:
            raise GraphError(f"{name} is one of {', '.join(choices)}; got {shown(value)}")
    checked_model(model)
    if not isinstance(graph, Graph):
        raise GraphError(f"graph is a umem.planner.Graph; got a {type(graph).__name__}")
    if method == rematerialize.NAME and model != "saved":
        raise GraphError(f'method {method!r} plans for a tape: pass model="saved"')
    return checked_budget(budget_bytes)


def _methods(graph: Graph, method: Method, model: Model) -> tuple[Method, ...]:
    """Return the methods of chains of lower sets that a method tries; rematerialize: none."""
    if method == rematerialize.NAME:
        return ()
    if method != "auto":
        return (method,)
    if lower_sets.all_lower_sets(graph, AUTO_SETS[model]) is not None:
        return ("store_all", "lower_sets_exact", "lower_sets")
    return ("store_all", "chen", "lower_sets")


def _too_small(graph: Graph, budget_bytes: int, method: Method, model: Model) -> BudgetError:
    """Return the error that names the smallest budget, and the action that forces it."""
    tightest = plan(graph, None, method, "time", model)
    stream = actions(graph, tightest, liveness=model == "saved")
    forced = usage(graph, stream, model).highest
    smallest = tightest.peak_bytes
    return BudgetError(
        f"no plan of method {method!r} needs as little as {format_bytes(budget_bytes)} "
        f"({budget_bytes} bytes): the smallest budget is {format_bytes(smallest)} "
        f"({smallest} bytes), which {forced.kind} of {forced.node!r} forces"
    )


def _moves(link: Link, objective: Objective, model: Model) -> bool:
    """Tell whether plans may offload over a link: whether both of its rates are above zero.

    Raises:
        GraphError: it is no link, or the objective or model is one whose plans never offload.
    """
    if not isinstance(link, Link):
        raise GraphError(f"link is a umem.planner.Link; got a {type(link).__name__}")
    if model != "saved" or objective != "time":
        raise GraphError('values are offloaded on a tape: pass model="saved" and objective="time"')
    return link.moves


def _with_moves(graph: Graph, budget_bytes: int | None, method: Method, link: Link) -> Plan:
    """Return the quickest plan that is found within a budget, with values offloaded over a link.

    A budget of None is the least for which a plan is found.

    Raises:
        BudgetError: no plan fits; names the smallest budget.
    """
    if budget_bytes is not None:
        alone = decided(graph, ((),) * len(graph), budget_bytes, link)
        if alone is not None and is_best(alone):
            return plan_of_decision(alone, budget_bytes, link, method)
        known = []
        with suppress(BudgetError):
            known.append(plan(graph, budget_bytes, method, model="saved"))
        found = keep_recompute_offload.starting_decisions(graph, budget_bytes, link, known, method)
        if found:
            return _quickest(found, budget_bytes, link, method)
    tightest = [_least(graph, method, "time", "saved", once=once) for once in (True, False)]
    least, found = keep_recompute_offload.least_decisions(graph, link, tightest, method)
    budget = least if budget_bytes is None else budget_bytes
    best = _quickest(found, max(budget, least), link, method)
    if best.peak_bytes > budget:  # it may take less than the least that decisions are held to
        smallest = best.peak_bytes
        raise BudgetError(
            f"no plan of method {method!r} needs as little as {format_bytes(budget)} ({budget} "
            f"bytes), recomputed or offloaded: the smallest budget is {format_bytes(smallest)} "
            f"({smallest} bytes)"
        )
    return best


def _quickest(found: list[Decision], budget_bytes: int, link: Link, method: Method) -> Plan:
    """Make the plan of the first decision, improved by a local search in small graphs."""
    best = found[0]
    if method in ("auto", rematerialize.NAME) and len(best.graph) <= SEARCHED:
        best = keep_recompute_offload.improved(found, budget_bytes, link)
    return plan_of_decision(best, budget_bytes, link, method)


# -- candidates, and the choice among them -----------------------------------------------------


def _of_chains(
    graph: Graph, budget_bytes: int | None, method: Method, objective: Objective, model: Model
) -> list[Plan]:
    """Return the best plan that fits of each method of chains; None: its least bytes."""
    names = _methods(graph, method, model)
    return [
        one for name in names for one in chains.plans(graph, budget_bytes, name, objective, model)
    ]


def _best(found: list[Plan], objective: Objective) -> Plan:
    sign = -1 if objective == "memory" else 1
    return min(found, key=lambda candidate: (sign * candidate.overhead, candidate.peak_bytes))


def _rematerialized(
    graph: Graph, budget_bytes: int, known: list[Plan], objective: Objective
) -> Iterator[Plan]:
    """Yield plans that may recompute calls several times, one for each order of forward.

    The orders are the graph's and those of the known plans, from which the searches begin. Yields
    nothing where a known plan recomputes nothing, nor for ``memory`` where any plan is known.
    """
    if known and (objective == "memory" or not min(plan.overhead for plan in known)):
        return
    orders = dict.fromkeys([graph, *(in_order_of(graph, plan) for plan in known)])
    for ordered in orders:
        same = [plan for plan in known if in_order_of(graph, plan) is ordered]
        found = rematerialize.best_plan(ordered, budget_bytes, same)
        if found is not None:
            yield found


def _least_that_fits(graph: Graph, budget_bytes: int, method: Method) -> list[Plan]:
    """Return a plan of least bytes for a budget that no chain fits, in a list; empty if none fits.

    One that recomputes each call at most once is preferred, since it is cheaper.
    """
    found = [least_once(graph, method)]
    if found[0].peak_bytes > budget_bytes:
        found = [_least(graph, method, "time", "saved")]
    return [one for one in found if one.peak_bytes <= budget_bytes]


def _least(
    graph: Graph, method: Method, objective: Objective, model: Model, *, once: bool = False
) -> Plan:
    """Return the plan of least bytes; ``once``: of those that recompute each call at most once."""
    found = _of_chains(graph, None, method, objective, model)
    if model == "saved" and method in ("auto", rematerialize.NAME):
        orders = dict.fromkeys([graph, *(in_order_of(graph, plan) for plan in found)])
        found += [rematerialize.least_plan(ordered, once=once) for ordered in orders]
    least = min(candidate.peak_bytes for candidate in found)
    return _best([one for one in found if one.peak_bytes == least], objective)


def _budget_by_budget(graph: Graph, method: Method, points: int) -> set[tuple[float, int]]:
    """Return overhead and peak of plans at ``points`` budgets, from the least to keeping all."""
    (most,) = chains.plans(graph, None, "store_all", "time", "saved")
    least = plan(graph, None, method, "time", "saved").peak_bytes
    budgets = {int(budget) for budget in np.linspace(least, max(least, most.peak_bytes), points)}
    found = [plan(graph, budget, method, "time", "saved") for budget in budgets]
    return {(one.overhead, one.peak_bytes) for one in found}


def register_method(name: str, family: chains.Family) -> None:
    """Register one more method with `plan`, `min_budget` and `pareto`.

    Raises:
        GraphError: a method of that name exists; nothing has changed.
    """
    if name in ("auto", rematerialize.NAME, *METHODS):
        raise GraphError(f"there is a method {name!r} already: choose another name")
    METHODS[name] = family
