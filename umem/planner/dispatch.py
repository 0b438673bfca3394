"""The planners' public face: which algorithm for which question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from umem.errors import BudgetError, GraphError
from umem.planner import chen, exact, lower_sets
from umem.planner.checks import checked_budget, shown, whole_number
from umem.planner.graph import Graph
from umem.planner.paper import PaperModel
from umem.planner.plans import MODELS, OBJECTIVES, Method, Model, Objective, Plan
from umem.planner.referee import simulate
from umem.planner.saved import SavedModel
from umem.planner.search import INFINITE, Chain, Link, Table, best, peak_of, time_of
from umem.units import format_bytes

AUTO_SETS = {"paper": 600, "saved": 80}
"""Up to so many lower sets, ``auto`` looks at all of them: that takes less than a second."""
EVERY_POINT = 64
"""Up to so many nodes, `pareto` looks for every point."""


def plan(
    graph: Graph,
    budget_bytes: int | None = None,
    method: Method = "auto",
    objective: Objective = "time",
    model: Model = "paper",
) -> Plan:
    """Decide what to keep and what to run again, so that a step takes no more than a budget.

    Cost: about a second for ``auto`` and ``lower_sets``, two with 10,000 nodes;
    ``lower_sets_exact`` grows with the square of the number of lower sets. Pure; what it
    works out of a graph is remembered.

    Args:
        graph: the forward pass.
        budget_bytes: above the constant of parameters and state, which the caller adds; None:
            the least that the method can do.
        method: ``store_all``; ``chen``; ``lower_sets``, the approximate family;
            ``lower_sets_exact``, all lower sets; ``auto``, the best of them within a second; or
            what `register_method` was given.
        objective: ``time``, the least overhead within the budget; ``memory``, the most, whose
            coarse blocks leave more to be freed early.
        model: ``paper``, the formula of Kusumoto et al.; ``saved``, what backward needs, freed
            early.

    Raises:
        BudgetError: no plan of the method fits; names the smallest budget and what forces it.
        GraphError: too many lower sets for the exact method.

    >>> from umem.planner import Node
    >>> chain = [Node(name, 4, 1) for name in "abcdefghi"]
    >>> graph = Graph(chain, zip("abcdefgh", "bcdefghi"))
    >>> plan(graph, 30, model="saved").overhead
    4
    """
    budget_bytes = _checked(graph, budget_bytes, method, objective, model)
    if not len(graph):
        return Plan((), (), (), (), 0, 0, method, objective, model, budget_bytes or 0)
    found: list[Plan] = []
    for name in _methods(graph, method, model):
        found += _plans(graph, budget_bytes, name, objective, model)
    if not found:
        raise _too_small(graph, budget_bytes or 0, method, model)
    if budget_bytes is None:
        least = min(candidate.peak_bytes for candidate in found)
        found = [candidate for candidate in found if candidate.peak_bytes == least]
    sign = -1 if objective == "memory" else 1
    return min(found, key=lambda candidate: (sign * candidate.overhead, candidate.peak_bytes))


def min_budget(graph: Graph, method: Method = "auto", model: Model = "paper") -> int:
    """The smallest budget that a plan of the method fits, in bytes.

    By bisection over the peaks that chains can have; exact for the method's family.
    """
    return plan(graph, None, method, "time", model).peak_bytes


def pareto(
    graph: Graph, method: Method = "auto", model: Model = "paper", points: int | None = None
) -> list[tuple[float, int]]:
    """Overhead against peak bytes, of the plans that no other beats in both; least bytes last.

    Args:
        graph: the forward pass.
        method: as in `plan`.
        model: as in `plan`.
        points: how many budgets to look at, evenly from the least to where nothing is gained;
            None: every point on graphs of up to 64 nodes, 33 budgets on larger ones.
    """
    _checked(graph, None, method, "time", model)
    if points is not None:
        count = whole_number(points)
        if count is None or count < 2:
            raise GraphError(f"points is a whole number from 2 on; got {shown(points)}")
        points = count
    if not len(graph):
        return []
    if points is None and len(graph) > EVERY_POINT:
        points = 33
    found = {
        (candidate.overhead, candidate.peak_bytes)
        for name in _methods(graph, method, model)
        for candidate in _front(graph, name, model, points)
    }
    front: list[tuple[float, int]] = []
    for overhead, peak in sorted(found):
        if not front or peak < front[-1][1]:
            front.append((overhead, peak))
    return front


# -- what is asked -----------------------------------------------------------------------------


def _checked(
    graph: Graph, budget_bytes: int | None, method: Method, objective: Objective, model: Model
) -> int | None:
    """The budget as an int, where all that is asked for makes sense."""
    for name, value, choices in (
        ("method", method, ("auto", *METHODS)),
        ("objective", objective, OBJECTIVES),
        ("model", model, MODELS),
    ):
        if value not in choices:
            raise GraphError(f"{name} is one of {', '.join(choices)}; got {shown(value)}")
    if not isinstance(graph, Graph):
        raise GraphError(f"graph is a umem.planner.Graph; got a {type(graph).__name__}")
    return checked_budget(budget_bytes)


def _methods(graph: Graph, method: Method, model: Model) -> tuple[Method, ...]:
    if method != "auto":
        return (method,)
    if exact.lower_sets(graph, AUTO_SETS[model]) is not None:
        return ("store_all", "lower_sets_exact", "lower_sets")
    return ("store_all", "chen", "lower_sets")


def _too_small(graph: Graph, budget_bytes: int, method: Method, model: Model) -> BudgetError:
    tightest = plan(graph, None, method, "time", model)
    moments = simulate(graph, tightest, liveness=model == "saved").timeline
    forced = max(moments, key=lambda moment: moment.during_bytes).action
    smallest = tightest.peak_bytes
    return BudgetError(
        f"no plan of method {method!r} needs as little as {format_bytes(budget_bytes)} "
        f"({budget_bytes} bytes): the smallest budget is {format_bytes(smallest)} "
        f"({smallest} bytes), which {forced.kind} of {forced.node!r} forces"
    )


# -- how it is answered ------------------------------------------------------------------------


class Family(NamedTuple):
    """A method of planning: between which lower sets chains may step, and which are looked at.

    Attributes:
        sets: from a graph and a model, the lower sets as bit masks, sorted by size, from the
            empty set to all nodes.
        chains: from a graph, the table of steps between them and the number of kinds of a step,
            the chains to choose from; None: every chain, by dynamic programming.
        exact: whether costs are never rounded.
    """

    sets: Callable[[Graph, Model], tuple[int, ...]]
    chains: Callable[[Graph, Table, int], Iterator[Chain]] | None = None
    exact: bool = False


def _all_at_once(graph: Graph, model: Model) -> tuple[int, ...]:
    return 0, (1 << len(graph)) - 1


def _one_block(graph: Graph, table: Table, kinds: int) -> Iterator[Chain]:
    yield (Link(0, 1, kinds - 1),)


METHODS = {
    "store_all": Family(_all_at_once, _one_block),
    "chen": Family(chen.family, chen.chains),
    "lower_sets": Family(lower_sets.family),
    "lower_sets_exact": Family(exact.family, exact=True),
}
"""Every method by its name; ``auto`` takes the best of some of them."""


def register_method(name: str, family: Family) -> None:
    """Have `plan`, `min_budget` and `pareto` know one more method.

    Raises:
        GraphError: there is one of that name; nothing has changed.
    """
    if name == "auto" or name in METHODS:
        raise GraphError(f"there is a method {name!r} already: choose another name")
    METHODS[name] = family


_MODELS: dict[Model, type[PaperModel] | type[SavedModel]] = {
    "paper": PaperModel,
    "saved": SavedModel,
}


class _Problem(NamedTuple):
    """A graph under a model, and the steps that a method may take."""

    graph: Graph
    model: PaperModel | SavedModel
    table: Table
    family: Family

    def chains(self) -> list[Chain] | None:
        """The chains of a method that does not search."""
        make = self.family.chains
        return None if make is None else list(make(self.graph, self.table, self.model.kinds))


@lru_cache(maxsize=8)
def _problem(graph: Graph, method: Method, model: Model) -> _Problem:
    family = METHODS[method]
    costs = _MODELS[model](graph)
    table = costs.table(family.sets(graph, model), exact=family.exact)
    return _Problem(graph, costs, table, family)


def _plans(
    graph: Graph, budget_bytes: int | None, method: Method, objective: Objective, model: Model
) -> list[Plan]:
    """The method's plan, if one fits."""
    if method == "store_all" and model == "paper":
        found = _keep_all(graph, objective)
        fits = budget_bytes is None or found.peak_bytes <= budget_bytes
        return [replace(found, budget_bytes=budget_bytes or found.peak_bytes)] if fits else []
    problem = _problem(graph, method, model)
    table, limit, chains = problem.table, budget_bytes, problem.chains()
    if chains is not None:
        if limit is None:
            limit = min(peak_of(table, chain) for chain in chains)
        chain = _best_of(table, chains, limit, objective)
    else:
        limit = table.least if limit is None else min(limit, INFINITE - 1)
        chain = best(table, limit, objective)
    return [] if chain is None else [_plan_of(problem, chain, method, objective, limit)]


