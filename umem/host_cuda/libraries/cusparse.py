"""cuSPARSE with SciPy: functions of ``cupy_backends.cuda.libs.cusparse``, under the same names.

Models: products, sums, triangular systems and incomplete factors of CSR, CSC and COO matrices, and
the conversions that CuPy needs. This module has the functions that use descriptors.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from umem.host_cuda.libraries.cusparse_rows import HostRows, from_zero
from umem.host_cuda.libraries.handles import DATA_TYPES, Array, HostLibrary, scipy_module
from umem.host_cuda.runtime import LeftOut

VERSION = 12500
INDEX_TYPES = {2: np.int32, 3: np.int64}
"""NumPy's types for cusparseIndexType_t."""
IN_ROWS = 2
"""CUSPARSE_ORDER_ROW of cusparseOrder_t; 1 is by columns."""
FILL, DIAGONAL = 0, 1
"""Values of cusparseSpMatAttribute_t; 1 means "upper" and "unit diagonal"."""

TURNED_ROWS = 256
"""Rows copied at a time to column-major order, so that they stay in the cache (a guess)."""


class LeftOutMatrix:
    """A sparse result that a dry run has not computed.

    Attributes:
        nnz: an upper limit of its entries.
        decisive: the arrays that would determine its structure.
    """

    def __init__(self, nnz: int, decisive: tuple[Array, ...]) -> None:
        self.nnz, self.decisive = nnz, decisive


class Sparse:
    """A sparse matrix in memory.

    Attributes:
        form: "csr", "csc" or "coo".
        parts: values, then indexes and starts, or rows and columns.
        attributes: by cusparseSpMatAttribute_t.
        found: a result to copy here once memory is provided.
    """

    def __init__(self, form: str, shape: tuple[int, int], parts: tuple[Array, ...]) -> None:
        self.form, self.shape, self.parts = form, shape, parts
        self.attributes: dict[int, int] = {}
        self.found: Any = None

    @property
    def decisive(self) -> tuple[Array, ...]:
        """Return the arrays with the places of its entries."""
        return self.parts[1:]

    @property
    def matrix(self) -> Any:
        """Return it as a SciPy matrix."""
        values, *places = self.parts
        if self.form == "coo":
            return scipy_module("sparse").coo_matrix((values, tuple(places)), self.shape)
        return getattr(scipy_module("sparse"), f"{self.form}_matrix")(self.parts, self.shape)

    def fill(self, found: Any) -> None:
        """Copy a SciPy matrix into this memory."""
        places = (found.row, found.col) if self.form == "coo" else (found.indices, found.indptr)
        for part, made in zip(self.parts, (found.data, *places), strict=True):
            part[...] = made


