"""Plans that may run a call again several times, in the order of the nodes.

Graphs of up to 63 nodes are searched (see `umem.planner.beam`), from a plan of lower sets on. In
larger ones that plan is freed early, and what there is room for is kept instead of run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from umem.planner import chains
from umem.planner.beam import fits, search
from umem.planner.beam_facts import MOST, Facts
from umem.planner.easing import eased
from umem.planner.graph import Graph
from umem.planner.plans import Plan
from umem.planner.reruns import plan_of, reruns_of

NAME = "rematerialize"
FINE = 1 << 9
"""The least budget is found to one part in so many."""


def best_plan(graph: Graph, budget_bytes: int, known: Sequence[Plan] = ()) -> Plan | None:
    """The plan of least overhead that is found within a budget; None where there is none.

    ``known`` are plans that fit, and whose forward has the order of the nodes. Without any, those
    of lower sets are looked at, and the plan of least bytes.
    """
    plans = [*known] or chains.plans(graph, budget_bytes, "lower_sets", "time", "saved")
    if not plans:
        least = least_plan(graph)
        if least.peak_bytes > budget_bytes:
            return None
        plans = [least]
    reruns = [reruns_of(graph, plan) for plan in plans]
    if len(graph) <= MOST:
        return plan_of(graph, search(graph, budget_bytes, reruns), budget_bytes, NAME)
    found = [plan_of(graph, eased(graph, one, budget_bytes), budget_bytes, NAME) for one in reruns]
    return min(found, key=lambda plan: (plan.overhead, plan.peak_bytes))


@lru_cache(maxsize=16)
def least_plan(graph: Graph, most_overhead: float | None = None) -> Plan:
    """The plan of least bytes that is found, of those that cost no more than so much."""
    (known,) = chains.plans(graph, None, "lower_sets", "time", "saved")
    best = plan_of(graph, reruns_of(graph, known), None, NAME)
    if len(graph) > MOST:
        return best
    facts = Facts(graph.numbered)
    low = _floor(facts)
    while best.peak_bytes - low > best.peak_bytes // FINE:
        budget = (low + best.peak_bytes) // 2
        found = fits(facts, budget, most_overhead)
        if found is None:
            low = budget + 1
        else:
            best = plan_of(graph, found, None, NAME)
    return best


def _floor(facts: Facts) -> int:
    """What one call needs at once, forward or backward."""
    g, floor = facts.g, 0
    for v in range(facts.count):
        read = {g.root[x] for x in range(v + 1) if facts.last_user[x] >= v} | {g.root[v]}
        forward = sum(g.size[x] for x in read) + g.stash[v] + g.workspace[v] + g.forward_bytes
        needs = {g.root[x] for x in g.needs[v]}
        backward = sum(g.size[x] for x in needs) + g.stash[v] + facts.during[v]
        floor = max(floor, forward, backward)
    return floor
