"""Batched calls of NVIDIA's libraries are one operation on the software GPU, in a loop of C."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

pytestmark = [
    needs_cupy,
    needs_compiler,
    pytest.mark.skipif(find_spec("scipy") is None, reason="no SciPy"),
]
START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "64MiB", force=True)
import cupy as cp
from cupy.cuda import device
from cupy_backends.cuda.libs import cublas, cusolver
from scipy.linalg import blas, lapack

COUNT, N = 5, 3
rng = np.random.default_rng(0)
handle, solver = device.get_cublas_handle(), device.get_cusolver_handle()
LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}

def matrices(t, rows=N, columns=N):
    "As columns: each is transposed in memory."
    made = rng.standard_normal((COUNT, columns, rows)) + 1j * rng.standard_normal(
        (COUNT, columns, rows))
    return (made if t in "FD" else made.real).astype(t).transpose(0, 2, 1)

def on_gpu(stack):
    "Two allocations, and pointers that go backwards."
    parts = [cp.asarray(np.ascontiguousarray(x.transpose(0, 2, 1))) for x in (stack[:2], stack[2:])]
    at = [p.data.ptr + i * p[0].nbytes for p in parts for i in range(len(p))]
    return parts, cp.asarray(at[::-1], "u8"), range(COUNT)[::-1]

def back(parts):
    return np.concatenate([p.get() for p in parts]).transpose(0, 2, 1)
"""


def test_factors_and_statuses_are_lapack_s_for_each_matrix(kernel_cache: Path) -> None:
    program = """
for t, letter in LETTERS.items():
    a, b = matrices(t), matrices(t, N, 2)
    a[1, :, 1] = 0
    parts, at, order = on_gpu(a)
    right, at_right, _ = on_gpu(b)
    pivots, info = cp.zeros((COUNT, N), "i4"), cp.full(COUNT, 9, "i4")
    getattr(cublas, letter + "getrfBatched")(
        handle, N, at.data.ptr, N, pivots.data.ptr, info.data.ptr, COUNT)
    host = np.full(1, 9, "i4")
    getattr(cublas, letter + "getrsBatched")(
        handle, 0, N, 2, at.data.ptr, N, pivots.data.ptr, at_right.data.ptr, N, host.ctypes.data,
        COUNT)
    inverse = cp.zeros((COUNT, N, N), t)
    at_inverse = cp.arange(COUNT, dtype="u8") * inverse[0].nbytes + inverse.data.ptr
    inverted = cp.full(COUNT, 9, "i4")
    getattr(cublas, letter + "getriBatched")(
        handle, N, at.data.ptr, N, pivots.data.ptr, at_inverse.data.ptr, N, inverted.data.ptr,
        COUNT)
    of = lambda name: getattr(lapack, letter + name)
    for place, i in enumerate(order):
        lu, row, status = of("getrf")(a[i])
        assert (back(parts)[i] == lu).all() and (pivots.get()[place] == row + 1).all()
        assert info[place] == status == (2 if i == 1 else 0) == inverted[place]
        if not status:
            assert (back(right)[i] == of("getrs")(lu, row, b[i])[0]).all()
            assert (inverse[place].get().T == of("getri")(lu, row)[0]).all()
    assert host == 0

    definite = a @ a.conj().transpose(0, 2, 1) + np.eye(N, dtype=t)
    definite[3, 2, 2] = -1
    for fill, lower in ((0, 1), (1, 0)):
        parts, at, order = on_gpu(definite)
        one, at_one, _ = on_gpu(b[:, :, :1])
        getattr(cusolver, letter + "potrfBatched")(
            solver, fill, N, at.data.ptr, N, info.data.ptr, COUNT)
        status = np.array([3 if i == 3 else 0 for i in order])
        assert (info.get() == status).all()
        getattr(cusolver, letter + "potrsBatched")(
            solver, fill, N, 1, at.data.ptr, N, at_one.data.ptr, N, info.data.ptr, COUNT)
        for i in order:
            factor, status = of("potrf")(definite[i], lower=lower, clean=0)
            assert (back(parts)[i] == factor).all()
            assert (back(one)[i] == of("potrs")(factor, b[i, :, :1], lower=lower)[0]).all()
"""
    assert run(program, kernel_cache, start=START) == ""


