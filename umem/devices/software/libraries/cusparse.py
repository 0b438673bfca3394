"""cuSPARSE by SciPy: the functions of ``cupy_backends.cuda.libs.cusparse``, by their names there.

Models: products of a sparse matrix, in rows or as coordinates, with a dense one or a vector, and
the conversions that CuPy makes on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.devices.software.libraries.cublas import DATA_TYPES
from umem.devices.software.runtime import HostRuntime

VERSION = 12500
INDEX_TYPES = {2: np.int32, 3: np.int64}
"""cusparseIndexType_t."""
IN_ROWS = 2
"""cusparseOrder_t: CUSPARSE_ORDER_ROW; 1 is in columns."""


class HostSparse:
    """Descriptors by handle, and what is done with them."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        self._made: dict[int, Any] = {}
        self._pointer_mode = 0

    # -- the library -----------------------------------------------------------------------

    def create(self) -> int:
        return self._runtime.new_handle()

    def destroy(self, handle: int) -> None:
        return None

    def getVersion(self, handle: int) -> int:
        return VERSION

    def setStream(self, handle: int, stream: int) -> None:
        return None

    def getPointerMode(self, handle: int) -> int:
        return self._pointer_mode

    def setPointerMode(self, handle: int, mode: int) -> None:
        self._pointer_mode = mode

    def _keep(self, found: Any) -> int:
        handle = self._runtime.new_handle()
        self._made[handle] = found
        return handle

    def _drop(self, handle: int) -> None:
        self._made.pop(handle, None)

    destroySpMat = destroyDnMat = destroyDnVec = destroySpVec = destroyMatDescr = _drop

    def createMatDescr(self) -> int:
        return self._keep(None)

    def nothing(self, *_: int) -> None:
        """What is said of a matrix is what CuPy's own always are."""

    setMatType = setMatIndexBase = setMatFillMode = setMatDiagType = nothing

    # -- descriptors -----------------------------------------------------------------------

    def _vector(self, address: int, dtype: Any, count: int) -> Any:
        kind = np.dtype(dtype)
        return self._runtime.view(address, kind, (count,), (kind.itemsize,))

    def createCsr(
        self, rows: int, columns: int, count: int, starts: int, indexes: int, values: int,
        starts_type: int, indexes_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        from scipy.sparse import csr_matrix

        parts = (
            self._vector(values, DATA_TYPES[value_type], count),
            self._vector(indexes, INDEX_TYPES[indexes_type], count),
            self._vector(starts, INDEX_TYPES[starts_type], rows + 1),
        )
        return self._keep((csr_matrix(parts, (rows, columns), copy=False), parts))

    def createCoo(
        self, rows: int, columns: int, count: int, row: int, column: int, values: int,
        index_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        from scipy.sparse import coo_matrix

        parts = (
            self._vector(values, DATA_TYPES[value_type], count),
            self._vector(row, INDEX_TYPES[index_type], count),
            self._vector(column, INDEX_TYPES[index_type], count),
        )
        made = coo_matrix((parts[0], parts[1:]), (rows, columns), copy=False)
        return self._keep((made, parts))

    def createCsc(
        self, rows: int, columns: int, count: int, starts: int, indexes: int, values: int,
        starts_type: int, indexes_type: int, base: int, value_type: int,
    ) -> int:  # fmt: skip
        handle = self.createCsr(
            columns, rows, count, starts, indexes, values, starts_type, indexes_type, base,
            value_type,
        )  # fmt: skip
        turned, parts = self._made[handle]
        self._made[handle] = turned.T, parts
        return handle

    def createSpVec(
        self, size: int, count: int, indexes: int, values: int, index_type: int, base: int,
        value_type: int,
    ) -> int:  # fmt: skip
        at = self._vector(indexes, INDEX_TYPES[index_type], count)
        return self._keep((at, self._vector(values, DATA_TYPES[value_type], count)))

    def createDnMat(
        self, rows: int, columns: int, ld: int, values: int, value_type: int, order: int
    ) -> int:
        kind = np.dtype(DATA_TYPES[value_type])
        steps = (ld, 1) if order == IN_ROWS else (1, ld)
        strides = steps[0] * kind.itemsize, steps[1] * kind.itemsize
        return self._keep(self._runtime.view(values, kind, (rows, columns), strides))

    def createDnVec(self, size: int, values: int, value_type: int) -> int:
        return self._keep(self._vector(values, DATA_TYPES[value_type], size))

    # -- products --------------------------------------------------------------------------

    def _product(
        self, how: int, how_dense: int, alpha: int, a: int, b: int, beta: int, c: int
    ) -> None:
        matrix, parts = self._made[a]
        dense, found = _operated(self._made[b], how_dense), self._made[c]
        access = self._runtime.access_of
        reads = [each for part in (*parts, dense) for each in access(part)]
        columns = 1 if found.ndim == 1 else found.shape[1]
        self._runtime.operation("spmm", reads, access(found), 2 * matrix.nnz * columns)
        factor, kept = (self._vector(p, found.dtype, 1)[0] for p in (alpha, beta))
        made = factor * (_operated(matrix, how) @ dense)
        found[...] = made if not kept else made + kept * found

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

    def no_buffer(self, *_: int) -> int:
        """Nothing is needed beside what is there."""
        return 0

    spMM_bufferSize = spMV_bufferSize = csr2cscEx2_bufferSize = no_buffer
    sparseToDense_bufferSize = xcscsort_bufferSizeExt = no_buffer
    xcoosort_bufferSizeExt = xcsrsort_bufferSizeExt = no_buffer

    # -- conversions -----------------------------------------------------------------------

    def createIdentityPermutation(self, handle: int, count: int, address: int) -> None:
        self._vector(address, "i4", count)[...] = np.arange(count, dtype="i4")

    def xcoo2csr(
        self, handle: int, row: int, count: int, rows: int, starts: int, base: int
    ) -> None:
        counts = np.bincount(self._vector(row, "i4", count), minlength=rows)
        self._vector(starts, "i4", rows + 1)[...] = np.concatenate(([0], np.cumsum(counts)))

    def xcsr2coo(
        self, handle: int, starts: int, count: int, rows: int, row: int, base: int
    ) -> None:
        counts = np.diff(self._vector(starts, "i4", rows + 1))
        self._vector(row, "i4", count)[...] = np.repeat(np.arange(rows, dtype="i4"), counts)

    def gather(self, handle: int, dense: int, sparse: int) -> None:
        at, values = self._made[sparse]
        values[...] = self._made[dense][at]

    def sparseToDense(
        self, handle: int, sparse: int, dense: int, algorithm: int, buffer: int
    ) -> None:
        self._made[dense][...] = self._made[sparse][0].toarray()

    def _coosort(self, first: int, then: int, count: int, permutation: int) -> None:
        keys = [self._vector(p, "i4", count) for p in (then, first)]
        order = np.lexsort(keys)
        for key in (*keys, self._vector(permutation, "i4", count)):
            key[...] = key[order]

    def xcoosortByRow(
        self, handle: int, rows: int, columns: int, count: int, row: int, column: int,
        permutation: int, buffer: int,
    ) -> None:  # fmt: skip
        self._coosort(row, column, count, permutation)

    def xcoosortByColumn(
        self, handle: int, rows: int, columns: int, count: int, row: int, column: int,
        permutation: int, buffer: int,
    ) -> None:  # fmt: skip
        self._coosort(column, row, count, permutation)

    def xcsrsort(
        self, handle: int, rows: int, columns: int, count: int, kind: int, starts: int,
        indexes: int, permutation: int, buffer: int,
    ) -> None:  # fmt: skip
        row = np.repeat(np.arange(rows), np.diff(self._vector(starts, "i4", rows + 1)))
        column = self._vector(indexes, "i4", count)
        order = np.lexsort((column, row))
        for key in (column, self._vector(permutation, "i4", count)):
            key[...] = key[order]

    def xcscsort(
        self, handle: int, rows: int, columns: int, count: int, kind: int, starts: int,
        indexes: int, permutation: int, buffer: int,
    ) -> None:  # fmt: skip
        self.xcsrsort(handle, columns, rows, count, kind, starts, indexes, permutation, buffer)

    def csr2cscEx2(
        self, handle: int, rows: int, columns: int, count: int, values: int, starts: int,
        indexes: int, csc_values: int, csc_starts: int, csc_indexes: int, value_type: int,
        action: int, base: int, algorithm: int, buffer: int,
    ) -> None:  # fmt: skip
        from scipy.sparse import csr_matrix

        kind = DATA_TYPES[value_type]
        parts = (
            self._vector(values, kind, count),
            self._vector(indexes, "i4", count),
            self._vector(starts, "i4", rows + 1),
        )
        made = csr_matrix(parts, (rows, columns)).tocsc()
        self._vector(csc_values, kind, count)[...] = made.data
        self._vector(csc_indexes, "i4", count)[...] = made.indices
        self._vector(csc_starts, "i4", columns + 1)[...] = made.indptr


def _operated(matrix: Any, how: int) -> Any:
    """A matrix as it is, transposed, or conjugated besides."""
    if how == 0:
        return matrix
    return matrix.T if how == 1 else matrix.conj().T
