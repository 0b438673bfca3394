"""Linear systems with LAPACK and SuperLU, for cuBLAS and cuSOLVER."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from umem.host_cuda.libraries.handles import TYPES, Array, HostLibrary, scipy_module


def lapack(dtype: Any, *names: str) -> Callable[..., Any]:
    """Return a LAPACK function by the first name that exists for the dtype."""
    letter = next(letter for letter, kind in TYPES.items() if dtype == kind)
    functions = scipy_module("linalg.lapack")
    found: Callable[..., Any] = next(
        f for name in names if (f := getattr(functions, letter + name, None)) is not None
    )
    return found


class HostSystems(HostLibrary):
    """LU factorisation and linear systems; pivots are counted from 1."""

    def _info(self, address: int, count: int = 1) -> Array:
        return self._vector("i4", address, count)

    def _pivots(self, address: int, n: int) -> Array:
        if not address:
            raise NotImplementedError("the software GPU does not support getrf without pivots")
        return self._vector("i4", address, n)

    def _getrf(
        self, dtype: Any, handle: int, m: int, n: int, a: int, lda: int, work: int, pivots: int,
        info: int,
    ) -> None:  # fmt: skip
        found, row = self._matrix(dtype, a, m, n, lda), self._pivots(pivots, min(m, n))
        self._tell("getrf", (found,), (found, row), m * n * min(m, n))
        found[...], order, self._info(info)[0] = lapack(dtype, "getrf")(found)
        row[...] = order + 1

    def _getrs(
        self, dtype: Any, handle: int, how: int, n: int, columns: int, a: int, lda: int,
        pivots: int, b: int, ldb: int, info: int,
    ) -> None:  # fmt: skip
        left, row = self._matrix(dtype, a, n, n, lda), self._pivots(pivots, n)
        found = self._matrix(dtype, b, n, columns, ldb)
        self._tell("getrs", (left, row, found), (found,), 2 * n * n * columns)
        found[...], self._info(info)[0] = lapack(dtype, "getrs")(left, row - 1, found, how)

    def _gesv(
        self, dtype: Any, handle: int, n: int, columns: int, a: int, lda: int, pivots: int, b: int,
        ldb: int, x: int, ldx: int, work: int, size: int, info: int,
    ) -> int:  # fmt: skip
        """Solve a square system for each column of ``b`` into ``x``; return status 0.

        Leaves the LU factors in ``a``. If a pivot is zero, ``info`` has its number, and ``x`` has
        no solution.
        """
        left, row = self._matrix(dtype, a, n, n, lda), self._pivots(pivots, n)
        right = self._matrix(dtype, b, n, columns, ldb)
        found = self._matrix(dtype, x, n, columns, ldx)
        self._tell("gesv", (left, right), (left, row, found), n**3 + 2 * n * n * columns)
        left[...], order, self._info(info)[0] = lapack(dtype, "getrf")(left)
        row[...], found[...] = order + 1, right
        if not self._info(info)[0]:
            found[...], self._info(info)[0] = lapack(dtype, "getrs")(left, order, found, 0)
        return 0

    def _gels(
        self, dtype: Any, handle: int, m: int, n: int, columns: int, a: int, lda: int, b: int,
        ldb: int, x: int, ldx: int, work: int, size: int, info: int,
    ) -> int:  # fmt: skip
        """Solve a least-squares problem for each column of ``b`` into ``x``; return status 0."""
        left, right = self._matrix(dtype, a, m, n, lda), self._matrix(dtype, b, m, columns, ldb)
        found = self._matrix(dtype, x, n, columns, ldx)
        self._tell("gels", (left, right), (found,), 2 * m * n * (n + columns))
        _, made, self._info(info)[0] = lapack(dtype, "gels")(left, right)
        found[...] = made[:n]
        return 0

    def _csrlsv(
        self, dtype: Any, handle: int, n: int, count: int, form: int, values: int, starts: int,
        indexes: int, b: int, tolerance: float, reorder: int, x: int, result: int,
    ) -> None:  # fmt: skip
        """Solve a sparse system into ``x``; a singular one gives NaN.

        ``result`` gets -1, or for a singular system the index of a small pivot.
        """
        parts = (
            self._vector(dtype, values, count), self._vector("i4", indexes, count),
            self._vector("i4", starts, n + 1),
        )  # fmt: skip
        right, found = self._vector(dtype, b, n), self._vector(dtype, x, n)
        self._tell("csrlsv", (*parts, right), (found,), 20 * count)
        matrix = scipy_module("sparse").csr_matrix(parts, (n, n)).tocsc()
        try:
            found[...] = scipy_module("sparse.linalg").splu(matrix).solve(right)
            self._info(result)[0] = -1
        except RuntimeError:  # a pivot is zero: there is no such solution
            sizes = np.abs(np.diagonal(np.linalg.qr(matrix.toarray(), "r")))
            found[...] = np.nan
            self._info(result)[0] = sizes.argmin()
