"""Cuts at single values.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174,
algorithm 3: go through the nodes in order, and close a block at the first single value after it
has grown to so many bytes. Their search over that number of bytes is a sweep here, from one
block to a block for each cut; with blocks of equal bytes the best is about sqrt(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from umem.planner.graph import Graph
from umem.planner.lower_sets import MAX_SETS, prefixes, thinned
from umem.planner.plans import Model
from umem.planner.step_table import INFINITE, Chain, Hop, Table


def family(graph: Graph, model: Model) -> tuple[int, ...]:
    """The runs of the node order whose boundary is a single value; the empty set; all.

    In large graphs those of them that `lower_sets` looks at, too: their steps are known by then.
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


def chains(graph: Graph, table: Table, kinds: int) -> Iterator[Chain]:
    """The greedy chain for each number of bytes that a block grows to."""
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
    """The cuts where a block has grown to so many bytes."""
    places = [0]
    for place in range(1, len(total) - 1):
        if total[place] - total[places[-1]] >= grown:
            places.append(place)
    return (*places, len(total) - 1)
