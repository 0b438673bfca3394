"""The graph itself, and the matrix that a graph convolution multiplies by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from umem._common.extras import needed

if TYPE_CHECKING:
    import scipy.sparse

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class GraphData:
    """A graph of N nodes with F features and one label per node, split for training.

    The .npz file of `load_npz` has the same arrays; docs/reference/graphs.md has the table.

    Attributes:
        indptr: int32 (N + 1,); the neighbours of node i are ``indices[indptr[i]:indptr[i + 1]]``.
        indices: int32 (E,); each edge has an entry for both directions; self loops are optional.
        features: float32 (N, F), or a memory map of floats of any width.
        labels: int32 (N,), from 0.
        train_mask: bool (N,); nodes for training.
        val_mask: bool (N,); nodes for validation, such as choosing hyperparameters.
        test_mask: bool (N,); nodes for testing.
    """

    indptr: Array
    indices: Array
    features: Array
    labels: Array
    train_mask: Array
    val_mask: Array
    test_mask: Array

    @property
    def node_count(self) -> int:
        """Return the number of nodes, N."""
        return len(self.labels)

    @property
    def class_count(self) -> int:
        """Return one more than the highest label."""
        return int(self.labels.max()) + 1

    def labels_where(self, mask: Array) -> Array:
        """Return labels, int32 (N,), with -1 outside ``mask``, which Chainer's losses ignore."""
        return np.where(mask, self.labels, np.int32(-1))


def normalised_adjacency(graph: GraphData) -> scipy.sparse.csr_matrix:
    """Compute D^-1/2 (A + I) D^-1/2 as a float32 CSR matrix: int32 indices, sorted, no duplicates.

    A is 1 for each entry of the graph, also for repeated ones; existing self loops are not added
    again. D is the row sum of A + I, so a node without edges keeps its features. For a symmetric
    graph the result equals its transpose bit for bit.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017,
    equation 2.

    Cost: a few passes over the entries; about 24 bytes per entry while it runs, 8 afterwards.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    sparse = needed("scipy.sparse", "chainer", "a sparse adjacency needs")
    count = graph.node_count
    ones = np.ones(len(graph.indices), np.float32)
    pattern = sparse.csr_matrix((ones, graph.indices, graph.indptr), shape=(count, count))
    matrix = pattern + sparse.identity(count, np.float32, format="csr")
    matrix.sum_duplicates()
    degrees = np.diff(matrix.indptr)
    scale = (1.0 / np.sqrt(degrees)).astype(np.float32)
    matrix.data = np.repeat(scale, degrees) * scale[matrix.indices]
    matrix.indptr = matrix.indptr.astype(np.int32, copy=False)
    matrix.indices = matrix.indices.astype(np.int32, copy=False)
    return matrix


def symmetric_csr(ties: Array, nodes: int) -> tuple[Array, Array]:
    """Build int32 indptr and indices of a symmetric graph; an edge is one end * N + other."""
    low, high = ties // nodes, ties % nodes
    entries = np.sort(np.concatenate([ties, high * nodes + low]))
    indptr = np.zeros(nodes + 1, np.int32)
    np.cumsum(np.bincount(entries // nodes, minlength=nodes), out=indptr[1:])
    return indptr, (entries % nodes).astype(np.int32)
