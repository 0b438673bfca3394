"""The families of lower sets between which chains of blocks may step.

- The approximate family, Kusumoto et al., NeurIPS 2019, section 4.3: of all lower sets only {v and
  what leads to v}, for each node v, with the empty set and V. Differences: under the model
  ``saved`` the family is the prefixes of the node order, because a tape runs backward in exactly
  the reverse order; a graph of more than ``MAX_SETS`` nodes keeps the sets with the fewest bytes on
  their boundaries, one out of each stretch.
- All lower sets, section 4.2: with them, dynamic programming finds the best chain there is. Their
  number can be exponential in the graph's width.
- Prefixes whose boundary is a single value: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with
  Sublinear Memory Cost", arXiv 1604.06174, algorithm 3: go through the nodes in order, and close a
  block at the first single value after it has grown to a number of bytes. Their search over that
  number is a sweep here, from one block to a block for each cut; with blocks of equal bytes the
  best is about sqrt(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from umem.errors import GraphError
from umem.planner.graph import Graph
from umem.planner.plans import Model
from umem.planner.step_table import INFINITE, Chain, Hop, Table, bits, by_size, mask_of

MAX_SETS = 800
"""At most about this many lower sets are stepped between, unless all are asked for."""
CHUNK = 256
"""The number of lower sets whose boundaries are computed at once."""


def approximate_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return the lower sets of the family, sorted by size, from the empty set to all nodes."""
    return prefixes(graph) if model == "saved" else ancestors(graph)


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


def prefixes(graph: Graph) -> tuple[int, ...]:
    """Return the prefixes of the node order, the empty one and the whole among them."""
    g = graph.numbered
    changes = np.zeros(len(graph) + 2, np.int64)
    for v, users in enumerate(g.succs):
        if users:  # v lies on the boundary of the prefixes that hold it and not its last user
            changes[v + 1] += g.size[g.root[v]]
            changes[users[-1] + 1] -= g.size[g.root[v]]
    masks = tuple((1 << length) - 1 for length in range(len(graph) + 1))
    return thinned(masks, np.cumsum(changes)[: len(masks)].tolist())


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


LIMITS: dict[Model, int] = {"kusumoto": 3000, "saved": 350}
"""By model, at most this many lower sets: a step between two costs more under ``saved``.

There, twice as many are allowed if each is a prefix of the node order.
"""


def exact_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return all lower sets, sorted by size.

    Raises:
        GraphError: there are more than the model's limit.
    """
    limit = LIMITS[model]
    found = all_lower_sets(graph, limit)
    if found is None and model == "saved" and len(graph) < 2 * limit:
        found = all_lower_sets(graph, len(graph) + 1)  # as many as there are prefixes
    if found is None:
        raise GraphError(
            f"the graph has more than {limit} lower sets, too many for "
            f'method="lower_sets_exact" with model={model!r}; use method="lower_sets"'
        )
    return found


def all_lower_sets(graph: Graph, limit: int) -> tuple[int, ...] | None:
    """Return all lower sets, sorted by size; None where there are more than the limit."""
    needs = [mask_of(preds) for preds in graph.numbered.preds]
    found = [0]
    for v, mask in enumerate(needs):  # the sets of the nodes before v, with v and without it
        found += [held | 1 << v for held in found if mask & ~held == 0]
        if len(found) > limit:
            return None
    return by_size(found)


def single_value_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return the prefixes of the node order whose boundary is a single value; the empty set; all.

    In graphs of more than `MAX_SETS` nodes, under ``saved``, only those of them that `prefixes`
    keeps, whose steps the table of prefixes has.
    """
    g = graph.numbered
    looked_at = {*prefixes(graph)} if model == "saved" and len(graph) > MAX_SETS else None
    found = [0]
    open_values: dict[int, int] = {}  # by the node whose bytes they lie in
    waits = [len(users) for users in g.succs]
    for v, preds in enumerate(g.preds):
        for x in preds:
            waits[x] -= 1
            if waits[x] == 0:
                open_values[g.root[x]] -= 1
                if open_values[g.root[x]] == 0:
                    del open_values[g.root[x]]
        if waits[v]:
            open_values[g.root[v]] = open_values.get(g.root[v], 0) + 1
        if len(open_values) == 1 and v + 1 < len(graph):
            mask = (1 << v + 1) - 1
            if looked_at is None or mask in looked_at:
                found.append(mask)
    return thinned((*found, (1 << len(graph)) - 1), [0] * (len(found) + 1))


def chains_by_size(graph: Graph, table: Table, kinds: int) -> Iterator[Chain]:
    """Yield the greedy chain for each number of bytes that a block grows to."""
    size = graph.numbered.size
    total = [sum(size[: mask.bit_length()]) for mask in table.sets]
    last = len(table.sets) - 1
    seen: set[tuple[int, ...]] = set()
    for count in range(1, min(last, 100) + 1):
        places = _greedy(total, total[-1] / count)
        if places in seen:
            continue
        seen.add(places)
        links = []
        for source, target in pairwise(places):
            kind = kinds - 1 if target == last else 0  # a last block is stored where that exists
            links.append(Hop(source, target, kind))
        if all(table.peak[kind, target, source] < INFINITE for source, target, kind in links):
            yield tuple(links)


def _greedy(total: list[int], grown: float) -> tuple[int, ...]:
    """Return the cuts, first and last included, that close a block once it has ``grown`` bytes."""
    places = [0]
    for place in range(1, len(total) - 1):
        if total[place] - total[places[-1]] >= grown:
            places.append(place)
    return (*places, len(total) - 1)
