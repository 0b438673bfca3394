"""Partitioning of a graph by METIS, balanced by edges."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem._common.extras import needed
from umem.errors import DataError
from umem.graphs.csr import Array

_SEED = 0


def partition(indptr: Array, indices: Array, parts: int) -> Array:
    """Partition an undirected graph so that few edges are cut: int32 (N,), a part for each node.

    The weight of a node is its number of edges plus one, so that the parts' rows of the normalised
    adjacency have about the same number of entries. Nodes without edges are added to the parts with
    the fewest nodes. No part stays empty. Equal graphs give equal cuts with the same version of
    METIS.

    Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular
    Graphs", SIAM Journal on Scientific Computing 20 (1998).

    Args:
        indptr: int (N + 1,).
        indices: int (E,), both directions of every edge, without self loops and repeats.
        parts: 1 to N.

    Raises:
        MissingDependencyError: pymetis is not installed.
    """
    degrees = np.diff(indptr)
    tied = np.flatnonzero(degrees)
    found = np.full(len(degrees), -1, np.int32)
    if parts > 1 and len(tied):
        number = np.cumsum(degrees > 0) - 1
        found[tied] = _metis(
            np.concatenate([[0], np.cumsum(degrees[tied])]), number[indices], degrees[tied], parts
        )
    elif parts == 1:
        found[:] = 0
    _spread(found, parts)
    _fill(found, parts)
    return found


def _metis(indptr: Array, indices: Array, degrees: Array, parts: int) -> Array:
    pymetis = needed("pymetis", "mpi", "cutting a graph by METIS needs")
    result = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(indptr.astype(np.int32), indices.astype(np.int32)),
        vweights=(degrees + 1).astype(np.int32),
        options=pymetis.Options(seed=_SEED),
    )
    return np.asarray(result.vertex_part, np.int32)


def _spread(found: Array, parts: int) -> None:
    """Assign nodes without a part to the smallest parts."""
    free = np.flatnonzero(found < 0)
    counts = np.bincount(found[found >= 0], minlength=parts)
    level = _level(counts, len(free))
    room = np.maximum(level - counts, 0)
    left = len(free) - int(room.sum())
    lowest = np.flatnonzero(counts <= level)[:left]
    room[lowest] += 1
    found[free] = np.repeat(np.arange(parts, dtype=np.int32), room)


def _level(counts: Array, added: int) -> int:
    """Return the level of the lowest counts after distributing ``added`` over them."""
    low, high = int(counts.min()), int(counts.min()) + added
    while low < high:
        middle = (low + high + 1) // 2
        enough = int(np.maximum(middle - counts, 0).sum()) <= added
        low, high = (middle, high) if enough else (low, middle - 1)
    return low


def _fill(found: Array, parts: int) -> None:
    """Move a node from the largest part into every empty one."""
    counts = np.bincount(found, minlength=parts)
    for empty in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        found[np.flatnonzero(found == largest)[-1]] = empty
        counts[largest] -= 1
        counts[empty] += 1


def symmetric_pattern(source: str, graph: Any) -> tuple[Array, Array]:
    """Return int32 indptr and indices of a graph's edges, without self loops and duplicates.

    Raises:
        DataError: an edge has only one direction.
    """
    nodes = graph.node_count
    row = np.repeat(np.arange(nodes, dtype=np.int64), np.diff(graph.indptr))
    column = graph.indices.astype(np.int64)
    keep = row != column
    forth = np.unique(row[keep] * nodes + column[keep])
    back = np.sort(forth % nodes * nodes + forth // nodes)
    if not np.array_equal(forth, back):
        tie = int(np.setdiff1d(forth, back)[0])
        raise DataError(
            f"{source}: indices: an edge leads from node {tie // nodes} to {tie % nodes} and none "
            "back; only undirected graphs can be cut: give each edge an entry in both directions"
        )
    indptr = np.zeros(nodes + 1, np.int32)
    np.cumsum(np.bincount(forth // nodes, minlength=nodes), out=indptr[1:])
    return indptr, (forth % nodes).astype(np.int32)
