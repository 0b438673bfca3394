"""cuBLAS on host memory: functions of ``cupy_backends.cuda.libs.cublas``, under the same names.

Matrices are in column-major order, as in BLAS. NumPy computes products with its own BLAS. Scalars
are read in place, because host and device memory are the same here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from umem._common.arithmetic import (
    BFLOAT16_PRODUCT,
    FLOAT16_PRODUCT,
    TF32_PRODUCT,
    of_dtype,
    of_product,
)
from umem.host_cuda.libraries.batches import Each, Pointers, on_each
from umem.host_cuda.libraries.handles import DATA_TYPES, TYPES, Array, scipy_module
from umem.host_cuda.libraries.systems import HostSystems
from umem.host_cuda.memory_ranges import MemoryRange
from umem.host_cuda.runtime import HostRuntime, LeftOut

UPPER, RIGHT, UNIT = 1, 1, 1
"""Values of cublasFillMode_t, cublasSideMode_t and cublasDiagType_t."""
OPERATIONS = b"N", b"T", b"C"
"""BLAS letters for cublasOperation_t."""
TENSOR_OP_MATH, PEDANTIC_MATH, TF32_MATH = 1, 2, 3
"""Values of cublasMath_t, whose flags begin at 16."""
PEDANTIC_TYPES = 65, 67, 69, 71, 73
"""Values of cublasComputeType_t without tensor cores."""
FAST_TYPES = {74: FLOAT16_PRODUCT, 75: BFLOAT16_PRODUCT, 77: TF32_PRODUCT}
"""Values of cublasComputeType_t with tensor cores for float32."""
FAST_MATH = {TENSOR_OP_MATH: FLOAT16_PRODUCT, TF32_MATH: TF32_PRODUCT}
"""Math modes with tensor cores for float32, if the compute type does not determine it."""
VERSION = 120900
BLOCK = 64
"""Columns of workspace for LAPACK: the most that its own ILAENV returns for such functions."""


class HostBlas(HostSystems):
    """cuBLAS's functions on host addresses.

    Args:
        runtime: notified of the reads and writes of each function.
    """

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        self._math_mode = 0
        for letter, dtype in TYPES.items():
            for name, function in self._of_one_type().items():
                setattr(self, letter + name, partial(function, np.dtype(dtype)))
            real = np.dtype({"c": "f4", "z": "f8"}.get(letter, dtype))
            for name, reduce in (("nrm2", _norm), ("asum", _sum_of_sizes)):
                before = {"c": "sc", "z": "dz"}.get(letter, letter)
                setattr(self, before + name, partial(self._reduce, np.dtype(dtype), real, reduce))
            for name, find in (("amax", np.argmax), ("amin", np.argmin)):
                place, made = partial(_place, find), np.dtype("i4")
                which = f"i{letter}{name}"
                setattr(self, which, partial(self._reduce, np.dtype(dtype), made, place))
        for letter in "sd":
            setattr(self, f"{letter}dot", partial(self._dot, np.dtype(TYPES[letter]), False))
            setattr(self, f"{letter}ger", partial(self._ger, np.dtype(TYPES[letter]), False))
            setattr(self, f"{letter}sbmv", partial(self._sbmv, np.dtype(TYPES[letter])))
        for letter in "cz":
            for name, conjugate in (("u", False), ("c", True)):
                kind = np.dtype(TYPES[letter])
                setattr(self, f"{letter}dot{name}", partial(self._dot, kind, conjugate))
                setattr(self, f"{letter}ger{name}", partial(self._ger, kind, conjugate))
        self.csscal = partial(self._scal, np.dtype("c8"), scale=np.dtype("f4"))
        self.zdscal = partial(self._scal, np.dtype("c16"), scale=np.dtype("f8"))

    def _of_one_type(self) -> dict[str, Callable[..., Any]]:
        """Map names of functions that exist for each type to their methods."""
        return {
            "gemm": self._gemm,
            "gemmBatched": self._gemm_batched,
            "gemmStridedBatched": self._gemm_strided,
            "gemv": self._gemv,
            "axpy": self._axpy,
            "scal": self._scal,
            "geam": self._geam,
            "dgmm": self._dgmm,
            "syrk": self._syrk,
            "trsm": self._trsm,
            "trsmBatched": self._trsm_batched,
            "getrfBatched": self._getrf_batched,
            "getrsBatched": self._getrs_batched,
            "getriBatched": self._getri_batched,
        }

    # -- the library -----------------------------------------------------------------------

    def getVersion(self, handle: int) -> int:
        return VERSION

    def getMathMode(self, handle: int) -> int:
        return self._math_mode

    def setMathMode(self, handle: int, mode: int) -> None:
        self._math_mode = mode

    # -- views -----------------------------------------------------------------------------

    def _operand(
        self, dtype: Any, address: int, ld: int, how: int, rows: int, columns: int,
        step: int = 0, count: int = 0,
    ) -> Array:  # fmt: skip
        """Return an operand of a product, or a stack of them, transposed or conjugated by ``how``.

        Args:
            dtype, address, ld: of the column-major matrix in memory.
            how: an index of `OPERATIONS`.
            rows, columns: of the returned operand.
            step, count: the stack's stride and number of matrices; 0 means one matrix.

        Returns:
            a view of the memory; a copy if complex numbers are conjugated.
        """
        shape = (columns, rows) if how else (rows, columns)
        found = (
            self._stack(dtype, address, *shape, ld, step, count)
            if count
            else self._matrix(dtype, address, *shape, ld)
        )
        if how == 0:
            return found
        found = found.swapaxes(-1, -2)
        if how == 1 or dtype.kind != "c":
            return found
        try:  # what follows reads a copy, of which the observer does not hear
            self._tell("conj", (found,), ())
        except LeftOut:  # and so is what follows, once it is reported
            return found
        return found.conj()

    def _each(
        self, dtype: Any, addresses: int, columns: int, ld: int, count: int
    ) -> list[MemoryRange]:
        """Return the accesses to matrices given by an array of addresses."""
        return self._pointed_at(addresses, count, columns * ld * dtype.itemsize)

    def _scalar(self, dtype: Any, address: int) -> Any:
        return self._runtime.view(address, dtype, (1,), (dtype.itemsize,))[0]

    # -- products --------------------------------------------------------------------------

    def _arithmetic(self, dtype: Any, compute: int = 0) -> str:
        """Return the kind of a product, from its dtype, compute type and the math mode."""
        mode = self._math_mode & 15
        if compute in PEDANTIC_TYPES or mode == PEDANTIC_MATH:
            return of_dtype(dtype)
        if dtype in (np.float32, np.complex64):
            kind = FAST_TYPES.get(compute) or FAST_MATH.get(mode)
            return kind or of_product(dtype)
        return of_product(dtype)

    def _product(
        self, alpha: Any, a: Array, b: Array, beta: Any, c: Array, compute: Any = None,
        arithmetic: str | None = None,
    ) -> None:  # fmt: skip
        """Compute c = alpha a b + beta c, for one matrix or a stack of them."""
        work = _work(a.dtype) * c.size * a.shape[-1]
        self._tell("gemm", (a, b), (c,), work, arithmetic=arithmetic or self._arithmetic(a.dtype))
        if not alpha:  # BLAS reads neither operand then: they may hold NaN
            c[...] = beta * c if beta else 0
            return
        if compute is not None and compute != a.dtype:
            a, b = a.astype(compute), b.astype(compute)
        a, b, c = (
            x.swapaxes(-1, -2) for x in (b, a, c)
        )  # in the order of rows, in which NumPy writes without a copy
        is_plain = not beta and alpha == 1 and a.dtype == c.dtype
        found = np.matmul(a, b, out=c if is_plain else None)
        if not is_plain:
            found = found if alpha == 1 else alpha * found
            c[...] = found if not beta else found + beta * c

    def _gemm(
        self, dtype: Any, handle: int, ta: int, tb: int, m: int, n: int, k: int,
        alpha: int, a: int, lda: int, b: int, ldb: int, beta: int, c: int, ldc: int,
    ) -> None:  # fmt: skip
        given = alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0
        self._gemm_strided(dtype, handle, ta, tb, m, n, k, *given, 1)

    def _gemm_strided(
        self, dtype: Any, handle: int, ta: int, tb: int, m: int, n: int, k: int,
        alpha: int, a: int, lda: int, step_a: int, b: int, ldb: int, step_b: int,
        beta: int, c: int, ldc: int, step_c: int, count: int,
    ) -> None:  # fmt: skip
        """Multiply a strided batch of matrices."""
        self._product(
            self._scalar(dtype, alpha), self._operand(dtype, a, lda, ta, m, k, step_a, count),
            self._operand(dtype, b, ldb, tb, k, n, step_b, count), self._scalar(dtype, beta),
            self._stack(dtype, c, m, n, ldc, step_c, count),
        )  # fmt: skip

    def _gemm_batched(
        self, dtype: Any, handle: int, ta: int, tb: int, m: int, n: int, k: int,
        alpha: int, a: int, lda: int, b: int, ldb: int, beta: int, c: int, ldc: int, count: int,
    ) -> None:  # fmt: skip
        """Multiply a batch of matrices given by arrays of addresses."""
        left = self._each(dtype, a, m if ta else k, lda, count)
        right = self._each(dtype, b, k if tb else n, ldb, count)
        self._tell(
            "gemm", (left, right), (self._each(dtype, c, n, ldc, count),),
            _work(dtype) * count * m * n * k, arithmetic=self._arithmetic(dtype),
        )  # fmt: skip
        on_each(
            "gemm", dtype, count, OPERATIONS[ta], OPERATIONS[tb], m, n, k,
            self._scalar(dtype, alpha), Pointers(a), lda, Pointers(b), ldb,
            self._scalar(dtype, beta), Pointers(c), ldc,
        )  # fmt: skip

    def gemmEx(
        self, handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int,
        a: int, a_type: int, lda: int, b: int, b_type: int, ldb: int, beta: int,
        c: int, c_type: int, ldc: int, compute: int = 68, algorithm: int = -1,
    ) -> None:  # fmt: skip
        given = alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0
        self.gemmStridedBatchedEx(handle, ta, tb, m, n, k, *given, 1, compute)

    def sgemmEx(self, *arguments: int) -> None:
        self.gemmEx(*arguments)

    def gemmStridedBatchedEx(
        self, handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int,
        a: int, a_type: int, lda: int, step_a: int, b: int, b_type: int, ldb: int, step_b: int,
        beta: int, c: int, c_type: int, ldc: int, step_c: int, count: int,
        compute: int = 68, algorithm: int = -1,
    ) -> None:  # fmt: skip
        """Multiply a strided batch of matrices, with a dtype for each operand."""
        types = [np.dtype(_known(kind)) for kind in (a_type, b_type, c_type)]
        scale = _compute_type(types[2])
        self._product(
            self._scalar(scale, alpha), self._operand(types[0], a, lda, ta, m, k, step_a, count),
            self._operand(types[1], b, ldb, tb, k, n, step_b, count), self._scalar(scale, beta),
            self._stack(types[2], c, m, n, ldc, step_c, count), scale,
            self._arithmetic(types[0], compute),
        )  # fmt: skip

    def _gemv(
        self, dtype: Any, handle: int, ta: int, m: int, n: int, alpha: int, a: int, lda: int,
        x: int, incx: int, beta: int, y: int, incy: int,
    ) -> None:  # fmt: skip
        """Multiply a matrix by a vector."""
        rows, columns = (m, n) if ta == 0 else (n, m)
        self._product(
            self._scalar(dtype, alpha), self._operand(dtype, a, lda, ta, rows, columns),
            self._vector(dtype, x, columns, incx)[:, None], self._scalar(dtype, beta),
            self._vector(dtype, y, rows, incy)[:, None],
        )  # fmt: skip

    def _sbmv(
        self, dtype: Any, handle: int, fill: int, n: int, k: int, alpha: int, a: int, lda: int,
        x: int, incx: int, beta: int, y: int, incy: int,
    ) -> None:  # fmt: skip
        """Multiply a symmetric matrix, of which k diagonals above the main one are stored."""
        band = self._matrix(dtype, a, k + 1, n, lda)
        one, found = self._vector(dtype, x, n, incx), self._vector(dtype, y, n, incy)
        factor, kept = self._scalar(dtype, alpha), self._scalar(dtype, beta)
        reads = (band, one, found) if kept else (band, one)
        self._tell("sbmv", reads, (found,), 2 * n * (2 * k + 1))
        if not kept:  # y may hold NaN
            found[...] = 0
        on_each(
            "sbmv", dtype, 1, b"U" if fill == UPPER else b"L", n, k, factor, Each(a, 0), lda,
            Each(x, 0), incx, kept, Each(y, 0), incy,
        )  # fmt: skip

    def _ger(
        self, dtype: Any, conjugate: bool, handle: int, m: int, n: int, alpha: int,
        x: int, incx: int, y: int, incy: int, a: int, lda: int,
    ) -> None:  # fmt: skip
        one, other = self._vector(dtype, x, m, incx), self._vector(dtype, y, n, incy)
        found = self._matrix(dtype, a, m, n, lda)
        self._tell("ger", (one, other), (found,), 2 * m * n)
        if factor := self._scalar(dtype, alpha):
            found += factor * np.outer(one, other.conj() if conjugate else other)

    def _syrk(
        self, dtype: Any, handle: int, fill: int, ta: int, n: int, k: int, alpha: int, a: int,
        lda: int, beta: int, c: int, ldc: int,
    ) -> None:  # fmt: skip
        """Compute c = alpha a a' + beta c in one triangle of c."""
        left = self._operand(dtype, a, lda, ta, n, k)
        found = self._matrix(dtype, c, n, n, ldc)
        work = _work(dtype) / 2 * n * n * k
        self._tell("syrk", (left,), (found,), work, arithmetic=self._arithmetic(dtype))
        factor, kept = self._scalar(dtype, alpha), self._scalar(dtype, beta)
        whole = factor * (left @ left.T) if factor else np.zeros_like(found)
        whole = whole + kept * found if kept else whole
        where = np.triu_indices(n) if fill == UPPER else np.tril_indices(n)
        found[where] = whole[where]

    # -- vectors ---------------------------------------------------------------------------

    def _axpy(
        self, dtype: Any, handle: int, n: int, alpha: int, x: int, incx: int, y: int, incy: int
    ) -> None:
        one, other = self._vector(dtype, x, n, incx), self._vector(dtype, y, n, incy)
        self._tell("axpy", (one,), (other,), 2 * n)
        # eigsh of CuPy 14 passes 0 and a vector that nobody wrote.
        if factor := self._scalar(dtype, alpha):
            other += factor * one

    def _scal(
        self, dtype: Any, handle: int, n: int, alpha: int, x: int, incx: int, scale: Any = None
    ) -> None:
        found = self._vector(dtype, x, n, incx)
        self._tell("scal", (), (found,), n)
        found *= self._scalar(scale or dtype, alpha)

    def _dot(
        self, dtype: Any, conjugate: bool, handle: int, n: int, x: int, incx: int, y: int,
        incy: int, result: int,
    ) -> None:  # fmt: skip
        one, other = self._vector(dtype, x, n, incx), self._vector(dtype, y, n, incy)
        found = self._vector(dtype, result, 1, 1)
        self._tell("dot", (one, other), (found,), 2 * n)
        found[0] = np.vdot(one, other) if conjugate else np.dot(one, other)

    def _reduce(
        self, dtype: Any, made: Any, function: Callable[[Array], Any], handle: int, n: int, x: int,
        incx: int, result: int,
    ) -> None:  # fmt: skip
        one, found = self._vector(dtype, x, n, incx), self._vector(made, result, 1, 1)
        self._tell("reduce", (one,), (found,), n)
        found[0] = function(one)

    # -- matrices --------------------------------------------------------------------------

    def _geam(
        self, dtype: Any, handle: int, ta: int, tb: int, m: int, n: int, alpha: int, a: int,
        lda: int, beta: int, b: int, ldb: int, c: int, ldc: int,
    ) -> None:  # fmt: skip
        """Compute c = alpha a + beta b, each transposed if requested."""
        found = self._matrix(dtype, c, m, n, ldc)
        parts = [
            (factor, self._operand(dtype, p, ld, how, m, n))
            for factor, p, ld, how in (
                (self._scalar(dtype, alpha), a, lda, ta), (self._scalar(dtype, beta), b, ldb, tb)
            )
            if factor
        ]  # fmt: skip
        self._tell("geam", tuple(part for _, part in parts), (found,), 2 * m * n)
        found[...] = sum(factor * part for factor, part in parts)

    def _dgmm(
        self, dtype: Any, handle: int, side: int, m: int, n: int, a: int, lda: int, x: int,
        incx: int, c: int, ldc: int,
    ) -> None:  # fmt: skip
        whole, found = self._matrix(dtype, a, m, n, lda), self._matrix(dtype, c, m, n, ldc)
        factors = self._vector(dtype, x, n if side == RIGHT else m, incx)
        self._tell("dgmm", (whole, factors), (found,), m * n)
        found[...] = whole * (factors if side == RIGHT else factors[:, None])

    def _trsm(
        self, dtype: Any, handle: int, side: int, fill: int, how: int, diagonal: int, m: int,
        n: int, alpha: int, a: int, lda: int, b: int, ldb: int,
    ) -> None:  # fmt: skip
        at_a, at_b = np.array([a], "u8"), np.array([b], "u8")
        given = side, fill, how, diagonal, m, n, alpha, at_a.ctypes.data, lda, at_b.ctypes.data, ldb
        self._trsm_batched(dtype, handle, *given, 1)

    def _trsm_batched(
        self, dtype: Any, handle: int, side: int, fill: int, how: int, diagonal: int, m: int,
        n: int, alpha: int, a: int, lda: int, b: int, ldb: int, count: int,
    ) -> None:  # fmt: skip
        """Solve triangular systems given by arrays of addresses."""
        size = n if side == RIGHT else m
        left, found = self._each(dtype, a, size, lda, count), self._each(dtype, b, n, ldb, count)
        work = count * m * n * size
        self._tell("trsm", (left, found), (found,), work, arithmetic=of_dtype(dtype))
        letters = (b"L", b"R")[side], (b"L", b"U")[fill], OPERATIONS[how], (b"N", b"U")[diagonal]
        on_each(
            "trsm", dtype, count, *letters, m, n, self._scalar(dtype, alpha), Pointers(a), lda,
            Pointers(b), ldb,
        )  # fmt: skip

    # -- many small systems ----------------------------------------------------------------

    def _getrf_batched(
        self, dtype: Any, handle: int, n: int, a: int, lda: int, pivots: int, info: int, count: int
    ) -> None:
        row, found = self._pivots(pivots, count * n), self._each(dtype, a, n, lda, count)
        work = count * n**3
        self._tell("getrf", (found,), (found, row), work, arithmetic=of_dtype(dtype))
        on_each("getrf", dtype, count, n, n, Pointers(a), lda, Each(pivots, 4 * n), Each(info, 4))

    def _getrs_batched(
        self, dtype: Any, handle: int, how: int, n: int, columns: int, a: int, lda: int,
        pivots: int, b: int, ldb: int, info: int, count: int,
    ) -> int:  # fmt: skip
        """Solve systems from LU factors, given by arrays of addresses."""
        ctypes.c_int.from_address(info).value = 0  # the host's; a dry run leaves out what follows
        row, left = self._pivots(pivots, count * n), self._each(dtype, a, n, lda, count)
        found = self._each(dtype, b, columns, ldb, count)
        work = count * 2 * n * n * columns
        self._tell("getrs", (left, row, found), (found,), work, arithmetic=of_dtype(dtype))
        on_each(
            "getrs", dtype, count, OPERATIONS[how], n, columns, Pointers(a), lda,
            Each(pivots, 4 * n), Pointers(b), ldb, Each(info, 0),
        )  # fmt: skip
        return 0

    def _getri_batched(
        self, dtype: Any, handle: int, n: int, a: int, lda: int, pivots: int, c: int, ldc: int,
        info: int, count: int,
    ) -> None:  # fmt: skip
        """Invert matrices from LU factors; a singular one becomes NaN, as on a GPU."""
        row, left = self._pivots(pivots, count * n), self._each(dtype, a, n, lda, count)
        self._tell(
            "getri", (left, row), (self._each(dtype, c, n, ldc, count),), count * 4 * n**3 / 3,
            arithmetic=of_dtype(dtype),
        )  # fmt: skip
        on_each("lacpy", dtype, count, b"A", n, n, Pointers(a), lda, Pointers(c), ldc)
        work = np.empty(max(1, n * BLOCK), dtype)
        on_each(
            "getri", dtype, count, n, Pointers(c), ldc, Each(pivots, 4 * n), work, work.size,
            Each(info, 4),
        )  # fmt: skip
        for i in np.flatnonzero(self._vector("i4", info, count) > 0):
            # LAPACK stops before; a GPU divides by zero, and CuPy looks for NaN
            address = int(self._vector("u8", c, count)[i])
            self._matrix(dtype, address, n, n, ldc)[...] = np.nan


