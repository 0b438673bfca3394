"""What a long plan runs again that there is room to keep.

Of what runs again, each value is kept instead, if that fits at every moment from its last use to
the place where it would run again; what costs most for its bytes and its time comes first. What
then nobody reads does not run again either. Cost: proportional to the calls that run, some times
over, and for each that runs again to the time it would be kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from umem.planner.graph import Graph, Numbered
from umem.planner.reruns import Reruns
from umem.planner.timetable import bytes_during

ROUNDS = 4


class _Rerun(NamedTuple):
    """A call that runs again: before which step, since when it is missed, and where it runs."""

    step: int
    node: int
    since: int
    at: int


def eased(graph: Graph, reruns: Reruns, budget_bytes: int) -> Reruns:
    """What still runs again; a plan that does not fit the budget stays as it is."""
    for _ in range(ROUNDS):
        during = np.array(bytes_during(graph, reruns), np.int64)
        if during.max() > budget_bytes:
            break
        kept = _kept(graph.numbered, reruns, during, budget_bytes)
        fewer = without(graph.numbered, reruns, kept)
        if fewer == reruns:
            break
        reruns = fewer
    return reruns


def _all(g: Numbered, reruns: Reruns) -> list[_Rerun]:
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


def _kept(
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

    for one in sorted(_all(g, reruns), key=worth):
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
