"""The families of lower sets of Kusumoto et al., NeurIPS 2019.

- The approximate family, section 4.3: only the lower sets {v and its ancestors} for each node v,
  with the empty set and V. Difference: a graph of more than ``MAX_SETS`` nodes keeps the sets with
  the fewest bytes on their boundaries, one out of each stretch.
- All lower sets, section 4.2: with them, dynamic programming finds the best chain of all. Their
  number can be exponential in the graph's width.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from umem.planner.graph import Graph
from umem.planner.step_table import bits, by_size, mask_of

MAX_SETS = 800
"""At most about this many lower sets are used, unless all are requested.

With half of them, plans of long chains have up to 17 points of a forward pass more overhead; twice
as many win 0.2 at the most, and take twice the planning (bench/planner_constants.py).
"""
CHUNK = 256
"""The number of lower sets whose boundaries are computed at once."""


def ancestors(graph: Graph) -> tuple[int, ...]:
    """Return for each node the set of the node and its ancestors; the empty set; all nodes."""
    masks: list[int] = []
    for v, preds in enumerate(graph.numbered.preds):
        mask = 1 << v
        for x in preds:
            mask |= masks[x]
        masks.append(mask)
    found = by_size([0, *masks, (1 << len(masks)) - 1])
    return thinned(found, boundary_bytes(graph, found) if len(graph) > MAX_SETS else [])


def boundary_bytes(graph: Graph, masks: tuple[int, ...]) -> list[int]:
    """Return for each lower set the bytes of its boundary: its nodes that others read.

    Cost: the sets times the edges, some hundred sets at a time.
    """
    g = graph.numbered
    pairs = [(v, w) for v, users in enumerate(g.succs) for w in users]
    if not pairs:
        return [0] * len(masks)
    sources, targets = np.array(pairs, np.int64).T
    firsts = np.flatnonzero(np.diff(sources, prepend=-1))
    size = np.array(g.size, np.int64)[sources[firsts]]
    found: list[int] = []
    for start in range(0, len(masks), CHUNK):
        inside = bits(masks[start : start + CHUNK], len(graph))
        crosses = inside[:, sources] & ~inside[:, targets]
        found += (np.logical_or.reduceat(crosses, firsts, axis=1) @ size).tolist()
    return found


def thinned(masks: tuple[int, ...], weight: list[int]) -> tuple[int, ...]:
    """Keep about `MAX_SETS` masks: first, last, and the one of least weight of each stretch."""
    if len(masks) <= MAX_SETS + 2:
        return masks
    bounds = np.linspace(1, len(masks) - 1, MAX_SETS // 2 + 1).astype(int)
    best = [min(range(low, high), key=weight.__getitem__) for low, high in pairwise(bounds)]
    return (masks[0], *(masks[i] for i in best), masks[-1])


def all_lower_sets(graph: Graph, limit: int) -> tuple[int, ...] | None:
    """Return all lower sets, sorted by size; None if there are more than the limit."""
    needs = [mask_of(preds) for preds in graph.numbered.preds]
    found = [0]
    for v, mask in enumerate(needs):  # the sets of the nodes before v, with v and without it
        found += [held | 1 << v for held in found if mask & ~held == 0]
        if len(found) > limit:
            return None
    return by_size(found)
