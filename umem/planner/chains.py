"""Plans from chains of lower sets; each method has a family of sets that chains step between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from umem.planner import lower_sets
from umem.planner.graph import Graph
from umem.planner.kusumoto.formula import KusumotoModel
from umem.planner.plans import Method, Model, Plan
from umem.planner.saved import SavedModel
from umem.planner.search import best
from umem.planner.step_table import INFINITE, Chain, Hop, Table, peak_of, time_of


class Family(NamedTuple):
    """A method of planning: the lower sets between which chains step, and the chains to choose
    from.

    Attributes:
        sets: from a graph and a model, the lower sets as bit masks, sorted by size, from the
            empty set to all nodes; under the model ``saved``, prefixes of the node order.
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


class Chains:
    """A method's chains through a graph, under a cost model."""

    def __init__(self, graph: Graph, method: Method, model: Model) -> None:
        self._graph, self._method, self._model = graph, method, model
        self._costs = SavedModel(graph) if model == "saved" else KusumotoModel(graph)
        family = METHODS[method]
        self._table = self._costs.table(family.sets(graph, model), exact=family.exact)
        make = family.chains
        self._some = None if make is None else list(make(graph, self._table, len(self._table.peak)))

    @cached_property
    def least_bytes(self) -> int:
        """Return the smallest budget that fits a chain."""
        if self._some is None:
            return self._table.least
        return min(peak_of(self._table, chain) for chain in self._some)

    def plan(self, budget_bytes: int | None = None, *, longest: bool = False) -> Plan | None:
        """Return the plan of least overhead, or of most (``longest``), within a budget.

        A budget of None is the least budget. Returns None if no chain fits.
        """
        limit = self.least_bytes if budget_bytes is None else min(budget_bytes, INFINITE - 1)
        table = self._table.longest_first() if longest else self._table
        if self._some is None:
            chain = best(table, limit)
        else:
            keys = [(time_of(table, chain), peak_of(table, chain), chain) for chain in self._some]
            chain = min((key for key in keys if key[1] <= limit), default=(0, 0, None))[2]
        return None if chain is None else self._plan_of(chain)

    def front(self, points: int | None) -> Iterator[Plan]:
        """Yield the plans for every budget, or for a number of budgets (``points``)."""
        if self._some is not None:
            yield from map(self._plan_of, self._some)
            return
        quickest = found = self.plan(INFINITE - 1)
        while found:
            yield found
            found = self.plan(found.peak_bytes - 1) if points is None else None
        if points is not None and quickest:
            for budget in np.linspace(self.least_bytes, quickest.peak_bytes, points):
                if found := self.plan(int(budget)):
                    yield found

    def _plan_of(self, chain: Chain) -> Plan:
        """Make a plan of a chain of lower sets: one block a step."""
        names, costs = self._graph.numbered.names, self._graph.numbered.cost
        masks, peak = self._table.sets, peak_of(self._table, chain)
        blocks = [self._costs.block(masks[i], masks[j], kind) for i, j, kind in chain]

        def named(numbers: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(names[v] for v in numbers)

        return Plan(
            blocks=tuple(named(block.nodes) for block in blocks),
            kept=named(tuple(v for block in blocks for v in block.kept)),
            recomputed=tuple(named(block.rerun) for block in blocks),
            stashed=named(tuple(v for block in blocks for v in block.stashed)),
            overhead=sum(costs[v] for block in blocks for v in block.rerun),
            peak_bytes=peak,
            method=self._method,
            objective="time",
            model=self._model,
            budget_bytes=peak,
        )


@lru_cache(maxsize=8)
def chains_of(graph: Graph, method: Method, model: Model = "saved") -> Chains:
    """Return the chains of a method on a graph; their table of costs is cached."""
    return Chains(graph, method, model)


def forget_tables() -> None:
    """Free the tables of costs of the last graphs, which take megabytes on the host."""
    chains_of.cache_clear()
