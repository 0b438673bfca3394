"""The families of lower sets between which chains of blocks may step.

- Under the model ``saved``, the prefixes of the node order: the program decides the order of
  forward, and a tape runs backward in exactly the reverse order. A graph of more than ``MAX_SETS``
  nodes keeps the prefixes with the fewest bytes on their boundaries, one out of each stretch.
- Under ``kusumoto``, the families of the paper, in `umem.planner.kusumoto.families`.
- Prefixes whose boundary is a single value: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with
  Sublinear Memory Cost", arXiv 1604.06174, algorithm 3: visit the nodes in order, and close a block
  at the first single value after it has grown to a number of bytes. They search for that number;
  here all are tried, from one block to a block for each cut. With blocks of equal bytes the best
  number of blocks is about sqrt(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from umem.errors import GraphError
from umem.planner.graph import Graph
from umem.planner.kusumoto.families import all_lower_sets, ancestors, thinned
from umem.planner.plans import Model
from umem.planner.step_table import INFINITE, Chain, Hop, Table

LIMITS: dict[Model, int] = {"kusumoto": 3000, "saved": 700}
"""By model, the most lower sets for the exact method, whose tables take memory."""


def approximate_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return the lower sets of the family, sorted by size, from the empty set to all nodes."""
    return prefixes(graph) if model == "saved" else ancestors(graph)


def exact_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return all lower sets, or all prefixes under ``saved``, sorted by size.

    Raises:
        GraphError: there are more than the model's limit.
    """
    limit = LIMITS[model]
    found = all_lower_sets(graph, limit) if model == "kusumoto" else _every_prefix(graph)
    if found is None or len(found) > limit:
        raise GraphError(
            f"the graph has more than {limit} lower sets, too many for "
            f'method="lower_sets_exact" with model={model!r}; use method="lower_sets"'
        )
    return found


def prefixes(graph: Graph) -> tuple[int, ...]:
    """Return the prefixes of the node order; in large graphs, only some with small boundaries."""
    g = graph.numbered
    changes = np.zeros(len(graph) + 2, np.int64)
    for v, users in enumerate(g.succs):
        if users:  # v lies on the boundary of the prefixes that hold it and not its last user
            changes[v + 1] += g.size[g.root[v]]
            changes[users[-1] + 1] -= g.size[g.root[v]]
    return thinned(_every_prefix(graph), np.cumsum(changes)[: len(graph) + 1].tolist())


def _every_prefix(graph: Graph) -> tuple[int, ...]:
    return tuple((1 << length) - 1 for length in range(len(graph) + 1))


def single_value_family(graph: Graph, model: Model) -> tuple[int, ...]:
    """Return the prefixes whose boundary is a single value, with the empty set and all nodes."""
    g = graph.numbered
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
            found.append((1 << v + 1) - 1)
    return thinned((*found, (1 << len(graph)) - 1), [0] * (len(found) + 1))


def chains_by_size(graph: Graph, table: Table, kinds: int) -> Iterator[Chain]:
    """Yield the greedy chain for each number of bytes at which a block is closed."""
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
