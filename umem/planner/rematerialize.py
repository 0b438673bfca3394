"""Plans that may recompute a call several times, with forward in the order of the nodes.

A search starts from a plan of lower sets: a beam search in graphs of up to 63 nodes (see
`umem.planner.beam`). In larger ones that plan frees values early, and values are kept instead of
recomputed if there is room.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from umem.planner.beam import Beam, Walk, Weights
from umem.planner.beam_facts import MOST, PARTIAL, Facts, Known
from umem.planner.chains import chains_of
from umem.planner.graph import Graph, Numbered
from umem.planner.link import Link, Move
from umem.planner.link_timetable import timetable
from umem.planner.plans import Plan, Reruns, plan_by_reruns, reruns_of
from umem.planner.schedule import actions
from umem.planner.usage_of_actions import floor, usage

NAME = "rematerialize"
FINE, COARSE = 512, 64
"""The least budget is found to one part in ``FINE``; to one in ``COARSE`` above `SHORT` nodes.

Guesses: no bench compares others.
"""
SHORT = 24
"""Graphs of at most this many nodes get the slowest walks, which recompute for later steps too."""
ONCE = 32
"""Graphs of at most this many nodes get a search that recomputes each call at most once.

In larger graphs, chains of lower sets are as good.
"""
WALKS = (
    Walk((Weights(0, 0), Weights(0, 0.1), Weights(0, 0.3), Weights(0, 1)), 0),
    Walk(tuple(Weights(above, 0) for above in (0.03, 0.1, 0.3, 0.6, 1)), 0),
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0.3, 0)), 2),
)
"""The walks in search of the least overhead, one after another.

Both kinds of weights are needed: without an upper bound, a plan of a random graph of 14 nodes had 9
units of overhead instead of 8. The weights themselves are guesses.
"""
PROBES = (
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0, 3), Weights(0.3, 0)), 0),
    Walk((Weights(0, 0), Weights(0, 0.3), Weights(0, 3)), 2),
)
"""The walks in search of any plan that fits, until one finds it. The weights are guesses."""


def best_plan(graph: Graph, budget_bytes: int, known: Plan) -> Plan:
    """Return the plan of least overhead found within a budget.

    ``known`` is a plan that fits; the search begins from it, and its result is never worse.
    """
    reruns = reruns_of(graph, known)
    if len(graph) <= MOST:
        reruns = _search(graph, budget_bytes, reruns)
    else:
        reruns = keep_more(graph, reruns, budget_bytes)
    return plan_of(graph, reruns, budget_bytes, NAME)


@lru_cache(maxsize=16)
def least_plan(graph: Graph, *, once: bool = False) -> Plan:
    """Return the plan of least bytes found; ``once``: recompute each call at most once.

    The plan does not depend on the costs of calls.
    """
    known = chains_of(graph, "lower_sets").plan()
    assert known is not None
    best = plan_of(graph, reruns_of(graph, known), None, NAME)
    if len(graph) > (ONCE if once else MOST):
        return best
    fine = FINE if len(graph) <= SHORT else COARSE
    facts = Facts(graph, alike=True)
    low, _ = floor(graph)
    while best.peak_bytes - low > best.peak_bytes // fine:
        budget = (low + best.peak_bytes) // 2
        found = _fits(facts, budget, once=once)
        if found is None:
            low = budget + 1
        else:
            best = plan_of(graph, found, None, NAME)
    return best


def _search(graph: Graph, budget_bytes: int, known: Reruns) -> Reruns:
    """Return the cheapest recomputations found, or known, within a budget.

    Cost: some tenths of a second for 24 nodes, some seconds for 63.
    """
    facts = Facts(graph)
    best = Known(facts, known)
    saw_all = set[int]()  # the `extra` of walks that pruned no state
    for walk in _walks(WALKS, facts):
        if best.cost > PARTIAL and walk.extra not in saw_all:
            beam = Beam(facts, budget_bytes, walk, best)
            found = beam.run()
            if found is not None:
                best = Known(facts, found)
            if beam.saw_all:
                saw_all.add(walk.extra)
    return best.reruns


def _fits(facts: Facts, budget_bytes: int, *, once: bool) -> Reruns | None:
    """Return recomputations that fit a budget; None: none found. ``once``: each call at most once.

    Cost: some hundredths of a second for 24 nodes, some tenths for 63.
    """
    for walk in _walks(PROBES, facts):
        found = Beam(facts, budget_bytes, walk, None, once=once).run()
        if found is not None:
            return found
    return None


def _walks(walks: tuple[Walk, ...], facts: Facts) -> list[Walk]:
    return [walk for walk in walks if not walk.extra or facts.count <= SHORT]


KEEPING_ROUNDS = 4
"""At most this many passes over the recomputations; each continues with the remaining ones.

Half and twice of it make the same 18 plans of large graphs (bench/planner_constants.py).
"""


class _Rerun(NamedTuple):
    """One recomputation.

    Attributes:
        step: the step of backward before which it runs.
        node: the call.
        since: the place, among all computations, of the value's last use before.
        at: its own place among all computations.
    """

    step: int
    node: int
    since: int
    at: int


def keep_more(graph: Graph, reruns: Reruns, budget_bytes: int) -> Reruns:
    """Keep values instead of recomputing them, as many as fit a budget.

    A value is kept if it fits at every moment from its last use to its recomputation; values with
    the highest cost for their bytes and time come first. A recomputation whose output is read only
    by removed recomputations is removed too. Recomputations that exceed the budget are not changed.

    Cost: proportional to the calls that run, times a few passes, and for each recomputation to
    the number of calls during which its value would be kept.
    """
    for _ in range(KEEPING_ROUNDS):
        during = np.array(timetable(graph, reruns).used, np.int64)
        if during.max() > budget_bytes:
            break
        kept = _worth_keeping(graph.numbered, reruns, during, budget_bytes)
        fewer = without(graph.numbered, reruns, kept)
        if fewer == reruns:
            break
        reruns = fewer
    return reruns


def _every_recomputation(g: Numbered, reruns: Reruns) -> list[_Rerun]:
    """List all recomputations in order of time, each with the last use of its value before."""
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
    """Choose recomputations to avoid by keeping the value; return them as (step, call).

    The highest cost for bytes and time is chosen first. The bytes of the kept values are added to
    ``during`` in place.
    """
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
    """Remove some recomputations, and others whose outputs only these read.

    Args:
        g: the graph.
        reruns: all recomputations.
        gone: pairs of a step of backward and a call not to recompute before it.
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


# -- plans of recomputations ---------------------------------------------------------------------


def plan_of(
    graph: Graph,
    reruns: Reruns,
    budget_bytes: int | None,
    method: str,
    moves: tuple[Move, ...] = (),
    link: Link | None = None,
) -> Plan:
    """Make the plan of recomputations, with its bytes; a budget of None is the plan's peak."""
    found = replace(plan_by_reruns(graph, reruns, method), moves=moves, link=link)
    peak = usage(graph, actions(graph, found)).peak_bytes
    return replace(
        found, peak_bytes=peak, budget_bytes=peak if budget_bytes is None else budget_bytes
    )
