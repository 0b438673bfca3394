"""The public functions of planning, `plan`, `min_budget` and `pareto`, which choose algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from umem.errors import BudgetError, GraphError
from umem.planner import keep_recompute_offload, rematerialize
from umem.planner.backward_order import reordered
from umem.planner.chains import METHODS, Family, chains_of
from umem.planner.checks import checked_budget, shown, whole_number
from umem.planner.graph import Graph
from umem.planner.kusumoto.formula_plans import formula_front, formula_plans
from umem.planner.link import Link
from umem.planner.offload_schedule import Decision, decided, is_best, plan_of_decision, rank
from umem.planner.plans import OBJECTIVES, Method, Model, Objective, Plan, checked_model
from umem.planner.referee import simulate
from umem.units import format_bytes

EVERY_POINT = 64
"""`pareto` looks for every point of chains in graphs of at most this many nodes."""
POINTS = 33
"""The number of budgets that `pareto` tries in larger graphs."""


def plan(
    graph: Graph,
    budget_bytes: int | None = None,
    method: Method = "auto",
    objective: Objective = "time",
    model: Model = "saved",
    link: Link | None = None,
) -> Plan:
    """Decide which values to keep, recompute or offload so that a step fits a budget.

    Without a link, the plan offloads nothing and has the least overhead. With a link, it is the
    quickest plan found, waiting for copies included: never slower than the plan without a link, if
    that fits, nor than keeping or offloading everything.

    Cost: about a second for ``auto`` and ``lower_sets``, two with 10,000 nodes;
    ``lower_sets_exact`` grows with the square of the number of lower sets. Pure; a graph's tables
    are cached.

    Args:
        graph: the forward pass.
        budget_bytes: the most bytes at once, without the constant of parameters and state; None:
            the method's smallest budget.
        method: ``store_all``; ``chen``; ``lower_sets``, the approximate family;
            ``lower_sets_exact``, all lower sets; ``rematerialize``, which may recompute a call
            several times, only for the model ``saved``; ``auto``, the best of these within a
            second; or a name registered with `register_method`.
        objective: ``time``, the least overhead within the budget; ``memory``, the most overhead,
            whose coarse blocks let more values be freed early.
        model: ``saved``, the bytes that a tape holds for backward, each freed after its last
            use; ``kusumoto``, the formula of Kusumoto et al.
        link: the link to the offload target, for the model ``saved`` and the objective ``time``.

    Raises:
        BudgetError: no plan of the method fits; names the smallest budget and the action that
            forces it.
        GraphError: an argument is invalid, the graph has too many lower sets for the exact method,
            or a link is given for another model or objective.

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
    plans = _tape_plans if model == "saved" else formula_plans
    found = list(plans(graph, budget_bytes, method, longest=objective == "memory"))
    if not found:
        assert budget_bytes is not None
        raise _too_small(graph, budget_bytes, method, model)
    limit = min(one.peak_bytes for one in found) if budget_bytes is None else budget_bytes
    sign = -1 if objective == "memory" else 1
    fit = [one for one in found if one.peak_bytes <= limit]
    best = min(fit, key=lambda one: (sign * one.overhead, one.peak_bytes))
    return replace(best, objective=objective, budget_bytes=limit)


def min_budget(graph: Graph, method: Method = "auto", model: Model = "saved") -> int:
    """Return the smallest budget, in bytes, for which the method has a plan.

    It is exact for chains of the method's family, by bisection over their possible peaks. If calls
    may be recomputed several times (``auto`` and ``rematerialize`` under ``saved``), it is the
    smallest found, and its plan's overhead may be several forward passes; see `least_once`.
    """
    return plan(graph, None, method, "time", model).peak_bytes


