"""Plans that keep, recompute or offload each value.

Recomputations are planned for several budgets, from the given one up to the peak of keeping
everything; then as many of the kept values are offloaded as exceed the given budget. So the given
budget leads to recomputation only, and the largest one to offloading only. After the hybrid
policies of Capuchin (Peng et al., ASPLOS 2020) and PoocH (Ito et al., 2019); times are the
referee's.

Tried and dropped: a local search that then changed the decision on one value at a time made 1 of 30
steps of small graphs quicker, by 0.7%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from umem.planner.chains import METHODS, chains_of
from umem.planner.graph import Graph
from umem.planner.link import Link
from umem.planner.link_timetable import least_bytes, timetable
from umem.planner.offload_schedule import Decision, decided
from umem.planner.plans import Plan, Reruns, reruns_of
from umem.planner.rematerialize import keep_more

BUDGETS = 7
"""The number of budgets to plan for. A guess: no bench compares others."""
SHORT = 200
"""Every budget is planned anew for graphs of at most this many nodes.

In larger graphs, known plans, or the plan for one budget, are relaxed for the others.
"""


def starting_decisions(
    graph: Graph, budget_bytes: int, link: Link, known: Sequence[Plan], method: str
) -> list[Decision]:
    """Return decisions that fit a budget; empty if no tried one fits.

    ``known`` are plans that recompute calls and offload nothing, whether they fit or not.
    """
    candidates = _candidates(graph, budget_bytes, known, method)
    found = (decided(graph, reruns, budget_bytes, link) for reruns in candidates)
    return [decision for decision in found if decision is not None]


def least_decisions(
    graph: Graph, link: Link, known: Sequence[Plan], method: str
) -> tuple[int, list[Decision]]:
    """Return the smallest budget for which a decision is found, and the decisions for it.

    ``known`` are the plans of least bytes that offload nothing.
    """
    tried: list[Reruns] = [((),) * len(graph), *(reruns_of(graph, plan) for plan in known)]
    least = min(least_bytes(timetable(graph, reruns, link)) for reruns in tried)
    found = starting_decisions(graph, least, link, known, method)
    while least and (lower := starting_decisions(graph, least - 1, link, (), method)):
        best = min(lower, key=lambda decision: least_bytes(decision.table))
        least = least_bytes(best.table)
        again_at = decided(best.graph, best.reruns, least, link)
        found = [] if again_at is None else [again_at]
    return least, found


def _candidates(
    graph: Graph, budget_bytes: int, known: Sequence[Plan], method: str
) -> Iterator[Reruns]:
    """Yield candidates of recomputations."""
    nothing: Reruns = ((),) * len(graph)
    found = dict.fromkeys([nothing, *(reruns_of(graph, plan) for plan in known)])
    chains = chains_of(graph, method if method in METHODS else "lower_sets")
    most = max(timetable(graph, nothing).used)
    seeds = [*known]
    for part in range(1, BUDGETS):
        between = budget_bytes + (most - budget_bytes) * part // BUDGETS
        if len(graph) <= SHORT or not seeds:
            chain = chains.plan(between)
            seeds = [*known, *([chain] if chain else [])]
        for plan in seeds:
            found[keep_more(graph, reruns_of(graph, plan), between)] = None
    yield from found
