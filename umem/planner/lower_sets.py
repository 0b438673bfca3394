"""The approximate family of lower sets.

Kusumoto et al., NeurIPS 2019, section 4.3: of all lower sets only {v and what leads to v}, for
each node v, with the empty set and V. What differs: under the model ``saved`` the family is the
runs of the node order from its beginning, because a tape goes backward in exactly the reverse
order; a graph of more than ``MAX_SETS`` nodes keeps the sets with the fewest bytes on their
boundaries, one out of each stretch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from umem.planner.graph import Graph
from umem.planner.masks import bits, by_size
from umem.planner.plans import Model

MAX_SETS = 800
CHUNK = 256


def family(graph: Graph, model: Model) -> tuple[int, ...]:
    """The lower sets, sorted by size, from the empty set to all nodes."""
    return prefixes(graph) if model == "saved" else ancestors(graph)


def ancestors(graph: Graph) -> tuple[int, ...]:
    """For each node the node and all that leads to it; the empty set; all."""
    masks: list[int] = []
    for v, preds in enumerate(graph.numbered.preds):
        mask = 1 << v
        for x in preds:
            mask |= masks[x]
        masks.append(mask)
    found = by_size([0, *masks, (1 << len(masks)) - 1])
    return thinned(found, boundary_bytes(graph, found) if len(graph) > MAX_SETS else [])


def prefixes(graph: Graph) -> tuple[int, ...]:
    """The runs of the node order from its beginning."""
    g = graph.numbered
    changes = np.zeros(len(graph) + 2, np.int64)
    for v, users in enumerate(g.succs):
        if users:  # v lies on the boundary of the runs that hold it and not its last user
            changes[v + 1] += g.size[g.root[v]]
            changes[users[-1] + 1] -= g.size[g.root[v]]
    masks = tuple((1 << length) - 1 for length in range(len(graph) + 1))
    return thinned(masks, np.cumsum(changes)[: len(masks)].tolist())


def boundary_bytes(graph: Graph, masks: tuple[int, ...]) -> list[int]:
    """Of each lower set, the bytes of its nodes that others read.

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
    """At most about `MAX_SETS` of the masks, the first and the last among them."""
    if len(masks) <= MAX_SETS + 2:
        return masks
    bounds = np.linspace(1, len(masks) - 1, MAX_SETS // 2 + 1).astype(int)
    best = [min(range(low, high), key=weight.__getitem__) for low, high in pairwise(bounds)]
    return (masks[0], *(masks[i] for i in best), masks[-1])
