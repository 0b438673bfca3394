"""A task that a graph network can learn, but not from features alone."""

from __future__ import annotations

import numpy as np

from umem.graphs.csr import Array, GraphData
from umem.graphs.draws import below, draws

_PROTOTYPE_STRENGTH = np.float32(0.2)
"""Factor of a class's prototype in the features of its nodes, added to noise in [-1, 1). A choice
that no measurement supports."""


def labelled(indptr: Array, indices: Array, features: int, classes: int, seed: int) -> GraphData:
    """Add features, labels and masks to a graph; `umem.graphs.rmat` describes them."""
    nodes = len(indptr) - 1
    own = below(np.random.PCG64([seed, 1]), nodes, classes)
    return GraphData(
        indptr,
        indices,
        _prototype_features(np.random.PCG64([seed, 2]), own, classes, features),
        prevailing(indptr, indices, own, classes),
        *_split(np.random.PCG64([seed, 3]), nodes),
    )


def prevailing(indptr: Array, indices: Array, own: Array, classes: int) -> Array:
    """Return the class with the most edge weight around each node: int32 (N,)."""
    nodes = len(own)
    degrees = np.diff(indptr)
    scale = 1.0 / np.sqrt(degrees + 1.0)
    row = np.repeat(np.arange(nodes), degrees)
    votes = np.zeros((nodes, classes))
    votes[np.arange(nodes), own] = scale * scale
    votes += np.bincount(
        row * classes + own[indices], scale[row] * scale[indices], nodes * classes
    ).reshape(nodes, classes)
    found: Array = votes.argmax(axis=1).astype(np.int32)
    return found


def _prototype_features(bits: np.random.PCG64, own: Array, classes: int, features: int) -> Array:
    """Draw features, float32 (N, F): noise in [-1, 1) plus 0.2 times a class prototype of signs."""
    signs = below(bits, classes * features, 2).astype(np.float32) * 2 - 1
    prototypes = _PROTOTYPE_STRENGTH * signs.reshape(classes, features)
    values = np.empty((len(own), features), np.float32)
    for start in range(0, len(own), 4096):
        rows = slice(start, start + 4096)
        noise = draws(bits, values[rows].size) >> np.uint32(8)  # 24 bits: exact in float32
        values[rows] = noise.reshape(-1, features)
        values[rows] *= np.float32(2**-23)
        values[rows] -= np.float32(1)
        values[rows] += prototypes[own[rows]]
    return values


def _split(bits: np.random.PCG64, nodes: int) -> tuple[Array, Array, Array]:
    """Draw masks of 60, 20 and 20 % of the nodes; at least one node is for training."""
    order = np.argsort(draws(bits, nodes), kind="stable")
    train, val = -(-nodes * 6 // 10), nodes // 5
    part = np.empty(nodes, np.int8)
    part[order[:train]], part[order[train : train + val]], part[order[train + val :]] = 0, 1, 2
    return part == 0, part == 1, part == 2
