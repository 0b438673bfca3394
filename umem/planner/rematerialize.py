"""Plans that may run a call again several times, in the order of the nodes.

Graphs of up to 63 nodes are searched (see `umem.planner.beam`), from a plan of lower sets on. In
larger ones that plan is freed early, and what there is room for is kept instead of run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from umem.planner import chains
from umem.planner.beam import Beam, Walk, Weights
from umem.planner.beam_facts import MOST, PARTIAL, Facts, Known
from umem.planner.easing import eased
from umem.planner.graph import Graph
from umem.planner.plans import Plan
from umem.planner.reruns import Reruns, plan_of, reruns_of

NAME = "rematerialize"
FINE, COARSE = 512, 64
"""The least budget is found to one part in so many; in graphs of more than `SHORT` nodes."""
SHORT = 24
"""In larger graphs the searches that make more than is needed are left out: they take longest."""
ONCE = 32
"""In larger graphs, chains of lower sets are as good where nothing may run again twice."""
WALKS = (
    Walk((Weights(0, 0), Weights(0, 0.1), Weights(0, 0.3), Weights(0, 1)), 0),
    Walk(tuple(Weights(above, 0) for above in (0.03, 0.1, 0.3, 0.6, 1)), 0),
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0.3, 0)), 2),
)
PROBES = (
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0, 3), Weights(0.3, 0)), 0),
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0, 3)), 2),
)


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
        return plan_of(graph, _search(graph, budget_bytes, reruns), budget_bytes, NAME)
    found = [plan_of(graph, eased(graph, one, budget_bytes), budget_bytes, NAME) for one in reruns]
    return min(found, key=lambda plan: (plan.overhead, plan.peak_bytes))


@lru_cache(maxsize=16)
def least_plan(graph: Graph, *, once: bool = False) -> Plan:
    """The plan of least bytes that is found, or of those in which nothing runs again twice.

    It does not depend on what calls cost.
    """
    (known,) = chains.plans(graph, None, "lower_sets", "time", "saved")
    best = plan_of(graph, reruns_of(graph, known), None, NAME)
    if len(graph) > (ONCE if once else MOST):
        return best
    fine = FINE if len(graph) <= SHORT else COARSE
    facts = Facts(graph, alike=True)
    low = _floor(facts)
    while best.peak_bytes - low > best.peak_bytes // fine:
        budget = (low + best.peak_bytes) // 2
        found = _fits(facts, budget, once=once)
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
        backward = sum(g.size[x] for x in needs) + g.stash[v] + facts.beside[v].during
        floor = max(floor, forward, backward)
    return floor


def _search(graph: Graph, budget_bytes: int, known: Sequence[Reruns]) -> Reruns:
    """The best plan that is found within a budget, or that is known to fit it.

    Cost: some tenths of a second for 24 nodes, some seconds for 63.
    """
    facts = Facts(graph)
    best = min((Known(facts, reruns) for reruns in known), key=lambda plan: plan.cost)
    saw_all = set[int]()  # which numbers of values more than needed were tried to the end
    for walk in _walks(WALKS, facts):
        if best.cost > PARTIAL and walk.ahead not in saw_all:
            beam = Beam(facts, budget_bytes, walk, best)
            found = beam.run()
            if found is not None:
                best = Known(facts, found)
            if beam.saw_all:
                saw_all.add(walk.ahead)
    return best.reruns


def _fits(facts: Facts, budget_bytes: int, *, once: bool) -> Reruns | None:
    """Some plan within a budget, in which nothing runs again twice if ``once``; None: none found.

    Cost: some hundredths of a second for 24 nodes, some tenths for 63.
    """
    for walk in _walks(PROBES, facts):
        found = Beam(facts, budget_bytes, walk, None, once=once).run()
        if found is not None:
            return found
    return None


def _walks(walks: tuple[Walk, ...], facts: Facts) -> list[Walk]:
    return [walk for walk in walks if not walk.ahead or facts.count <= SHORT]
