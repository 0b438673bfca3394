"""cuSOLVER with LAPACK: functions of ``cupy_backends.cuda.libs.cusolver``, under the same names.

Each status, devInfo, is LAPACK's own. The Jacobi methods (``gesvdj``, ``syevj``) and the
approximate method (``gesvda``) return the results of LAPACK's usual methods. ``dsgesv`` and similar
functions compute in the precision of the matrix, without refinement from a lower precision.

Models: all dense functions except ``gebrd``; the sparse functions ``csrlsvqr`` and ``csrlsvchol``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from umem._common.arithmetic import of_dtype
from umem.host_cuda.libraries.batches import Each, Pointers, on_each
from umem.host_cuda.libraries.handles import DATA_TYPES, TYPES
from umem.host_cuda.libraries.systems import HostSystems, lapack
from umem.host_cuda.runtime import HostRuntime

VERSION = 11, 7, 5
BLOCK = 64
"""Columns of workspace for LAPACK: the most that its own ILAENV returns for such functions."""
UPPER, LEFT, VECTORS = 1, 0, 1
HALVES = b"L", b"U"
"""LAPACK's letters for cublasFillMode_t, cublasSideMode_t and cusolverEigMode_t."""
LETTERS = {1: "T", 2: "C"}
"""LAPACK's letters for cublasOperation_t."""
_ALL, _SOME, _OVER = b"ASO"
_PRECISIONS = "shxdckyz"
"""Second letters of functions that may start in a lower precision."""
C_FUNCTIONS = {
    f"cusolverDn{letter.upper()}{name}": codes
    for letter in TYPES
    for name, codes in (
        ("gesvd", "pcciipippipipipp"),
        ("geqrf", "piipippip"),
        ("orgqr" if letter in "sd" else "ungqr", "piiipippip"),
    )
}
"""The functions that ``cupyx.cusolver`` calls directly, with their argument types."""