def _work(dtype: Any) -> int:
    """Return the operations of a multiplication and an addition: eight for complex numbers."""
    return 8 if dtype.kind == "c" else 2


def _known(kind: int) -> Any:
    if kind == 14:  # bfloat16: CuPy needs the package for it, too
        return import_module("ml_dtypes").bfloat16
    if kind not in DATA_TYPES:
        raise NotImplementedError(f"the software GPU cannot multiply cudaDataType {kind}")
    return DATA_TYPES[kind]


def _compute_type(dtype: Any) -> Any:
    """Return the dtype of arithmetic, which is float32 for float16."""
    return np.dtype("f4") if dtype.itemsize == 2 else dtype


def _norm(x: Array) -> Any:
    (norm,) = scipy_module("linalg").get_blas_funcs(("nrm2",), (x,))  # which does not overflow
    return norm(x) if x.size else 0


def _sum_of_sizes(x: Array) -> Any:
    return np.abs(x.real).sum() + (np.abs(x.imag).sum() if np.iscomplexobj(x) else 0)


def _place(find: Callable[[Array], Any], x: Array) -> int:
    """Return the position, from 1, of the first largest or smallest magnitude, as in BLAS."""
    sizes = np.abs(x.real) + (np.abs(x.imag) if np.iscomplexobj(x) else 0)
    return int(find(sizes)) + 1
