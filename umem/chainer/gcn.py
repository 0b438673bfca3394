"""Graph convolution: a fixed sparse matrix times a dense one, and the layers around it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer.backends import cuda
from chainer.utils import type_check

from umem._common import extras
from umem.errors import DeviceError, MissingDependencyError


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A constant sparse matrix and its transpose.

    The transpose, which the gradient multiplies by, is stored as its own CSR matrix, because only a
    product with an untransposed matrix needs no atomics. If the two are equal, as for
    `umem.graphs.normalised_adjacency` of an undirected graph, they are the same object: 8 bytes an
    entry, otherwise 16. Making the transpose costs about one pass over the entries.

    Args:
        matrix: CSR (rows, columns) of floats, of scipy.sparse or cupyx.scipy.sparse.
        transpose: computed from `matrix` if not given.

    Raises:
        TypeError: `matrix` is not a CSR matrix of float32 or float64.
    """

    matrix: Any
    transpose: Any = None

    def __post_init__(self) -> None:
        if getattr(self.matrix, "format", None) != "csr" or self.matrix.dtype.char not in "fd":
            raise TypeError(
                "an Adjacency needs a CSR matrix of float32 or float64, such as "
                f"umem.graphs.normalised_adjacency returns; got {_describe(self.matrix)}"
            )
        if self.transpose is None:
            object.__setattr__(self, "transpose", _transpose(self.matrix))

    @property
    def transposed(self) -> Adjacency:
        """Return the adjacency with matrix and transpose exchanged, without copying."""
        return Adjacency(self.transpose, self.matrix)

    def to_device(self, device: Any) -> Adjacency:
        """Return a copy on a device, given as to Chainer's `to_device`."""
        matrix = _send(self.matrix, chainer.get_device(device))
        if self.transpose is self.matrix:
            return Adjacency(matrix, matrix)
        return Adjacency(matrix, _send(self.transpose, chainer.get_device(device)))

    def to_cpu(self) -> Adjacency:
        """Return a copy on the CPU."""
        return self.to_device("@numpy")

    def to_gpu(self, device: int = 0) -> Adjacency:
        """Return a copy on a GPU, given by its ordinal."""
        return self.to_device(f"@cupy:{device}")


def _describe(matrix: Any) -> str:
    dtype, layout = getattr(matrix, "dtype", None), getattr(matrix, "format", None)
    words = (layout, type(matrix).__name__, f"of {dtype}" if dtype is not None else None)
    return " ".join(word for word in words if word)


def _transpose(matrix: Any) -> Any:
    """Return the transpose as CSR; ``matrix`` itself if it is symmetric."""
    transpose = matrix.T.tocsr()
    pairs = ((getattr(matrix, n), getattr(transpose, n)) for n in ("indptr", "indices", "data"))
    if matrix.shape == transpose.shape and all(bool((a == b).all()) for a, b in pairs):
        return matrix
    return transpose


def _send(matrix: Any, device: Any) -> Any:
    arrays = (matrix.data, matrix.indices, matrix.indptr)
    return csr_matrix(arrays, matrix.shape, device)


def csr_matrix(arrays: tuple[Any, Any, Any], shape: tuple[int, int], device: Any) -> Any:
    """Make a CSR matrix on a device from data, indices and indptr."""
    data, indices, indptr = map(device.send, arrays)
    return _sparse_module(data).csr_matrix((data, indices, indptr), shape=shape)


def _sparse_module(array: Any) -> Any:
    """Return scipy.sparse for a NumPy array, or else cupyx.scipy.sparse.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    try:
        if cuda.get_array_module(array) is np:
            import scipy.sparse as sparse
        else:
            import cupyx.scipy.sparse as sparse
    except ImportError:
        raise MissingDependencyError(
            "sparse matrices need scipy, which is not installed; "
            + extras.command("chainer", "scipy")
        ) from None
    return sparse


class SparseMatMul(chainer.FunctionNode):
    """Function: a constant sparse matrix times a dense variable; see `sparse_matmul`.

    Attributes:
        matrix: the sparse matrix, on the device of the input.
    """

    def __init__(self, adjacency: Adjacency) -> None:
        self._adjacency = adjacency
        self.matrix = adjacency.matrix

    def check_type_forward(self, in_types: Any) -> None:
        # As in Chainer's own functions, whose errors name inputs by it.
        type_check._argname(in_types, ("x",))
        (x,) = in_types
        type_check.expect(x.dtype.kind == "f", x.ndim == 2, x.shape[0] == self.matrix.shape[1])

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (x,) = inputs
        self._check_device(x)
        # Neither scipy.sparse nor cuSPARSE through CuPy multiplies by float16.
        operand = x.astype(np.float32) if x.dtype == np.float16 else x
        return (_product(self.matrix, operand).astype(x.dtype, copy=False),)

    def _check_device(self, x: Any) -> None:
        here, there = (cuda.get_array_module(a).__name__ for a in (x, self.matrix.data))
        if here != there:
            raise DeviceError(
                f"sparse_matmul: the adjacency is a {there} matrix and x is a {here} array; bring "
                "both to one device with adjacency.to_device(device) and device.send(x)"
            )

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient: tuple[Any, ...] = SparseMatMul(self._adjacency.transposed).apply(grad_outputs)
        return gradient


def _product(matrix: Any, x: Any) -> Any:
    """Multiply sparse by dense, without the column-ordered copy of x that CuPy's operator makes."""
    as_it_lies = x.flags.c_contiguous and not x.flags.f_contiguous and matrix.dtype == x.dtype
    if cuda.get_array_module(x) is np or not as_it_lies:
        return matrix @ x
    cusparse = importlib.import_module("cupyx.cusparse")
    if not cusparse.check_availability("spmm"):
        return matrix @ x
    matrix.sum_duplicates()  # as the operator does
    return cusparse.spmm(matrix, x.T, transb=True)