class HostSparse(HostRows):
    """cuSPARSE's functions; descriptors are identified by handle."""

    def getVersion(self, handle: int) -> int:
        return VERSION

    destroySpMat = destroyDnMat = destroyDnVec = destroySpVec = HostLibrary._drop
    spGEMM_createDescr = spSM_createDescr = HostLibrary.create
    spGEMM_destroyDescr = spSM_destroyDescr = HostLibrary.nothing

    # -- descriptors -----------------------------------------------------------------------

    def createCsr(
        self, rows: int, columns: int, count: int, starts: int, indexes: int, values: int,
        starts_type: int, indexes_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        """Make a CSR descriptor over memory; returns its handle."""
        from_zero(base)
        parts = (
            self._vector(DATA_TYPES[value_type], values, count),
            self._vector(INDEX_TYPES[indexes_type], indexes, count),
            self._vector(INDEX_TYPES[starts_type], starts, rows + 1),
        )
        return self._keep(Sparse("csr", (rows, columns), parts))

    def createCsc(
        self, rows: int, columns: int, count: int, starts: int, indexes: int, values: int,
        starts_type: int, indexes_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        """Make a CSC descriptor over memory; returns its handle."""
        handle = self.createCsr(
            columns, rows, count, starts, indexes, values, starts_type, indexes_type, base,
            value_type,
        )  # fmt: skip
        self._made[handle] = Sparse("csc", (rows, columns), self._made[handle].parts)
        return handle

    def createCoo(
        self, rows: int, columns: int, count: int, row: int, column: int, values: int,
        index_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        """Make a COO descriptor over memory; returns its handle."""
        from_zero(base)
        parts = (
            self._vector(DATA_TYPES[value_type], values, count),
            self._vector(INDEX_TYPES[index_type], row, count),
            self._vector(INDEX_TYPES[index_type], column, count),
        )
        return self._keep(Sparse("coo", (rows, columns), parts))

    def createSpVec(
        self, size: int, count: int, indexes: int, values: int, index_type: int, base: int,
        value_type: int,
    ) -> int:  # fmt: skip
        from_zero(base)
        at = self._vector(INDEX_TYPES[index_type], indexes, count)
        return self._keep((at, self._vector(DATA_TYPES[value_type], values, count)))

    def createDnMat(
        self, rows: int, columns: int, ld: int, values: int, value_type: int, order: int
    ) -> int:
        kind = DATA_TYPES[value_type]
        if order == IN_ROWS:
            return self._keep(self._matrix(kind, values, columns, rows, ld).T)
        return self._keep(self._matrix(kind, values, rows, columns, ld))

    def createDnVec(self, size: int, values: int, value_type: int) -> int:
        return self._keep(self._vector(DATA_TYPES[value_type], values, size))

    def spMatSetAttribute(self, sparse: int, attribute: int, value: int) -> None:
        self._made[sparse].attributes[attribute] = value

    def spMatGetSize(self, sparse: int, result: int, columns: int, count: int) -> None:
        matrix = self._made[sparse]
        sizes = *matrix.shape, len(matrix.parts[0]) if matrix.found is None else matrix.found.nnz
        for address, size in zip((result, columns, count), sizes, strict=True):
            self._vector("i8", address, 1)[0] = size

    def csrSetPointers(self, sparse: int, starts: int, indexes: int, values: int) -> None:
        matrix = self._made[sparse]
        count = len(matrix.parts[0]) if matrix.found is None else matrix.found.nnz
        addresses, counts = (values, indexes, starts), (count, count, matrix.shape[0] + 1)
        matrix.parts = tuple(
            self._vector(part.dtype, address, length)
            for part, address, length in zip(matrix.parts, addresses, counts, strict=True)
        )

    # -- products and systems --------------------------------------------------------------

    def _product(
        self, how: int, how_dense: int, alpha: int, a: int, b: int, beta: int, c: int
    ) -> None:
        """Compute c = alpha op(a) op(b) + beta c, for sparse a and dense b and c.

        Args:
            how, how_dense: cuSPARSE's operations on a and b.
            alpha, beta: addresses of the factors.
            a, b, c: handles of the matrices.
        """
        sparse, dense, found = self._made[a], self._made[b], self._made[c]
        columns = 1 if found.ndim == 1 else found.shape[1]
        work = 2 * len(sparse.parts[0]) * columns
        gathered = len(sparse.parts[0]) * columns * dense.itemsize  # a row of b for each entry
        self._tell("spmm", (*sparse.parts, dense), (found,), work, max(0, gathered - dense.nbytes))
        factor, kept = (self._vector(found.dtype, p, 1)[0] for p in (alpha, beta))
        made = _operated(sparse.matrix, how) @ _operated(dense, how_dense)
        if factor != 1:
            made = factor * made
        if kept:
            made = made + kept * found
        for start in range(0, len(made), TURNED_ROWS):
            found[start : start + TURNED_ROWS] = made[start : start + TURNED_ROWS]

    def spMM(
        self, handle: int, how: int, how_dense: int, alpha: int, a: int, b: int, beta: int,
        c: int, compute_type: int, algorithm: int, buffer: int,
    ) -> None:  # fmt: skip
        self._product(how, how_dense, alpha, a, b, beta, c)

    def spMV(
        self, handle: int, how: int, alpha: int, a: int, x: int, beta: int, y: int,
        compute_type: int, algorithm: int, buffer: int,
    ) -> None:  # fmt: skip
        self._product(how, 0, alpha, a, x, beta, y)

    spMM_bufferSize = spMV_bufferSize = HostLibrary.no_buffer
    sparseToDense_bufferSize = denseToSparse_bufferSize = HostLibrary.no_buffer
    spSM_bufferSize = spGEMM_workEstimation = HostLibrary.no_buffer
    spSM_analysis = HostLibrary.nothing

    def spGEMM_compute(
        self, handle: int, how: int, how_other: int, alpha: int, a: int, b: int, beta: int, c: int,
        compute_type: int, algorithm: int, kept: int, size: int, buffer: int,
    ) -> int:  # fmt: skip
        """Multiply two sparse matrices, and keep the result for the copy."""
        left, right, found = self._made[a], self._made[b], self._made[c]
        places = *left.decisive, *right.decisive
        reads = *left.parts, *right.parts
        try:
            self._tell("spgemm", reads, (), 20 * len(left.parts[0]), decisive=places)
        except LeftOut:
            found.found = LeftOutMatrix(_expected_count(left, right, found.shape), places)
            raise
        made = _operated(left.matrix, how) @ _operated(right.matrix, how_other)
        found.found = (self._vector(made.dtype, alpha, 1)[0] * made).tocsr()
        found.found.sort_indices()
        return 0

    def spGEMM_copy(
        self, handle: int, how: int, how_other: int, alpha: int, a: int, b: int, beta: int, c: int,
        compute_type: int, algorithm: int, kept: int,
    ) -> None:  # fmt: skip
        self._fill("spgemm", self._made[c])

    def _fill(self, name: str, found: Sparse) -> None:
        """Copy a sparse result to the memory provided for it."""
        decisive = found.found.decisive if isinstance(found.found, LeftOutMatrix) else None
        self._tell(name, (), found.parts, decisive=decisive)
        found.fill(found.found)

    def spSM_solve(
        self, handle: int, how: int, how_dense: int, alpha: int, a: int, b: int, c: int,
        compute_type: int, algorithm: int, kept: int, buffer: int = 0,
    ) -> None:  # fmt: skip
        """Solve a sparse triangular system; a zero on the diagonal gives NaN, as on a GPU."""
        sparse, dense, found = self._made[a], self._made[b], self._made[c]
        self._tell("spsm", (*sparse.parts, dense), (found,), 2 * len(sparse.parts[0]))
        upper, ones = sparse.attributes.get(FILL, 0), bool(sparse.attributes.get(DIAGONAL, 0))
        half = (scipy_module("sparse").triu if upper else scipy_module("sparse").tril)(
            sparse.matrix
        )
        wanted = self._vector(found.dtype, alpha, 1)[0] * _operated(dense, how_dense)
        solve = scipy_module("sparse.linalg").spsolve_triangular
        lower = bool(upper) == bool(how)
        try:
            found[...] = solve(_operated(half, how).tocsr(), wanted, lower, unit_diagonal=ones)
        except np.linalg.LinAlgError:  # a zero on the diagonal: cuSPARSE divides by it
            found[...] = np.nan

    # -- conversions -----------------------------------------------------------------------

    def gather(self, handle: int, dense: int, sparse: int) -> None:
        at, values = self._made[sparse]
        self._tell("gather", (self._made[dense], at), (values,))
        values[...] = self._made[dense][at]

    def sparseToDense(
        self, handle: int, sparse: int, dense: int, algorithm: int, buffer: int
    ) -> None:
        self._tell("sparseToDense", self._made[sparse].parts, (self._made[dense],))
        self._made[dense][...] = self._made[sparse].matrix.toarray()

    def denseToSparse_analysis(
        self, handle: int, dense: int, sparse: int, algorithm: int, buffer: int
    ) -> None:
        """Find the nonzero entries of a dense matrix, and keep them for the copy."""
        found, read = self._made[sparse], self._made[dense]
        try:
            self._tell("denseToSparse", (read,), (), decisive=(read,))
        except LeftOut:
            found.found = LeftOutMatrix(read.size, (read,))
            raise
        found.found = getattr(scipy_module("sparse"), f"{found.form}_matrix")(self._made[dense])

    def denseToSparse_convert(
        self, handle: int, dense: int, sparse: int, algorithm: int, buffer: int
    ) -> None:
        found = self._made[sparse]  # another one than was analysed, with memory for all
        with suppress(LeftOut):
            self.denseToSparse_analysis(handle, dense, sparse, algorithm, buffer)
        self._fill("denseToSparse", found)


def _expected_count(left: Sparse, right: Sparse, shape: tuple[int, int]) -> int:
    """Return the expected entries of a product, if the entries of its factors are random.

    Each pair of entries contributes to the result with probability 1 / ``inner``.
    """
    inner, places = max(1, left.shape[1]), max(1, shape[0] * shape[1])
    pairs = len(left.parts[0]) * len(right.parts[0]) / inner
    return math.ceil(-places * math.expm1(-pairs / places))


def _operated(matrix: Any, how: int) -> Any:
    """Return a matrix unchanged, transposed, or conjugate transposed."""
    if how == 0:
        return matrix
    return matrix.T if how == 1 else matrix.conj().T