def test_products_and_triangular_systems_take_pointers_and_steps(kernel_cache: Path) -> None:
    program = """
def how(x, kind):
    return x if not kind else x.swapaxes(-1, -2) if kind == 1 else x.conj().swapaxes(-1, -2)

for t, letter in LETTERS.items():
    alpha, beta = np.array(2, t), np.array(-1, t)
    for ta, tb in ((0, 0), (1, 2), (2, 1)):
        a, b = matrices(t, *((N, 4) if not ta else (4, N))), matrices(t, *((4, 2), (2, 4))[tb > 0])
        c = matrices(t, N, 2)
        wanted = 2 * how(a, ta) @ how(b, tb) - c
        (on_a, at_a, _), (on_b, at_b, _), (on_c, at_c, _) = map(on_gpu, (a, b, c))
        lda, ldb = a.shape[1], b.shape[1]
        getattr(cublas, letter + "gemmBatched")(
            handle, ta, tb, N, 2, 4, alpha.ctypes.data, at_a.data.ptr, lda, at_b.data.ptr, ldb,
            beta.ctypes.data, at_c.data.ptr, N, COUNT)
        assert np.allclose(back(on_c), wanted, atol=1e-5)
        x, y, z = (cp.asarray(np.ascontiguousarray(p.transpose(0, 2, 1))) for p in (a, b, c))
        getattr(cublas, letter + "gemmStridedBatched")(
            handle, ta, tb, N, 2, 4, alpha.ctypes.data, x.data.ptr, lda, 4 * N, y.data.ptr, ldb, 8,
            beta.ctypes.data, z.data.ptr, N, 2 * N, COUNT)
        assert np.allclose(z.get().transpose(0, 2, 1), wanted, atol=1e-5)
    a, b = matrices(t) + 3 * np.eye(N, dtype=t), matrices(t, N, 2)
    for fill, op, unit in ((0, 0, 0), (1, 2, 1)):
        (_, at_a, _), (on_b, at_b, _) = keep = on_gpu(a), on_gpu(b)
        getattr(cublas, letter + "trsmBatched")(
            handle, 0, fill, op, unit, N, 2, alpha.ctypes.data, at_a.data.ptr, N, at_b.data.ptr, N,
            COUNT)
        for i in range(COUNT):
            one = getattr(blas, letter + "trsm")(
                2, a[i], b[i], lower=int(not fill), trans_a=op, diag=unit)
            assert (back(on_b)[i] == one).all()
wide = rng.standard_normal((3, 1, 4, 5)), rng.standard_normal((2, 5, 6))
assert np.allclose((cp.asarray(wide[0]) @ cp.asarray(wide[1])).get(), wide[0] @ wide[1])
half = [x.astype("f2") for x in wide]
assert np.allclose((cp.asarray(half[0]) @ cp.asarray(half[1])).get(), half[0] @ half[1], 0.02, 0.05)
"""
    assert run(program, kernel_cache, start=START) == ""


def test_values_and_vectors_of_many_matrices_are_numpy_s(kernel_cache: Path) -> None:
    program = """
for t in LETTERS:
    close = dict(rtol=1e-4, atol=1e-4) if t in "fF" else {}
    for rows, columns in ((4, 3), (3, 4), (40, 5)):
        a = np.ascontiguousarray(matrices(t, rows, columns))
        values = np.linalg.svd(a, compute_uv=False)
        for full in (True, False):
            u, s, v = (x.get() for x in cp.linalg.svd(cp.asarray(a), full))
            k = s.shape[-1]
            assert np.allclose(s, values, **close)
            assert np.allclose((u[..., :k] * s[..., None, :]) @ v[..., :k, :], a, **close)
            for q in (u, v.conj().swapaxes(-1, -2)):
                unit = q.conj().swapaxes(-1, -2) @ q
                assert np.allclose(unit, np.eye(unit.shape[-1]), atol=1e-4), unit
        assert np.allclose(cp.linalg.svd(cp.asarray(a), compute_uv=False).get(), values, **close)
    a = matrices(t, 4, 4)
    for half in "LU":
        w, v = (x.get() for x in cp.linalg.eigh(cp.asarray(np.ascontiguousarray(a)), half))
        assert np.allclose(w, np.linalg.eigvalsh(a, half), **close)
        assert np.allclose(cp.linalg.eigvalsh(cp.asarray(a.copy()), half).get(), w, **close)
        edge = (np.tril if half == "L" else np.triu)(a, -1 if half == "L" else 1)
        whole = edge + edge.conj().swapaxes(-1, -2)
        whole = whole + np.eye(4) * np.diagonal(a, 0, 1, 2).real[:, None]
        assert np.allclose(whole @ v, v * w[:, None], rtol=1e-3, atol=1e-3)
"""
    assert run(program, kernel_cache, start=START) == ""


def test_a_batch_is_one_operation_and_looks_at_memory_as_often_whatever_its_size(
    kernel_cache: Path,
) -> None:
    program = """
def cost(count, name):
    a = cp.asarray(rng.standard_normal((count, N, N)) + 4 * np.eye(N))
    a = a @ a.transpose(0, 2, 1).copy()
    b = cp.ones((count, N, 2))
    call = {
        "matmul": lambda: a @ b, "broadcast": lambda: a[:1] @ b,
        "solve": lambda: cp.linalg.solve(a, b), "inv": lambda: cp.linalg.inv(a),
        "det": lambda: cp.linalg.det(a), "cholesky": lambda: cp.linalg.cholesky(a),
        "svd": lambda: cp.linalg.svd(a), "eigh": lambda: cp.linalg.eigh(a),
    }[name]
    looks, view = [], gpu._runtime.view
    gpu._runtime.view = lambda *given: looks.append(1) or view(*given)
    with umem.record() as recording:
        call()
    gpu._runtime.view = view
    names = [op.name for op in recording.trace.ops if "cupy" not in op.name]
    return len(looks), [x for x in names if x in LIBRARY]

LIBRARY = ("gemm", "getrf", "getrs", "getri", "potrf", "gesvd", "syevd")
for name in ("matmul", "broadcast", "solve", "inv", "det", "cholesky", "svd", "eigh"):
    few, many = cost(8, name), cost(64, name)
    print(name, *many[1])
    assert few == many, (name, few, many)
"""
    assert run(program, kernel_cache, start=START) == (
        "matmul gemm\nbroadcast gemm\nsolve getrf getrs\ninv getrf getri\ndet getrf\n"
        "cholesky potrf\nsvd gesvd\neigh syevd\n"
    )
