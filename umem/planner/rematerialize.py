"""Plans that may run a call again several times, in the order of the nodes.

Graphs of up to 63 nodes are searched (see `umem.planner.beam`), from a plan of lower sets on. In
larger ones that plan is freed early, and what there is room for is kept instead of run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from umem.planner import chains
from umem.planner.beam import Beam, Walk, Weights
from umem.planner.beam_facts import MOST, PARTIAL, Facts, Known
from umem.planner.graph import Graph, Numbered
from umem.planner.plans import Plan
from umem.planner.reruns import Reruns, plan_of, reruns_of
from umem.planner.timetable import bytes_during

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
    found = [
        plan_of(graph, keep_more(graph, one, budget_bytes), budget_bytes, NAME) for one in reruns
    ]
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


KEEPING_ROUNDS = 4


class _Rerun(NamedTuple):
    """A call that runs again: before which step, since when it is missed, and where it runs."""

    step: int
    node: int
    since: int
    at: int


def keep_more(graph: Graph, reruns: Reruns, budget_bytes: int) -> Reruns:
    """What still runs again; a plan that does not fit the budget stays as it is."""
    for _ in range(KEEPING_ROUNDS):
        during = np.array(bytes_during(graph, reruns), np.int64)
        if during.max() > budget_bytes:
            break
        kept = _worth_keeping(graph.numbered, reruns, during, budget_bytes)
        fewer = without(graph.numbered, reruns, kept)
        if fewer == reruns:
            break
        reruns = fewer
    return reruns


def _every_recomputation(g: Numbered, reruns: Reruns) -> list[_Rerun]:
    """Everything that runs again, in order."""
    found: list[_Rerun] = []
    last: dict[int, int] = {}
    at = 0
    for v, preds in enumerate(g.preds):
        last |= dict.fromkeys((*preds, v), at)
        at += 1
    for step in reversed(range(len(reruns))):
        for v in reruns[step]:
            found.append(_Rerun(step, v, last[v], at))
            last |= dict.fromkeys((*g.preds[v], v), at)
            at += 1
        last |= dict.fromkeys(g.needs[step], at)
        at += 1
    return found


def _worth_keeping(
    g: Numbered,
    reruns: Reruns,
    during: np.ndarray[tuple[int], np.dtype[np.int64]],
    budget_bytes: int,
) -> set[tuple[int, int]]:
    """The steps and calls of which the calls need not run again."""
    kept: set[tuple[int, int]] = set()

    def worth(one: _Rerun) -> float:
        nbytes = g.size[one.node] + g.stash[one.node]
        return -g.cost[one.node] / (1 + nbytes * (one.at - one.since))

    for one in sorted(_every_recomputation(g, reruns), key=worth):
        between = during[one.since + 1 : one.at]
        nbytes = g.size[one.node] + g.stash[one.node]
        is_whole = g.root[one.node] == one.node  # a view costs little
        if is_whole and between.max(initial=0) + nbytes <= budget_bytes:
            between += nbytes
            kept.add((one.step, one.node))
    return kept


def without(g: Numbered, reruns: Reruns, gone: set[tuple[int, int]]) -> Reruns:
    """Leave out some of what runs again, and what ran again for its sake alone.

    Args:
        g: the graph.
        reruns: what runs again.
        gone: the steps of backward, and what is not to run again before them.
    """
    values, stashes = set[int](), set[int]()
    found: list[tuple[int, ...]] = []
    for step, rerun in enumerate(reruns):
        values.update(g.needs[step])
        if g.stash[step]:
            stashes.add(step)
        runs: list[int] = []
        for v in reversed(rerun):
            if (step, v) not in gone and (v in values or v in stashes):
                runs.append(v)
                values.discard(v)
                stashes.discard(v)
                values.update(g.preds[v])
        found.append(tuple(reversed(runs)))
    return tuple(found)
