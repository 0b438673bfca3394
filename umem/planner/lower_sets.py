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
from umem.planner.masks import by_size
from umem.planner.plans import Model

MAX_SETS = 800


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
    return thinned(found, [_boundary_bytes(graph, mask) for mask in found])


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


def _boundary_bytes(graph: Graph, mask: int) -> int:
    if len(graph) <= MAX_SETS:
        return 0
    g = graph.numbered
    return sum(
        g.size[v]
        for v, users in enumerate(g.succs)
        if mask >> v & 1 and any(not mask >> w & 1 for w in users)
    )


def thinned(masks: tuple[int, ...], weight: list[int]) -> tuple[int, ...]:
    """At most about `MAX_SETS` of the masks, the first and the last among them."""
    if len(masks) <= MAX_SETS + 2:
        return masks
    bounds = np.linspace(1, len(masks) - 1, MAX_SETS // 2 + 1).astype(int)
    best = [min(range(low, high), key=weight.__getitem__) for low, high in pairwise(bounds)]
    return (masks[0], *(masks[i] for i in best), masks[-1])