def add_product(matrix: Any, x: Any, out: Any) -> None:
    """Add a sparse matrix times x to ``out``, which is C-ordered and of x's dtype.

    On NumPy each row's terms are added to ``out`` one by one, in the matrix's order. So a row may
    be computed a block of columns at a time, with the bits of one product. SciPy's operator does
    the same from zero; only the function below it takes an `out`.
    """
    if cuda.get_array_module(x) is not np:
        out += _product(matrix, x)
        return
    from scipy.sparse import _sparsetools

    arrays = matrix.indptr, matrix.indices, matrix.data.astype(x.dtype, copy=False)
    columns = x.shape[1]
    _sparsetools.csr_matvecs(*matrix.shape, columns, *arrays, x.ravel(), out.reshape(-1))


def sparse_matmul(adjacency: Adjacency, x: Any) -> Any:
    """Multiply an adjacency by x, differentiable in x any number of times.

    NumPy arrays use scipy.sparse's product, CuPy arrays cuSPARSE's (cupyx.scipy.sparse).
    float16 is computed in float32. Only the matrix is kept for the backward pass.

    Cost: 2 * entries * columns floating-point operations. Workspace: none for a C-ordered float32
    or float64 x; with CuPy the result is column-ordered. A float16 x and its result are copied to
    float32. The matrix is copied if its precision differs from x's.

    On one machine NumPy gives the same bits every time. With CuPy no kernel of umem or Chainer adds
    atomically. umem never makes cuSPARSE transpose the sparse matrix, for which its documentation
    says that bits can differ between runs. Its default algorithm for the product itself is not
    documented to repeat its bits either.

    Args:
        adjacency: (rows, columns), on the device of x.
        x: variable or array of floats, (columns, features).

    Returns:
        chainer.Variable: (rows, features), of x's dtype.

    Raises:
        chainer.utils.type_check.InvalidType: x has another shape, or is not of floats.
        DeviceError: the matrix and x are on different devices.
    """
    return SparseMatMul(adjacency).apply((x,))[0]


class GraphConvolution(chainer.Link):
    """One graph convolution A X W' + b, with W (out_size, in_size) and b (out_size,).

    Multiplies by W first if that makes the sparse product narrower (out_size < in_size), and by
    the adjacency first otherwise. W starts as Glorot and Bengio's uniform, b as zero.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017,
    equation 2; with a bias, and without the nonlinearity.
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        with self.init_scope():
            uniform = chainer.initializers.GlorotUniform()
            self.W = chainer.Parameter(uniform, (out_size, in_size))
            self.b = chainer.Parameter(0, (out_size,))

    def forward(self, adjacency: Adjacency, x: Any) -> Any:
        """Apply the layer: (N, in_size) to (N, out_size)."""
        out_size, in_size = self.W.shape
        if out_size < in_size:
            return sparse_matmul(adjacency, F.linear(x, self.W)) + self.b
        return F.linear(sparse_matmul(adjacency, x), self.W, self.b)


class GCN(chainer.ChainList):
    """Graph convolutions with ReLU between them, from features to class scores.

    Args:
        in_size: features of a node.
        hidden: width of every layer but the last.
        classes: width of the last layer.
        layers: the number of graph convolutions, at least 1.
        dropout: share of the hidden values that training drops before each layer but the first.

    >>> import umem.chainer
    >>> from umem.chainer import GCN, Adjacency
    >>> from umem.graphs import karate_club, normalised_adjacency
    >>> graph = karate_club()
    >>> adjacency = Adjacency(normalised_adjacency(graph))
    >>> GCN(34, hidden=8, classes=2, layers=2)(adjacency, graph.features).shape
    (34, 2)
    """

    def __init__(
        self, in_size: int, hidden: int, classes: int, layers: int = 3, dropout: float = 0.0
    ) -> None:
        check_layers("GCN", layers, dropout)
        sizes = [in_size, *[hidden] * (layers - 1), classes]
        super().__init__(*map(GraphConvolution, sizes[:-1], sizes[1:]))
        self.dropout = dropout

    def forward(self, adjacency: Adjacency, x: Any) -> Any:
        """Return the scores: (N, in_size) to (N, classes)."""
        first, *others = self
        h = first(adjacency, x)
        for layer in others:
            h = F.relu(h)
            if self.dropout:  # at ratio 0 Chainer would still make a mask
                h = F.dropout(h, self.dropout)
            h = layer(adjacency, h)
        return h


def check_layers(name: str, layers: int, dropout: float) -> None:
    """Raise ValueError unless a network can have this number of layers and this dropout.

    Raises:
        ValueError: one is out of range.
    """
    if layers < 1:
        raise ValueError(f"{name}: layers must be 1 or more; got {layers}")
    if not 0 <= dropout < 1:
        raise ValueError(f"{name}: dropout must be from 0 to below 1; got {dropout}")