def least_once(graph: Graph, method: Method = "auto") -> Plan:
    """Return the tape's plan of least bytes that recomputes each call at most once.

    Its overhead is at most one forward pass, and its bytes do not depend on the costs of calls.
    """
    _checked(graph, None, method, "time", "saved")
    if not len(graph):
        return plan(graph, None, method)
    found = list(_tape_plans(graph, None, method, once=True))
    return min(found, key=lambda one: (one.peak_bytes, one.overhead))


def pareto(
    graph: Graph, method: Method = "auto", model: Model = "saved", points: int | None = None
) -> list[tuple[float, int]]:
    """Return overhead and peak bytes of the plans that no other beats in both; least bytes last.

    Args:
        graph: the forward pass.
        method: as in `plan`.
        model: as in `plan`.
        points: the number of budgets to try, evenly from the smallest to the largest useful one;
            None: every point of chains on graphs of up to 64 nodes, and 33 budgets on larger ones
            or if calls may be recomputed several times.
    """
    _checked(graph, None, method, "time", model)
    if points is not None:
        count = whole_number(points)
        if count is None or count < 2:
            raise GraphError(f"points must be a whole number of at least 2; got {shown(points)}")
        points = count
    if not len(graph):
        return []
    few = points or (None if len(graph) <= EVERY_POINT else POINTS)
    found = _tape_front if model == "saved" else formula_front
    front: list[tuple[float, int]] = []
    for overhead, peak in sorted(
        (one.overhead, one.peak_bytes) for one in found(graph, method, few)
    ):
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
        BudgetError: the budget is not a whole number of zero or more.
    """
    for name, value, choices in (
        ("method", method, ("auto", rematerialize.NAME, *METHODS)),
        ("objective", objective, OBJECTIVES),
    ):
        if value not in choices:
            raise GraphError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")
    checked_model(model)
    if not isinstance(graph, Graph):
        raise GraphError(f"graph must be a umem.planner.Graph; got a {type(graph).__name__}")
    if method == rematerialize.NAME and model != "saved":
        raise GraphError(f'method {method!r} plans for a tape: pass model="saved"')
    return checked_budget(budget_bytes)


def _too_small(graph: Graph, budget_bytes: int, method: Method, model: Model) -> BudgetError:
    """Return the error that names the smallest budget, and the action that forces it."""
    tightest = plan(graph, None, method, "time", model)
    timeline = simulate(graph, tightest, liveness=model == "saved").timeline
    forced = max(timeline, key=lambda moment: moment.during_bytes).action
    smallest = tightest.peak_bytes
    return BudgetError(
        f"no plan of method {method!r} needs as little as {format_bytes(budget_bytes)} "
        f"({budget_bytes} bytes): the smallest budget is {format_bytes(smallest)} "
        f"({smallest} bytes), which {forced.kind} of {forced.node!r} forces"
    )


def _moves(link: Link, objective: Objective, model: Model) -> bool:
    """Tell whether plans may offload over a link: whether both of its rates are above zero.

    Raises:
        GraphError: the link is not a `Link`, or plans for the objective or model never offload.
    """
    if not isinstance(link, Link):
        raise GraphError(f"link must be a umem.planner.Link; got a {type(link).__name__}")
    if model != "saved" or objective != "time":
        raise GraphError('values are offloaded on a tape: pass model="saved" and objective="time"')
    return link.moves


def _with_moves(graph: Graph, budget_bytes: int | None, method: Method, link: Link) -> Plan:
    """Return the quickest plan found within a budget, with values offloaded over a link.

    A budget of None is the smallest for which a plan is found.

    Raises:
        BudgetError: no plan fits; names the smallest budget.
    """
    orders = _orders(graph, method)
    in_order = rematerialize.NAME if method == "auto" else method
    if budget_bytes is not None:
        alone = decided(graph, ((),) * len(graph), budget_bytes, link)
        if alone is not None and is_best(alone):
            return plan_of_decision(alone, budget_bytes, link, method)
        found = [
            decision
            for one in orders
            for decision in keep_recompute_offload.starting_decisions(
                one, budget_bytes, link, _tape_plans(one, budget_bytes, in_order), method
            )
        ]
        if found:
            return _quickest(found, budget_bytes, link, method)
    tried = []
    for one in orders:
        tightest = [*_tape_plans(one, None, in_order, once=True), *_tape_plans(one, None, in_order)]
        tried.append(keep_recompute_offload.least_decisions(one, link, tightest, method))
    least, found = min(tried, key=lambda pair: pair[0])
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
    """Make the plan of the quickest decision; of equal times, of the one that moves least."""
    return plan_of_decision(min(found, key=rank), budget_bytes, link, method)


# -- plans of a tape ---------------------------------------------------------------------------


def _orders(graph: Graph, method: Method) -> tuple[Graph, ...]:
    """Return the graph in each order that a method plans: ``auto`` may add another order."""
    other = reordered(graph) if method == "auto" else graph
    return (graph,) if other is graph else (graph, other)


def _tape_plans(
    graph: Graph,
    budget_bytes: int | None,
    method: Method,
    *,
    longest: bool = False,
    once: bool = False,
) -> list[Plan]:
    """Return the plans of a tape that a method finds within a budget, the best among them.

    Args:
        graph: the graph.
        budget_bytes: the most bytes; None: each algorithm's smallest budget.
        method: the method's name.
        longest: the best plan has the most overhead.
        once: recompute each call at most once.
    """
    if method not in ("auto", rematerialize.NAME):
        alone = chains_of(graph, method).plan(budget_bytes, longest=longest)
        return [alone] if alone else []
    orders = _orders(graph, method)
    if budget_bytes is None:
        found = [rematerialize.least_plan(one, once=once) for one in orders]
        least = (chains_of(one, "lower_sets").plan() for one in orders if method == "auto")
        return [*filter(None, least), *found]
    whole = chains_of(graph, "store_all").plan(budget_bytes)
    if whole and method == "auto" and not longest:
        return [whole]
    chains = [chains_of(one, "lower_sets").plan(budget_bytes, longest=longest) for one in orders]
    if longest and any(chains):
        return [chain for chain in chains if chain]
    found = []
    for one, chain in zip(orders, chains, strict=True):
        for known in [chain] if chain else _least_that_fits(one, budget_bytes):
            better = rematerialize.best_plan(one, budget_bytes, known)
            found += [known, better] if method == "auto" else [better]
    return found


def _least_that_fits(graph: Graph, budget_bytes: int) -> list[Plan]:
    """Return a plan of least bytes for a budget that no chain fits, in a list; empty if none fits.

    One that recomputes each call at most once is preferred, since it is cheaper.
    """
    for once in (True, False):
        found = rematerialize.least_plan(graph, once=once)
        if found.peak_bytes <= budget_bytes:
            return [found]
    return []


def _tape_front(graph: Graph, method: Method, points: int | None) -> Iterator[Plan]:
    """Yield the tape's plans for every budget, or for a number of budgets (``points``)."""
    if method not in ("auto", rematerialize.NAME):
        yield from chains_of(graph, method).front(points)
        return
    for one in _orders(graph, method) if method == "auto" else ():
        yield from chains_of(one, "lower_sets").front(points)
    (most,) = _tape_plans(graph, None, "store_all")
    least = plan(graph, None, method).peak_bytes
    budgets = np.linspace(least, max(least, most.peak_bytes), points or POINTS).astype(int)
    for budget in dict.fromkeys(budgets.tolist()):
        yield plan(graph, budget, method)


def register_method(name: str, family: Family) -> None:
    """Add a method to `plan`, `min_budget` and `pareto`.

    Raises:
        GraphError: a method with this name is already registered; nothing has changed.
    """
    if name in ("auto", rematerialize.NAME, *METHODS):
        raise GraphError(f"method {name!r} is already registered: choose another name")
    METHODS[name] = family
