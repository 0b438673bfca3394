"""Plans under the formula of Kusumoto et al.: chains of lower sets, and keeping everything."""

from __future__ import annotations

from collections.abc import Iterator

from umem.planner.chains import chains_of
from umem.planner.graph import Graph
from umem.planner.kusumoto.families import all_lower_sets
from umem.planner.plans import Method, Plan

AUTO_SETS = 600
"""``auto`` searches all lower sets up to this number, in less than a second."""


def formula_plans(
    graph: Graph, budget_bytes: int | None, method: Method, *, longest: bool
) -> Iterator[Plan]:
    """Yield the best plan within a budget of each method that ``auto`` tries, or of one method.

    ``longest``: the best plan has the most overhead. A budget of None is each method's smallest.
    """
    for name in _methods(graph, method):
        if name == "store_all":
            found: Plan | None = keep_all(graph)
        else:
            found = chains_of(graph, name, "kusumoto").plan(budget_bytes, longest=longest)
        if found and (budget_bytes is None or found.peak_bytes <= budget_bytes):
            yield found


def formula_front(graph: Graph, method: Method, points: int | None) -> Iterator[Plan]:
    """Yield plans for every budget, or for a number of budgets (``points``) of each method."""
    for name in _methods(graph, method):
        if name == "store_all":
            yield keep_all(graph)
        else:
            yield from chains_of(graph, name, "kusumoto").front(points)


def _methods(graph: Graph, method: Method) -> tuple[Method, ...]:
    if method != "auto":
        return (method,)
    if all_lower_sets(graph, AUTO_SETS) is not None:
        return ("store_all", "lower_sets_exact", "lower_sets")
    return ("store_all", "chen", "lower_sets")


def keep_all(graph: Graph) -> Plan:
    """Return the plan that keeps all values: all values and gradients count at once."""
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
        objective="time",
        model="kusumoto",
        budget_bytes=peak,
    )