def _best_of(table: Table, chains: list[Chain], limit: int, objective: Objective) -> Chain | None:
    sign = -1 if objective == "memory" else 1
    fit = [(sign * time_of(table, c), peak_of(table, c), c) for c in chains]
    return min((key for key in fit if key[1] <= limit), default=(0, 0, None))[2]


def _keep_all(graph: Graph, objective: Objective) -> Plan:
    """Under the model ``paper``: every value and every gradient."""
    g = graph.numbered
    peak = sum(g.size) + sum(g.grad)
    return Plan((g.names,), g.names, ((),), g.names, 0, peak, "store_all", objective, "paper", peak)


def _plan_of(
    problem: _Problem, chain: Chain, method: Method, objective: Objective, limit: int
) -> Plan:
    names, costs = problem.graph.numbered.names, problem.graph.numbered.cost
    masks = problem.table.sets
    blocks = [problem.model.block(masks[i], masks[j], kind) for i, j, kind in chain]
    if isinstance(problem.model, SavedModel):
        passed = [0, *(masks[link.target] for link in chain)]
        peak = problem.model.peak_of(passed, [link.kind for link in chain])
    else:
        peak = peak_of(problem.table, chain)

    def named(numbers: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(names[v] for v in numbers)

    return Plan(
        blocks=tuple(named(block.nodes) for block in blocks),
        kept=named(tuple(v for block in blocks for v in block.kept)),
        recomputed=tuple(named(block.rerun) for block in blocks),
        stashed=named(tuple(v for block in blocks for v in block.stashed)),
        overhead=sum(costs[v] for block in blocks for v in block.rerun),
        peak_bytes=peak,
        method=method,
        objective=objective,
        model=problem.model.name,
        budget_bytes=limit,
    )


def _front(graph: Graph, method: Method, model: Model, points: int | None) -> list[Plan]:
    """A method's plans for every budget, or for so many."""
    if method == "store_all" and model == "paper":
        return [_keep_all(graph, "time")]
    problem = _problem(graph, method, model)
    table, chains = problem.table, problem.chains()
    if chains is not None:
        return [_plan_of(problem, c, method, "time", peak_of(table, c)) for c in chains]
    found: list[Plan] = []
    limit = INFINITE - 1
    while chain := best(table, limit, "time"):
        limit = peak_of(table, chain)
        found.append(_plan_of(problem, chain, method, "time", limit))
        limit = min(limit, found[-1].peak_bytes) - 1
        if points is not None:
            break
    if points is not None:
        for budget in np.linspace(table.least, found[0].peak_bytes, points):
            found += _plans(graph, int(budget), method, "time", model)
    return found
