"""Generated graphs of communities: many edges inside each, few between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from umem.errors import SizeError
from umem.graphs.csr import Array, GraphData, symmetric_csr
from umem.graphs.draws import INT32_MAX, below, check_arguments, different_ties, draws
from umem.graphs.labelled import labelled


def communities(
    nodes: int = 200_000,
    communities: int = 40,
    ties: int = 1_000_000,
    across: float = 0.02,
    seed: int = 0,
    *,
    features: int = 64,
    classes: int = 16,
) -> GraphData:
    """Generate a planted partition graph of equal communities, and a task that a GCN can learn.

    A share `across` of the edges connects two communities; the others stay inside one. Each edge
    joins a uniformly drawn node with a uniformly drawn node of the same, or of another, community.
    Node numbers are then shuffled, so they do not reveal the communities; a partitioner such as
    `umem.graphs.cut` must find them. Features, labels and masks are as in `rmat`.

    Equal arguments give equal arrays on every NumPy version, as for `rmat`.

    The planted partition model of Condon and Karp, "Algorithms for Graph Partitioning on the
    Planted Partition Model", Random Structures and Algorithms 18 (2001), with a fixed number of
    edges instead of a probability.

    Cost: 200,000 nodes, 1,000,000 edges, 64 features in about two seconds and 300 MB.

    Args:
        nodes: N, from 2.
        communities: 1 to N / 2; their sizes differ by at most one node.
        ties: number of undirected edges, without self loops and repeats; the graph has twice as
            many entries.
        across: share of the edges between communities, 0 to 1.
        seed: from 0.
        features: F, from 1.
        classes: 1 to N.

    Raises:
        SizeError: an argument is out of range, or there are too few edges to draw.

    >>> graph = communities(nodes=1000, communities=5, ties=4000, features=16, classes=4)
    >>> graph.features.shape, len(graph.indices)
    ((1000, 16), 8000)
    """
    check_arguments(
        "communities",
        nodes=(nodes, 2, INT32_MAX),
        communities=(communities, 1, nodes // 2),
        ties=(ties, 0, (INT32_MAX - nodes) // 2),
        features=(features, 1, INT32_MAX),
        classes=(classes, 1, nodes),
        seed=(seed, 0, 2**63 - 1),
    )
    if not 0 <= across <= 1:
        raise SizeError(f"communities: across must be a share from 0 to 1; got {across}")
    starts = np.arange(communities + 1, dtype=np.int64) * nodes // communities
    between = round(ties * across)
    found = np.concatenate(
        [
            _ties(_inside, np.random.PCG64([seed, 0]), starts, ties - between, "inside of"),
            _ties(_outside, np.random.PCG64([seed, 4]), starts, between, "between"),
        ]
    )
    number = np.argsort(draws(np.random.PCG64([seed, 5]), nodes), kind="stable")
    one_end, other_end = number[found // nodes], number[found % nodes]
    shuffled = np.minimum(one_end, other_end) * nodes + np.maximum(one_end, other_end)
    return labelled(*symmetric_csr(shuffled, nodes), features, classes, seed)


def _ties(
    other_end: Callable[..., Array], bits: np.random.PCG64, starts: Array, count: int, where: str
) -> Array:
    """Draw ``count`` different edges, each coded as lower end * N + higher end."""
    possible = _possible(starts, inside=other_end is _inside)
    if count > possible:
        raise SizeError(
            f"communities: {count} edges {where} {len(starts) - 1} communities of {starts[-1]} "
            f"nodes, but only {possible} are possible; pass a smaller ties= or a larger nodes="
        )
    draw = partial(_draw, other_end, bits, starts)
    return different_ties(
        draw, count, function="communities", where=f"{where} communities: too dense"
    )


def _possible(starts: Array, *, inside: bool) -> int:
    nodes, sizes = int(starts[-1]), np.diff(starts)
    within = int((sizes * (sizes - 1) // 2).sum())
    return within if inside else nodes * (nodes - 1) // 2 - within


def _draw(other_end: Callable[..., Array], bits: np.random.PCG64, starts: Array, n: int) -> Array:
    """Draw ``n`` edges, and drop self loops."""
    nodes = int(starts[-1])
    one = below(bits, n, nodes).astype(np.int64)
    community = np.searchsorted(starts, one, "right") - 1
    other = other_end(bits, starts[community], starts[community + 1], nodes)
    low, high = np.minimum(one, other), np.maximum(one, other)
    ties: Array = (low * nodes + high)[low != high]
    return ties


def _inside(bits: np.random.PCG64, start: Array, stop: Array, nodes: int) -> Array:
    """Draw for each node another node of its community."""
    return start + below(bits, len(start), stop - start)


def _outside(bits: np.random.PCG64, start: Array, stop: Array, nodes: int) -> Array:
    """Draw for each node a node of another community, or of its own if there is only one."""
    size = stop - start
    other = below(bits, len(start), nodes - size).astype(np.int64)
    return np.where(other < start, other, other + size)
