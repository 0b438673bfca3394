"""The older half of cuSPARSE: matrices as addresses of row starts, 32-bit indices and values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from umem.host_cuda.libraries.handles import DATA_TYPES, TYPES, Array, HostLibrary, scipy_module
from umem.host_cuda.runtime import HostRuntime, LeftOut

ZERO_PIVOT = 9
"""CUSPARSE_STATUS_ZERO_PIVOT of cusparseStatus_t."""


class HostRows(HostLibrary):
    """cuSPARSE's older functions on CSR arrays: conversion, sorting, sums, incomplete factors."""

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        self._zero_pivots: dict[int, int] = {}
        for letter, kind in TYPES.items():
            for name, function in self._of_one_type().items():
                setattr(self, letter + name, partial(function, np.dtype(kind)))
            setattr(self, f"{letter}csrgeam2_bufferSizeExt", self.no_buffer)
            setattr(self, f"{letter}csrilu02_bufferSize", self.no_buffer)

    def _of_one_type(self) -> dict[str, Callable[..., Any]]:
        return {
            "nnz_compress": self._nnz_compress,
            "csr2csr_compress": self._compress,
            "csrgeam2": self._sum,
            "csrilu02_analysis": self._ilu_analysis,
            "csrilu02": self._ilu,
            "gthr": self._gather,  # of CUDA 11
        }

    createMatDescr = createCsrilu02Info = HostLibrary.create
    destroyMatDescr = HostLibrary.nothing
    setMatType = setMatFillMode = setMatDiagType = HostLibrary.nothing

    def setMatIndexBase(self, descriptor: int, base: int) -> None:
        from_zero(base)

    csr2cscEx2_bufferSize = xcscsort_bufferSizeExt = HostLibrary.no_buffer
    xcoosort_bufferSizeExt = xcsrsort_bufferSizeExt = HostLibrary.no_buffer

    # -- conversions -----------------------------------------------------------------------

    def createIdentityPermutation(self, handle: int, count: int, address: int) -> None:
        found = self._vector("i4", address, count)
        self._tell("identity", (), (found,))
        found[...] = np.arange(count, dtype="i4")

    def _gather(
        self, dtype: Any, handle: int, count: int, dense: int, values: int, places: int, base: int
    ) -> None:
        from_zero(base)
        at, found = self._vector("i4", places, count), self._vector(dtype, values, count)
        read = self._vector(dtype, dense, int(at.max(initial=-1)) + 1)
        self._tell("gather", (read, at), (found,))
        found[...] = read[at]

    def xcoo2csr(
        self, handle: int, row: int, count: int, rows: int, starts: int, base: int
    ) -> None:
        read, found = self._vector("i4", row, count), self._vector("i4", starts, rows + 1)
        self._tell("coo2csr", (read,), (found,))
        found[0] = 0
        found[1:] = np.cumsum(np.bincount(read, minlength=rows))

    def xcsr2coo(
        self, handle: int, starts: int, count: int, rows: int, row: int, base: int
    ) -> None:
        read, found = self._vector("i4", starts, rows + 1), self._vector("i4", row, count)
        self._tell("csr2coo", (read,), (found,))
        found[...] = np.repeat(np.arange(rows, dtype="i4"), np.diff(read))

    def csr2cscEx2(
        self, handle: int, rows: int, columns: int, count: int, values: int, starts: int,
        indexes: int, csc_values: int, csc_starts: int, csc_indexes: int, value_type: int,
        action: int, base: int, algorithm: int, buffer: int,
    ) -> None:  # fmt: skip
        """Convert CSR to CSC."""
        kind = DATA_TYPES[value_type]
        read = (
            self._vector(kind, values, count),
            self._vector("i4", indexes, count),
            self._vector("i4", starts, rows + 1),
        )
        found = (
            self._vector(kind, csc_values, count),
            self._vector("i4", csc_indexes, count),
            self._vector("i4", csc_starts, columns + 1),
        )
        self._tell("csr2csc", read, found)
        made = scipy_module("sparse").csr_matrix(read, (rows, columns)).tocsc()
        for part, part_made in zip(found, (made.data, made.indices, made.indptr), strict=True):
            part[...] = part_made

    # -- sorting ---------------------------------------------------------------------------

    def _sort(self, keys: Callable[[], Sequence[Array]], *moved: Array) -> None:
        """Sort arrays by keys, of which the last is the primary key."""
        self._tell("sort", moved, moved, 20 * moved[0].size)
        order = np.lexsort(keys())
        for each in moved:
            each[...] = each[order]

    def _coosort(self, first: int, then: int, count: int, permutation: int) -> None:
        keys = [self._vector("i4", p, count) for p in (then, first)]
        self._sort(lambda: keys, *keys, self._vector("i4", permutation, count))

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
        """Sort each row of a CSR matrix by column, and a permutation with it."""
        bounds, column = self._vector("i4", starts, rows + 1), self._vector("i4", indexes, count)

        def keys() -> Sequence[Array]:
            return column, np.repeat(np.arange(rows), np.diff(bounds))

        self._sort(keys, column, self._vector("i4", permutation, count))

    def xcscsort(
        self, handle: int, rows: int, columns: int, count: int, kind: int, starts: int,
        indexes: int, permutation: int, buffer: int,
    ) -> None:  # fmt: skip
        self.xcsrsort(handle, columns, rows, count, kind, starts, indexes, permutation, buffer)

    # -- without small elements ------------------------------------------------------------

    def _nnz_compress(
        self, dtype: Any, handle: int, rows: int, form: int, values: int, starts: int,
        counts: int, tolerance: Any,
    ) -> int:  # fmt: skip
        """Count each row's entries above a tolerance; returns their sum."""
        bounds = self._vector("i4", starts, rows + 1)
        count, found = int(bounds[-1]), self._vector("i4", counts, rows)
        read = self._vector(dtype, values, count)
        try:
            self._tell("nnz_compress", (bounds, read), (found,), decisive=(bounds, read))
        except LeftOut as left_out:
            left_out.returned = count
            found[:1] = count  # `_compress` writes as many as these are together
            raise
        kept = np.concatenate(([0], np.cumsum(np.abs(read) > abs(tolerance))))
        found[...] = np.diff(kept[bounds])
        return int(kept[-1])

    def _compress(
        self, dtype: Any, handle: int, rows: int, columns: int, form: int, values: int,
        indexes: int, starts: int, count: int, counts: int, found_values: int,
        found_indexes: int, found_starts: int, tolerance: Any,
    ) -> None:  # fmt: skip
        """Copy the entries above a tolerance to another CSR matrix."""
        read, column = self._vector(dtype, values, count), self._vector("i4", indexes, count)
        bounds, kept_counts = (
            self._vector("i4", found_starts, rows + 1), self._vector("i4", counts, rows)
        )  # fmt: skip
        total = int(kept_counts.sum())
        made = self._vector(dtype, found_values, total), self._vector("i4", found_indexes, total)
        self._tell("csr2csr_compress", (read, column), (*made, bounds))
        kept = np.abs(read) > abs(tolerance)
        made[0][...], made[1][...] = read[kept], column[kept]
        bounds[0] = 0
        bounds[1:] = np.cumsum(kept_counts)

    # -- sums ------------------------------------------------------------------------------

    def _coordinates(
        self, values: Array, starts: int, indexes: int, shape: tuple[int, int]
    ) -> tuple[Array, Array, Array]:
        counts = np.diff(self._vector("i4", starts, shape[0] + 1))
        row = np.repeat(np.arange(shape[0]), counts)
        return values, row, self._vector("i4", indexes, len(values))

    def _both(self, shape: tuple[int, int], *matrices: tuple[Array, int, int]) -> Any:
        """Add two CSR matrices; entries that become zero stay."""
        parts = [self._coordinates(*each, shape) for each in matrices]
        values, row, column = (np.concatenate(each) for each in zip(*parts, strict=True))
        return scipy_module("sparse").coo_matrix((values, (row, column)), shape).tocsr()

    def xcsrgeam2Nnz(
        self, handle: int, rows: int, columns: int, form_a: int, count_a: int, starts_a: int,
        indexes_a: int, form_b: int, count_b: int, starts_b: int, indexes_b: int, form_c: int,
        starts_c: int, result: int, buffer: int,
    ) -> None:  # fmt: skip
        """Compute the row pointer and count of a sum of two CSR matrices."""
        found = self._vector("i4", starts_c, rows + 1)
        places = [
            self._vector("i4", address, count)
            for address, count in (
                (starts_a, rows + 1), (indexes_a, count_a), (starts_b, rows + 1),
                (indexes_b, count_b),
            )
        ]  # fmt: skip
        try:
            self._tell("csrgeam", (), (found,), decisive=places)
        except LeftOut:  # none of their entries may be in the same place
            found[-1] = self._vector("i4", result, 1)[0] = count_a + count_b
            raise
        made = self._both(
            (rows, columns),
            (np.ones(count_a), starts_a, indexes_a), (np.ones(count_b), starts_b, indexes_b),
        )  # fmt: skip
        found[...] = made.indptr
        self._vector("i4", result, 1)[0] = made.nnz

    def _sum(
        self, dtype: Any, handle: int, rows: int, columns: int, alpha: int, form_a: int,
        count_a: int, values_a: int, starts_a: int, indexes_a: int, beta: int, form_b: int,
        count_b: int, values_b: int, starts_b: int, indexes_b: int, form_c: int, values_c: int,
        starts_c: int, indexes_c: int, buffer: int,
    ) -> None:  # fmt: skip
        """Compute alpha a + beta b of CSR matrices."""
        one = self._vector(dtype, values_a, count_a)
        other = self._vector(dtype, values_b, count_b)
        bounds = self._vector("i4", starts_c, rows + 1)  # of `xcsrgeam2Nnz`
        total = int(bounds[-1])
        found = self._vector(dtype, values_c, total), self._vector("i4", indexes_c, total)
        self._tell("csrgeam", (one, other), found, 2 * total)
        made = self._both(
            (rows, columns),
            (self._vector(dtype, alpha, 1)[0] * one, starts_a, indexes_a),
            (self._vector(dtype, beta, 1)[0] * other, starts_b, indexes_b),
        )
        found[0][...], found[1][...], bounds[...] = made.data, made.indices, made.indptr

    # -- incomplete factors ----------------------------------------------------------------

    def _zero_pivot(self, info: int, bounds: Array, column: Array, values: Array | None) -> None:
        """Store the first row whose diagonal is missing or zero."""
        rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        there = np.zeros(len(bounds) - 1, bool)
        diagonal = rows == column
        there[rows[diagonal]] = True if values is None else values[diagonal] != 0
        self._zero_pivots[info] = -1 if there.all() else int(there.argmin())

    def _ilu_analysis(
        self, dtype: Any, handle: int, rows: int, count: int, form: int, values: int, starts: int,
        indexes: int, info: int, policy: int, buffer: int,
    ) -> None:  # fmt: skip
        bounds, column = self._vector("i4", starts, rows + 1), self._vector("i4", indexes, count)
        self._zero_pivot(info, bounds, column, None)

    def _ilu(
        self, dtype: Any, handle: int, rows: int, count: int, form: int, values: int, starts: int,
        indexes: int, info: int, policy: int, buffer: int,
    ) -> None:  # fmt: skip
        """Compute an incomplete LU factorisation without fill-in."""
        bounds, column = self._vector("i4", starts, rows + 1), self._vector("i4", indexes, count)
        found = self._vector(dtype, values, count)
        self._tell("csrilu02", (bounds, column), (found,), 20 * count)
        place: list[dict[int, int]] = [{} for _ in range(rows)]
        for row in range(rows):
            here = place[row] = {int(column[p]): p for p in range(bounds[row], bounds[row + 1])}
            for above in sorted(k for k in here if k < row):
                found[here[above]] /= found[place[above][above]]
                for k, p in place[above].items():
                    if k > above and k in here:
                        found[here[k]] -= found[here[above]] * found[p]
        self._zero_pivot(info, bounds, column, found)

    def xcsrilu02_zeroPivot(self, handle: int, info: int, result: int) -> None:
        row = self._vector("i4", result, 1)[0] = self._zero_pivots.get(info, -1)
        if row >= 0:
            raise importlib.import_module("cupy_backends.cuda.libs.cusparse").CuSparseError(
                ZERO_PIVOT
            )

    def destroyCsrilu02Info(self, info: int) -> None:
        self._zero_pivots.pop(info, None)


def from_zero(base: int) -> None:
    """Raise for indices that start at one."""
    if base:
        raise NotImplementedError("the software GPU has no sparse indices that begin at 1")