class HostSolver(HostSystems):
    """cuSOLVER's functions: factorisations, eigenvalues, singular values, sparse solutions.

    Args:
        runtime: notified of the reads and writes of each function.
    """

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        for letter, dtype in TYPES.items():
            for name, function in self._of_one_type().items():
                setattr(self, letter + name, partial(function, np.dtype(dtype)))
                setattr(self, f"{letter}{name}_bufferSize", self.no_buffer)
            for second in _PRECISIONS:
                for name, function in (("gesv", self._gesv), ("gels", self._gels)):
                    setattr(self, letter + second + name, partial(function, np.dtype(dtype)))
                    setattr(self, f"{letter}{second}{name}_bufferSize", self.no_buffer)

        for name in C_FUNCTIONS:
            setattr(self, name, getattr(self, name.removeprefix("cusolverDn").lower()))

    def _of_one_type(self) -> dict[str, Callable[..., Any]]:
        """Map names of functions that exist for each type to their methods."""
        return {
            "getrf": self._getrf,
            "getrs": self._getrs,
            "geqrf": self._geqrf,
            "orgqr": self._orgqr,
            "ungqr": self._orgqr,
            "ormqr": self._ormqr,
            "unmqr": self._ormqr,
            "potrf": self._potrf,
            "potrs": self._potrs,
            "potrfBatched": self._potrf_batched,
            "potrsBatched": self._potrs_batched,
            "sytrf": self._sytrf,
            "gesvd": self._gesvd,
            "gesvdj": self._gesvdj,
            "gesvdjBatched": self._gesvdj_batched,
            "gesvdaStridedBatched": self._gesvda_batched,
            "syevd": self._syevd,
            "heevd": self._syevd,
            "syevj": self._syevd,
            "heevj": self._syevd,
            "syevjBatched": self._syevj_batched,
            "heevjBatched": self._syevj_batched,
            "csrlsvqr": self._csrlsv,
            "csrlsvchol": self._csrlsv,
        }

    # -- the library -----------------------------------------------------------------------

    def getProperty(self, which: int) -> int:
        return VERSION[which]

    def _getVersion(self) -> tuple[int, int, int]:
        return VERSION

    def _getVersionNumber(self) -> int:
        return VERSION[0] * 1000 + VERSION[1] * 100 + VERSION[2]

    spSetStream, spGetStream = HostSystems.setStream, HostSystems.getStream
    spCreate = createParams = createGesvdjInfo = createSyevjInfo = HostSystems.create
    spDestroy = destroyParams = destroyGesvdjInfo = destroySyevjInfo = HostSystems.nothing
    xgesvdjSetTolerance = xgesvdjSetMaxSweeps = xgesvdjSetSortEig = HostSystems.nothing
    xsyevjSetTolerance = xsyevjSetMaxSweeps = xsyevjSetSortEig = HostSystems.nothing

    # -- factors ---------------------------------------------------------------------------

    def _geqrf(
        self, dtype: Any, handle: int, m: int, n: int, a: int, lda: int, tau: int, work: int,
        size: int, info: int,
    ) -> None:  # fmt: skip
        found = self._matrix(dtype, a, m, n, lda)
        factors = self._vector(dtype, tau, min(m, n))
        self._tell("geqrf", (found,), (found, factors), 2 * m * n * min(m, n))
        found[...], factors[...], _, self._info(info)[0] = lapack(dtype, "geqrf")(found)

    def _orgqr(
        self, dtype: Any, handle: int, m: int, n: int, k: int, a: int, lda: int, tau: int,
        work: int, size: int, info: int,
    ) -> None:  # fmt: skip
        found, factors = self._matrix(dtype, a, m, n, lda), self._vector(dtype, tau, k)
        self._tell("orgqr", (found, factors), (found,), 4 * m * n * k)
        made = lapack(dtype, "orgqr", "ungqr")(found, factors)
        found[...], _, self._info(info)[0] = made

    def _ormqr(
        self, dtype: Any, handle: int, side: int, how: int, m: int, n: int, k: int, a: int,
        lda: int, tau: int, c: int, ldc: int, work: int, size: int, info: int,
    ) -> None:  # fmt: skip
        """Multiply a matrix by the orthogonal factor of a QR decomposition."""
        left = self._matrix(dtype, a, m if side == LEFT else n, k, lda)
        factors, found = self._vector(dtype, tau, k), self._matrix(dtype, c, m, n, ldc)
        self._tell("ormqr", (left, factors, found), (found,), 4 * m * n * k)
        letter = LETTERS[how] if how else "N"
        function = lapack(dtype, "ormqr", "unmqr")
        made = function("RL"[side == LEFT], letter, left, factors, found, max(1, 64 * max(m, n)))
        found[...], _, self._info(info)[0] = made

    def _potrf(
        self, dtype: Any, handle: int, fill: int, n: int, a: int, lda: int, work: int, size: int,
        info: int,
    ) -> None:  # fmt: skip
        at = np.array([a], "u8")
        self._potrf_batched(dtype, handle, fill, n, at.ctypes.data, lda, info, 1)

    def _potrf_batched(
        self, dtype: Any, handle: int, fill: int, n: int, a: int, lda: int, info: int, count: int
    ) -> None:
        found = self._pointed_at(a, count, lda * n * dtype.itemsize)
        work = count * n**3 / 3
        self._tell("potrf", (found,), (found,), work, arithmetic=of_dtype(dtype))
        on_each("potrf", dtype, count, HALVES[fill], n, Pointers(a), lda, Each(info, 4))

    def _potrs(
        self, dtype: Any, handle: int, fill: int, n: int, columns: int, a: int, lda: int, b: int,
        ldb: int, info: int,
    ) -> None:  # fmt: skip
        at_a, at_b = np.array([a], "u8"), np.array([b], "u8")
        given = at_a.ctypes.data, lda, at_b.ctypes.data, ldb, info
        self._potrs_batched(dtype, handle, fill, n, columns, *given, 1)

    def _potrs_batched(
        self, dtype: Any, handle: int, fill: int, n: int, columns: int, a: int, lda: int, b: int,
        ldb: int, info: int, count: int,
    ) -> None:  # fmt: skip
        """Solve systems from Cholesky factors, given by arrays of addresses."""
        left = self._pointed_at(a, count, lda * n * dtype.itemsize)
        found = self._pointed_at(b, count, ldb * columns * dtype.itemsize)
        work = count * 2 * n * n * columns
        self._tell("potrs", (left, found), (found,), work, arithmetic=of_dtype(dtype))
        on_each(
            "potrs", dtype, count, HALVES[fill], n, columns, Pointers(a), lda, Pointers(b), ldb,
            Each(info, 0),
        )  # fmt: skip

    def _sytrf(
        self, dtype: Any, handle: int, fill: int, n: int, a: int, lda: int, pivots: int, work: int,
        size: int, info: int,
    ) -> None:  # fmt: skip
        found, order = self._matrix(dtype, a, n, n, lda), self._pivots(pivots, n)
        self._tell("sytrf", (found,), (found, order), n**3 / 3)
        made = lapack(dtype, "sytrf")(found, lower=fill != UPPER)
        found[...], order[...], self._info(info)[0] = made

    # -- singular values and eigenvalues ---------------------------------------------------

    def _on_svds(self, dtype: Any, count: int, left: bytes, right: bytes, *given: Any) -> None:
        """Call LAPACK's ``gesvd`` on each matrix; the last parameter is the status."""
        m, n = given[:2]
        work = np.empty(BLOCK * (m + n) + 5 * max(m, n), dtype)
        rest = (np.empty(5 * min(m, n), _real(dtype)),) if dtype.kind == "c" else ()
        on_each(
            "gesvd", dtype, count, left, right, *given[:-1], work, work.size, *rest, given[-1]
        )  # fmt: skip

    def _gesvd(
        self, dtype: Any, handle: int, left: int, right: int, m: int, n: int, a: int, lda: int,
        s: int, u: int, ldu: int, v: int, ldv: int, work: int, size: int, rest: int, info: int,
    ) -> None:  # fmt: skip
        """Compute a singular value decomposition."""
        k, whole = min(m, n), self._matrix(dtype, a, m, n, lda)
        written = [whole, self._vector(_real(dtype), s, k)]
        if left in (_ALL, _SOME):
            written.append(self._matrix(dtype, u, m, m if left == _ALL else k, ldu))
        if right in (_ALL, _SOME):
            written.append(self._matrix(dtype, v, n if right == _ALL else k, n, ldv))
        self._tell("gesvd", (whole,), written, 4 * m * n * k)
        places = Each(a, 0), lda, Each(s, 0), Each(u, 0), ldu, Each(v, 0), ldv, Each(info, 0)
        self._on_svds(dtype, 1, bytes([left]), bytes([right]), m, n, *places)

    def _gesvdj(
        self, dtype: Any, handle: int, mode: int, is_short: int, m: int, n: int, a: int, lda: int,
        s: int, u: int, ldu: int, v: int, ldv: int, work: int, size: int, info: int, options: int,
    ) -> None:  # fmt: skip
        places = (a, lda, 0), (s, 0), (u, ldu, 0), (v, ldv, 0)
        self._svds(dtype, mode, is_short, m, n, *places, info, 1)

    def _gesvdj_batched(
        self, dtype: Any, handle: int, mode: int, m: int, n: int, a: int, lda: int, s: int, u: int,
        ldu: int, v: int, ldv: int, work: int, size: int, info: int, options: int, count: int,
    ) -> None:  # fmt: skip
        places = (a, lda, lda * n), (s, min(m, n)), (u, ldu, ldu * m), (v, ldv, ldv * n)
        self._svds(dtype, mode, 0, m, n, *places, info, count)

    def _gesvda_batched(
        self, dtype: Any, handle: int, mode: int, rank: int, m: int, n: int, a: int, lda: int,
        step_a: int, s: int, step_s: int, u: int, ldu: int, step_u: int, v: int, ldv: int,
        step_v: int, work: int, size: int, info: int, result: int, count: int,
    ) -> None:  # fmt: skip
        """Compute singular value decompositions of a strided batch, with full rank only."""
        if rank != min(m, n):
            raise NotImplementedError("the software GPU supports gesvda with full rank only")
        places = (a, lda, step_a), (s, step_s), (u, ldu, step_u), (v, ldv, step_v)
        self._svds(dtype, mode, 1, m, n, *places, info, count)
        self._vector("f8", result, count)[...] = 0

    def _svds(
        self, dtype: Any, mode: int, is_short: int, m: int, n: int, a: tuple[int, int, int],
        s: tuple[int, int], u: tuple[int, int, int], v: tuple[int, int, int], info: int, count: int,
    ) -> None:  # fmt: skip
        """Compute the singular values, and vectors as columns, of `count` matrices.

        Args:
            mode: whether the vectors are computed.
            is_short: only the first min(m, n) vectors.
            a, s, u, v: the address of the first matrix, and the steps that `_stack` takes.
            info: the address of LAPACK's results, one for each matrix.
        """
        k, real = min(m, n), _real(dtype)
        columns, rows = (k, k) if is_short else (m, n)
        given = self._stack(dtype, a[0], m, n, *a[1:], count)
        values = self._stack(real, s[0], k, 1, k, s[1], count)
        on_left = self._stack(dtype, u[0], m, columns, *u[1:], count) if mode == VECTORS else None
        on_right = self._stack(dtype, v[0], n, rows, *v[1:], count) if mode == VECTORS else None
        written = [values, *(x for x in (on_left, on_right) if x is not None)]
        self._tell("gesvd", (given,), written, 4 * given.size * k)
        job = b"N" if mode != VECTORS else b"S" if is_short else b"A"
        left, right = np.empty((count, columns, m), dtype), np.empty((count, n, rows), dtype)
        copied, one = given.swapaxes(1, 2).copy(), dtype.itemsize  # which LAPACK destroys
        self._on_svds(
            dtype, count, job, job, m, n, Each(copied.ctypes.data, m * n * one), m,
            Each(s[0], s[1] * real.itemsize), Each(left.ctypes.data, m * columns * one), m,
            Each(right.ctypes.data, n * rows * one), rows, Each(info, 4),
        )  # fmt: skip
        if on_left is not None and on_right is not None:
            on_left[...], on_right[...] = left.swapaxes(1, 2), right.conj()

    def _syevd(
        self, dtype: Any, handle: int, mode: int, fill: int, n: int, a: int, lda: int, w: int,
        work: int, size: int, info: int, options: int = 0,
    ) -> None:  # fmt: skip
        self._syevj_batched(dtype, handle, mode, fill, n, a, lda, w, work, size, info, options, 1)

    def _syevj_batched(
        self, dtype: Any, handle: int, mode: int, fill: int, n: int, a: int, lda: int, w: int,
        work: int, size: int, info: int, options: int, count: int,
    ) -> None:  # fmt: skip
        """Compute eigenvalues of a strided batch of symmetric matrices."""
        found, real = self._stack(dtype, a, n, n, lda, lda * n, count), _real(dtype)
        values = self._vector(real, w, count * n)
        self._tell("syevd", (found,), (found, values), count * 9 * n**3)
        words, whole = 1 + 6 * n + 2 * n * n, np.empty(3 + 5 * n, "i4")
        rest: tuple[Any, ...] = (np.empty(words, dtype), words)
        if dtype.kind == "c":
            rest += np.empty(words, real), words
        on_each(
            "heevd" if dtype.kind == "c" else "syevd", dtype, count,
            b"V" if mode == VECTORS else b"N", HALVES[fill], n,
            Each(a, lda * n * dtype.itemsize), lda, Each(w, n * real.itemsize), *rest,
            whole, whole.size, Each(info, 4),
        )  # fmt: skip

    def no_buffers(self, *_: Any) -> tuple[int, int]:
        """Return zero workspace sizes for device and host."""
        return 0, 0

    xsyevd_bufferSize = xgeev_bufferSize = no_buffers

    def xsyevd(
        self, handle: int, options: int, mode: int, fill: int, n: int, a_type: int, a: int,
        lda: int, w_type: int, w: int, compute: int, work: int, size: int, host: int,
        host_size: int, info: int,
    ) -> None:  # fmt: skip
        self._syevd(np.dtype(DATA_TYPES[a_type]), handle, mode, fill, n, a, lda, w, 0, 0, info)

    def xgeev(
        self, handle: int, options: int, on_left: int, on_right: int, n: int, a_type: int, a: int,
        lda: int, w_type: int, w: int, left_type: int, left: int, ldl: int, right_type: int,
        right: int, ldr: int, compute: int, work: int, size: int, host: int, host_size: int,
        info: int,
    ) -> None:  # fmt: skip
        """Compute eigenvalues, and eigenvectors if requested, of a general matrix."""
        dtype, values_dtype = np.dtype(DATA_TYPES[a_type]), np.dtype(DATA_TYPES[w_type])
        if values_dtype.kind != "c":
            raise NotImplementedError("the software GPU has no geev with real eigenvalues")
        whole, values = self._matrix(dtype, a, n, n, lda), self._vector(values_dtype, w, n)
        places = [(on_left, left, ldl), (on_right, right, ldr)]
        vectors = [
            self._matrix(dtype, place, n, n, ld) if how == VECTORS else None
            for how, place, ld in places
        ]
        self._tell("geev", (whole,), (values, *(v for v in vectors if v is not None)), 25 * n**3)
        found = lapack(dtype, "geev")(
            whole, compute_vl=on_left == VECTORS, compute_vr=on_right == VECTORS
        )
        values[...] = found[0] if dtype.kind == "c" else found[0] + 1j * found[1]
        for place, made in zip(vectors, found[-3:-1], strict=True):
            if place is not None:
                place[...] = made
        self._info(info)[0] = found[-1]


def _real(dtype: Any) -> Any:
    """Return the real dtype of a complex one."""
    return np.empty(0, dtype).real.dtype
