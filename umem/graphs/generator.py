"""Generated graphs with power-law degrees (R-MAT)."""

from __future__ import annotations

from functools import partial

import numpy as np

from umem.graphs.csr import Array, GraphData, symmetric_csr
from umem.graphs.draws import INT32_MAX, check_arguments, different_ties, draws
from umem.graphs.labelled import labelled

# R-MAT's corner probabilities a, b, c (d is the rest), as thresholds of a 32-bit draw.
_A, _AB, _ABC = (np.uint32(round(p * 2**32)) for p in (0.57, 0.57 + 0.19, 0.57 + 0.19 + 0.19))


def rmat(nodes: int, edges: int, features: int, classes: int, seed: int = 0) -> GraphData:
    """Generate a graph with power-law degrees, and a task that a graph network can learn.

    Edges are drawn until `edges` different ones are found. Each draw halves the adjacency matrix
    repeatedly, with probabilities 0.57, 0.19, 0.19 and 0.05 for the four quarters; nodes beyond the
    last one and self loops are drawn again. Node numbers are not shuffled (low numbers have most
    edges), and many nodes have no edge.

    Every node gets a random class. Its features are that class's prototype plus noise; its label
    is the class with the most weight among itself and its neighbours, weighted as in
    `normalised_adjacency`. So a graph network can learn the labels, but not from features alone.
    60 % of the nodes are for training, 20 % for validation, 20 % for testing.

    Equal arguments give equal arrays on every NumPy version: all randomness is PCG64's raw output,
    which is stable in NumPy, unlike its distributions. The first edges do not depend on the total
    number of edges, nor on features and classes.

    Chakrabarti, Zhan and Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SDM 2004. The
    probabilities stay the same at every halving; the paper lets them vary a little.

    Cost: 150,000 nodes, 1,000,000 edges, 128 features in about two seconds and 300 MB.

    Args:
        nodes: N, from 1.
        edges: number of undirected edges; the graph has twice as many entries.
        features: F, from 1.
        classes: 1 to N.
        seed: from 0.

    Raises:
        SizeError: an argument is out of range, or R-MAT is unlikely to draw that many different
            edges among so few nodes.

    >>> graph = rmat(nodes=1000, edges=4000, features=16, classes=4)
    >>> graph.features.shape, len(graph.indices)
    ((1000, 16), 8000)
    """
    most = min(nodes * (nodes - 1) // 2, (INT32_MAX - nodes) // 2)
    check_arguments(
        "rmat",
        nodes=(nodes, 1, INT32_MAX),
        edges=(edges, 0, most),
        features=(features, 1, INT32_MAX),
        classes=(classes, 1, nodes),
        seed=(seed, 0, 2**63 - 1),
    )
    draw = partial(_draw_ties, np.random.PCG64([seed, 0]), nodes)
    where = f"among {nodes} nodes: too dense for R-MAT"
    ties = different_ties(draw, edges, function="rmat", where=where)
    return labelled(*symmetric_csr(ties, nodes), features, classes, seed)


def _draw_ties(bits: np.random.PCG64, nodes: int, count: int) -> Array:
    """Return the edges of ``count`` R-MAT draws, each as smaller end * ``nodes`` + larger end.

    Drops self loops and edges with an end beyond the last node; repeated edges stay.
    """
    levels = max((nodes - 1).bit_length(), 1)
    drawn = draws(bits, count * levels).reshape(count, levels)
    row, column = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for draw in drawn.T:
        lower = draw >= _AB
        right = ((draw >= _A) & ~lower) | (draw >= _ABC)
        row, column = row << 1 | lower, column << 1 | right
    low, high = np.minimum(row, column), np.maximum(row, column)
    keep = (low != high) & (high < nodes)
    ties: Array = low[keep] * nodes + high[keep]
    return ties
