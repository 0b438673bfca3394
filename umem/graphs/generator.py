"""Generated graphs with power-law degrees (R-MAT), and a task on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from umem.errors import SizeError
from umem.graphs.csr import Array, GraphData, symmetric_csr

_INT32_MAX = 2**31 - 1
_DRAWS_PER_ROUND = 1 << 20
# R-MAT's corner probabilities a, b, c (d is what is left), as thresholds of a 32-bit draw.
_A, _AB, _ABC = (np.uint32(round(p * 2**32)) for p in (0.57, 0.57 + 0.19, 0.57 + 0.19 + 0.19))
_PROTOTYPE_STRENGTH = np.float32(0.2)


def rmat(nodes: int, edges: int, features: int, classes: int, seed: int = 0) -> GraphData:
    """Generate a graph with power-law degrees, and a task that a graph network can learn.

    Ties are drawn until `edges` different ones are there. A tie's two ends are found by halving
    the adjacency matrix again and again, with probabilities 0.57, 0.19, 0.19 and 0.05 for the
    four quarters; ends beyond the last node and self loops are drawn again. Node numbers are not
    shuffled (low numbers have most ties), and many nodes have no tie at all.

    Every node gets a class at random. Its features are that class's prototype under noise; its
    label is the class with most weight among itself and its neighbours, weighted as in
    `normalised_adjacency`. So a graph network can learn the labels, and features alone cannot.
    60 % of the nodes are for training, 20 % for validation, 20 % for testing.

    Equal arguments give equal arrays on every NumPy version: all randomness is PCG64's raw
    output, which NumPy keeps stable, and not a distribution's, which it does not. The first ties
    do not depend on how many more are asked for, nor on features and classes.

    Chakrabarti, Zhan and Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SDM 2004. The
    probabilities stay the same at every halving; the paper lets them vary a little.

    Cost: 150,000 nodes, 1,000,000 ties, 128 features in about two seconds and 300 MB.

    Args:
        nodes: N, any number from 1.
        edges: undirected ties; the graph has twice as many entries.
        features: F, from 1.
        classes: 1 to N.
        seed: from 0.

    Raises:
        SizeError: an argument is out of range, or R-MAT practically never draws that many
            different ties among so few nodes.

    >>> graph = rmat(nodes=1000, edges=4000, features=16, classes=4)
    >>> graph.features.shape, len(graph.indices)
    ((1000, 16), 8000)
    """
    _check_rmat(nodes, edges, features, classes, seed)
    indptr, indices = symmetric_csr(_rmat_ties(np.random.PCG64([seed, 0]), nodes, edges), nodes)
    own = _below(np.random.PCG64([seed, 1]), nodes, classes)
    return GraphData(
        indptr,
        indices,
        _prototype_features(np.random.PCG64([seed, 2]), own, classes, features),
        _prevailing(indptr, indices, own, classes),
        *_split(np.random.PCG64([seed, 3]), nodes),
    )


def _check_rmat(nodes: int, edges: int, features: int, classes: int, seed: int) -> None:
    possible = nodes * (nodes - 1) // 2
    for name, value, low, high in (
        ("nodes", nodes, 1, _INT32_MAX),
        ("edges", edges, 0, min(possible, (_INT32_MAX - nodes) // 2)),
        ("features", features, 1, _INT32_MAX),
        ("classes", classes, 1, nodes),
        ("seed", seed, 0, 2**63 - 1),
    ):
        if not low <= value <= high:
            raise SizeError(f"rmat: {name} must be {low} to {high} here; got {value}")


def _draws(bits: np.random.PCG64, count: int) -> npt.NDArray[np.uint32]:
    """`count` 32-bit draws."""
    raw: Array = bits.random_raw((count + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:count]


def _below(bits: np.random.PCG64, count: int, limit: int) -> Array:
    """`count` int32 draws from 0 to `limit` - 1."""
    scaled: Array = _draws(bits, count).astype(np.uint64) * np.uint64(limit)
    return (scaled >> np.uint64(32)).astype(np.int32)


def _rmat_ties(bits: np.random.PCG64, nodes: int, count: int) -> Array:
    """`count` different ties in the order drawn, each as lower end * nodes + higher end: int64."""
    ties = np.empty(0, np.int64)
    drawn, drawn_at_most = 0, 32 * count + 200_000
    while len(ties) < count:
        if drawn > drawn_at_most:
            raise SizeError(
                f"rmat: {drawn} draws gave only {len(ties)} of {count} different ties among "
                f"{nodes} nodes: too dense for R-MAT. Ask for fewer edges, or for more nodes."
            )
        batch = max(2 * (count - len(ties)), len(ties) // 4, 1024)
        batch = min(batch + batch % 2, _DRAWS_PER_ROUND)  # even: no half of a 64-bit draw is lost
        drawn += batch
        ties = _without_repeats(np.concatenate([ties, _draw_ties(bits, nodes, batch)]))
    return ties[:count]


def _without_repeats(values: Array) -> Array:
    """The first of each value, in the order they came."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _draw_ties(bits: np.random.PCG64, nodes: int, count: int) -> Array:
    """`count` R-MAT draws, less self loops and ends beyond the last node."""
    levels = max((nodes - 1).bit_length(), 1)
    draws = _draws(bits, count * levels).reshape(count, levels)
    row, column = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for draw in draws.T:
        lower = draw >= _AB
        right = ((draw >= _A) & ~lower) | (draw >= _ABC)
        row, column = row << 1 | lower, column << 1 | right
    low, high = np.minimum(row, column), np.maximum(row, column)
    keep = (low != high) & (high < nodes)
    ties: Array = low[keep] * nodes + high[keep]
    return ties


def _prevailing(indptr: Array, indices: Array, own: Array, classes: int) -> Array:
    """The class with most weight around each node: int32 (N,)."""
    nodes = len(own)
    degrees = np.diff(indptr)
    scale = 1.0 / np.sqrt(degrees + 1.0)
    row = np.repeat(np.arange(nodes), degrees)
    votes = np.zeros((nodes, classes))
    votes[np.arange(nodes), own] = scale * scale
    votes += np.bincount(
        row * classes + own[indices], scale[row] * scale[indices], nodes * classes
    ).reshape(nodes, classes)
    prevailing: Array = votes.argmax(axis=1).astype(np.int32)
    return prevailing


def _prototype_features(bits: np.random.PCG64, own: Array, classes: int, features: int) -> Array:
    """float32 (N, F): uniform noise in [-1, 1), plus or minus 0.2 by the class's prototype."""
    signs = _below(bits, classes * features, 2).astype(np.float32) * 2 - 1
    prototypes = _PROTOTYPE_STRENGTH * signs.reshape(classes, features)
    values = np.empty((len(own), features), np.float32)
    for rows in _slices(len(own), 4096):
        noise = _draws(bits, values[rows].size) >> np.uint32(8)  # 24 bits: exact in float32
        values[rows] = noise.reshape(-1, features)
        values[rows] *= np.float32(2**-23)
        values[rows] -= np.float32(1)
        values[rows] += prototypes[own[rows]]
    return values


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, length, step))


def _split(bits: np.random.PCG64, nodes: int) -> tuple[Array, Array, Array]:
    """Masks of 60, 20 and 20 % of the nodes; at least one node trains."""
    order = np.argsort(_draws(bits, nodes), kind="stable")
    train, val = -(-nodes * 6 // 10), nodes // 5
    part = np.empty(nodes, np.int8)
    part[order[:train]], part[order[train : train + val]], part[order[train + val :]] = 0, 1, 2
    return part == 0, part == 1, part == 2
