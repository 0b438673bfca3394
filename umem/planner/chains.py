"""Plans from chains of lower sets; each method has a family of sets that chains step between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from umem.planner import lower_sets
from umem.planner.graph import Graph
from umem.planner.kusumoto import KusumotoModel
from umem.planner.plans import Method, Model, Objective, Plan
from umem.planner.prefixes import WINDOW
from umem.planner.saved import SavedModel
from umem.planner.search import best
from umem.planner.step_table import INFINITE, Chain, Hop, Table, peak_of, time_of


class Family(NamedTuple):
    """A method of planning: the lower sets that chains step between, and the chains to choose from.

    Attributes:
        sets: from a graph and a model, the lower sets as bit masks, sorted by size, from the
            empty set to all nodes.
        chains: from a graph, the table of steps between them and the number of kinds of a step,
            the chains to choose from; None: every chain, by dynamic programming.
        exact: True if costs are never rounded.
    """

    sets: Callable[[Graph, Model], tuple[int, ...]]
    chains: Callable[[Graph, Table, int], Iterator[Chain]] | None = None
    exact: bool = False


def _all_at_once(graph: Graph, model: Model) -> tuple[int, ...]:
    return 0, (1 << len(graph)) - 1


def _one_block(graph: Graph, table: Table, kinds: int) -> Iterator[Chain]:
    yield (Hop(0, 1, kinds - 1),)


METHODS = {
    "store_all": Family(_all_at_once, _one_block),
    "chen": Family(lower_sets.single_value_family, lower_sets.chains_by_size),
    "lower_sets": Family(lower_sets.approximate_family),
    "lower_sets_exact": Family(lower_sets.exact_family, exact=True),
}
"""The family of every method, by the method's name."""


_MODELS: dict[Model, type[KusumotoModel] | type[SavedModel]] = {
    "kusumoto": KusumotoModel,
    "saved": SavedModel,
}


class _Problem(NamedTuple):
    """A graph under a cost model, and the steps between lower sets that a method may take."""

    graph: Graph
    model: KusumotoModel | SavedModel
    table: Table
    family: Family

    def chains(self) -> list[Chain] | None:
        """Return the chains that the method chooses from; None if it searches all chains."""
        make = self.family.chains
        return None if make is None else list(make(self.graph, self.table, self.model.kinds))


@lru_cache(maxsize=8)
def _problem(graph: Graph, method: Method, model: Model) -> _Problem:
    family = METHODS[method]
    costs = _MODELS[model](graph)
    sets = family.sets(graph, model)
    table = None
    if model == "saved" and method == "chen" and _are_near(sets):
        table = _problem(graph, "lower_sets", model).table.of(sets)
    return _Problem(graph, costs, table or costs.table(sets, exact=family.exact), family)


def forget_tables() -> None:
    """Free the tables of costs of the last graphs, which take megabytes on the host."""
    _problem.cache_clear()


def _are_near(sets: tuple[int, ...]) -> bool:
    """Tell whether each set adds at most `WINDOW` nodes: a table of prefixes has such steps."""
    return all(b.bit_length() - a.bit_length() <= WINDOW for a, b in pairwise(sets))


def plans(
    graph: Graph, budget_bytes: int | None, method: Method, objective: Objective, model: Model
) -> list[Plan]:
    """Return the method's best plan within a budget, in a list; empty if none fits.

    A budget of None is the least that the method can do.
    """
    if method == "store_all" and model == "kusumoto":
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
    """Return the chain within a limit of the least overhead, or the most for ``memory``."""
    sign = -1 if objective == "memory" else 1
    fit = [(sign * time_of(table, c), peak_of(table, c), c) for c in chains]
    return min((key for key in fit if key[1] <= limit), default=(0, 0, None))[2]


def _keep_all(graph: Graph, objective: Objective) -> Plan:
    """Return the plan that keeps all, under ``kusumoto``: every value and gradient counts."""
    g = graph.numbered
    peak = sum(g.size) + sum(g.grad)
    return Plan(
        blocks=(g.names,),
        kept=g.names,
        recomputed=((),),
        stashed=g.names,
        overhead=0,
        peak_bytes=peak,
        method="store_all",
        objective=objective,
        model="kusumoto",
        budget_bytes=peak,
    )


def _plan_of(
    problem: _Problem, chain: Chain, method: Method, objective: Objective, limit: int
) -> Plan:
    """Make a plan of a chain of lower sets: one block a step."""
    names, costs = problem.graph.numbered.names, problem.graph.numbered.cost
    masks = problem.table.sets
    blocks = [problem.model.block(masks[i], masks[j], kind) for i, j, kind in chain]

    def named(numbers: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(names[v] for v in numbers)

    return Plan(
        blocks=tuple(named(block.nodes) for block in blocks),
        kept=named(tuple(v for block in blocks for v in block.kept)),
        recomputed=tuple(named(block.rerun) for block in blocks),
        stashed=named(tuple(v for block in blocks for v in block.stashed)),
        overhead=sum(costs[v] for block in blocks for v in block.rerun),
        peak_bytes=peak_of(problem.table, chain),
        method=method,
        objective=objective,
        model=problem.model.name,
        budget_bytes=limit,
    )


def front(graph: Graph, method: Method, model: Model, points: int | None) -> list[Plan]:
    """Return a method's plans for every budget, or for a number of budgets (``points``)."""
    if method == "store_all" and model == "kusumoto":
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
            found += plans(graph, int(budget), method, "time", model)
    return found
