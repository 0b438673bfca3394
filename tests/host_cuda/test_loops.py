"""Kernels of the software GPU give NumPy's numbers, however arrays lie; loops for CuPy's templates.

Each program runs in a process of its own, with compiled kernels shared by the session.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from software_programs import needs_compiler, needs_software_gpu, run

from umem.host_cuda.kernels import HEADERS, for_host
from umem.host_cuda.toolchain import Toolchain

LARGE = "import numpy as np, umem\ngpu = umem.software_gpu('v100-32gb')\nimport cupy as cp\n"
ELEMENTWISE = """\
#include <cupy/carray.cuh>
extern "C" __global__ void f(const CArray<float, 2, 0, 1> _raw_x, CArray<float, 2, 1, 1> _raw_y, \
CIndexer<2, 1> _ind) {
  ;
  CUPY_FOR(i, _ind.size()) {
    _ind.set(i);
    const float x(_raw_x[_ind.get()]);
    %s
    _raw_y[_ind.get()] = x;
  }
}
"""


# -- text ----------------------------------------------------------------------------------------


def test_elements_go_along_rows_without_divisions() -> None:
    text = for_host(ELEMENTWISE % "").text
    assert "_ind.set" not in text and "umem_at(_raw_x, _row, i - _row.start, i)" in text
    assert "UMEM_KERNEL(f, 3, f)" in text


def test_an_index_that_is_used_otherwise_is_kept() -> None:
    assert "_ind.set(i);" in for_host(ELEMENTWISE % "ptrdiff_t j = _ind.get()[0];").text


def test_a_thread_that_ends_leaves_the_others() -> None:
    assert "[&]" in for_host(ELEMENTWISE % "if (x > 0) return;").text
    assert "[&]" not in for_host(ELEMENTWISE % "").text


def test_an_array_of_an_element_s_own_keeps_elements_in_order() -> None:
    assert "#undef UMEM_ANY_ORDER" in for_host(ELEMENTWISE % "float v[3]; v[i % 3] = x;").text
    assert "#undef UMEM_ANY_ORDER" not in for_host(ELEMENTWISE % "").text


def test_a_loop_of_a_person_s_own_kernel_runs_thread_by_thread() -> None:
    source = '#include <cupy/carray.cuh>\nextern "C" __global__ void g(float* y) {\n'
    text = for_host(source + "  CUPY_FOR(i, 9) { y[i] = threadIdx.x; }\n}").text
    assert "UMEM_KERNEL(g, 1, g)" in text


# -- functions of one float ------------------------------------------------------------------------


@needs_compiler
def test_exp_log_and_tanh_are_within_two_units_in_the_last_place(tmp_path: Path) -> None:
    names = ("exp", "log", "tanh")
    source = f'#include "{HEADERS}/umem_cuda.h"\n' + "".join(
        f'extern "C" void many_{name}(const float* x, float* y, long n) '
        f"{{ for (long i = 0; i < n; i++) y[i] = {name}(x[i]); }}\n"
        f'extern "C" float one_{name}(float x) {{ return {name}(x); }}\n'
        for name in names
    )
    library = ctypes.CDLL(str(Toolchain(tmp_path).shared_object(source, "c++")))
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint64)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, 1e-45, -1e-45, 88.7228, -103.9], "f4")
    near = np.linspace(-1.5, 1.5, 1 << 18, dtype="f4")
    x = np.concatenate([bits.astype("u4").view("f4"), special, near, near * 60])
    for name in names:
        y = np.empty_like(x)
        given = (ctypes.c_void_p(a.ctypes.data) for a in (x, y))
        getattr(library, f"many_{name}")(*given, ctypes.c_long(len(x)))
        with np.errstate(all="ignore"):
            exact = getattr(np, name)(x.astype("f8"))
            rounded = exact.astype("f4")
            unit = np.spacing(np.maximum(np.abs(rounded), np.finfo("f4").tiny)).astype("f8")
        finite = np.isfinite(rounded)
        assert np.array_equal(np.isnan(y), np.isnan(exact)), name
        assert np.array_equal(y[~finite & ~np.isnan(exact)], rounded[~finite & ~np.isnan(exact)])
        assert (np.abs(y[finite] - exact[finite]) / unit[finite]).max() < 2, name
        one = getattr(library, f"one_{name}")
        one.restype, one.argtypes = ctypes.c_float, [ctypes.c_float]
        found = np.array([one(value) for value in x[-5000:]], "f4")
        assert np.array_equal(found, y[-5000:], equal_nan=True), name  # alone as among others


# -- the real CuPy ---------------------------------------------------------------------------------


@needs_software_gpu
class TestCupy:
    def test_arrays_that_lie_in_any_way_give_what_numpy_gives(self, kernel_cache: Path) -> None:
        program = """
from itertools import permutations
rng = np.random.default_rng(0)
for shape in ((), (1,), (0, 5), (31, 33), (64, 70), (100, 1), (2, 40, 65), (3, 9, 2, 5)):
    a = rng.standard_normal(shape).astype("f4")
    x = cp.asarray(a)
    for order in permutations(range(a.ndim)):
        b, y = a.transpose(order), x.transpose(order)
        assert np.array_equal(cp.asnumpy(y.copy(order="C")), b), (shape, order)
        z = cp.asarray(b.copy())
        assert np.array_equal(cp.asnumpy(y + z), b + b), (shape, order)
        if a.ndim > 1:
            got = y[::-1] * z[..., :1]
            assert np.array_equal(cp.asnumpy(got), b[::-1] * b[..., :1]), (shape, order)
            assert np.array_equal(cp.asnumpy(y[:, ::-2].copy()), b[:, ::-2]), (shape, order)
    x += x  # the same place read and written
    assert np.array_equal(cp.asnumpy(x), a + a), shape
print("same")
"""
        assert run(program, kernel_cache, start=LARGE) == "same\n"

    def test_reductions_over_any_axes_give_what_numpy_gives(self, kernel_cache: Path) -> None:
        program = """
rng = np.random.default_rng(0)
for shape in ((1,), (1000, 3), (700, 600), (40, 5, 30), (7, 0)):
    a = rng.integers(-99, 99, shape).astype("f4")  # sums are exact in any order
    for b, x in ((a, cp.asarray(a)), (a.T, cp.asarray(a).T), (a[::-1], cp.asarray(a)[::-1])):
        for axis in (None, *range(a.ndim), tuple(range(a.ndim))[::2]):
            assert np.array_equal(cp.asnumpy(x.sum(axis=axis)), b.sum(axis=axis)), (shape, axis)
            if not a.size:
                continue
            for name in ("max", "argmin"):
                if name.startswith("arg") and isinstance(axis, tuple):
                    continue
                ours, theirs = getattr(x, name)(axis=axis), getattr(b, name)(axis=axis)
                assert np.array_equal(cp.asnumpy(ours), theirs), (shape, name, axis)
a = rng.standard_normal((300, 400)).astype("f4")
a[7, 9] = np.nan
x = cp.asarray(a)
for axis in (None, 0, 1):
    for name in ("min", "argmax", "sum", "var"):
        ours, theirs = cp.asnumpy(getattr(x, name)(axis=axis)), getattr(a, name)(axis=axis)
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-3, equal_nan=True), (name, axis)
for kind in ("?", "u8", "f2", "c8"):
    b = rng.integers(0, 3, (50, 60)).astype(kind)
    for axis in (None, 0, 1):
        assert np.array_equal(cp.asnumpy(cp.asarray(b).sum(axis=axis)), b.sum(axis=axis)), kind
print("same")
"""
        assert run(program, kernel_cache, start=LARGE) == "same\n"

    def test_gathers_scans_and_masks_give_what_numpy_gives(self, kernel_cache: Path) -> None:
        program = """
rng = np.random.default_rng(0)
for shape in ((7,), (1500,), (3, 4, 5), (600, 103)):
    a = rng.integers(-9, 9, shape).astype("f4")
    x, mask = cp.asarray(a), a > 1
    assert np.array_equal(cp.asnumpy(cp.cumsum(x)), np.cumsum(a)), shape
    assert np.array_equal(cp.asnumpy(x[cp.asarray(mask)]), a[mask]), shape
    for ours, theirs in zip(cp.nonzero(x > 1), np.nonzero(mask), strict=True):
        assert np.array_equal(cp.asnumpy(ours), theirs), shape
    for axis in range(a.ndim):
        n = a.shape[axis]
        for at in (np.array(0), np.zeros(0, "i8"), rng.integers(-3 * n, 3 * n, (3, 4)),
                   rng.integers(0, n, 9).astype("i4")):
            ours = x.take(cp.asarray(at), axis=axis)
            assert np.array_equal(cp.asnumpy(ours), a.take(at, axis=axis, mode="wrap")), shape
    at = rng.integers(0, a.size, (4, 3))
    assert np.array_equal(cp.asnumpy(x.take(cp.asarray(at))), a.take(at))
small = np.array([2, 3, 0.5, -1], "f4")
assert np.array_equal(cp.asnumpy(cp.cumprod(cp.asarray(small))), np.cumprod(small))
print("same")
"""
        assert run(program, kernel_cache, start=LARGE) == "same\n"

    def test_atomics_keep_what_many_elements_add_to_one_place(self, kernel_cache: Path) -> None:
        program = """
import cupyx
for kind in ("i4", "u4", "i8", "u8", "f2", "f4", "f8"):
    if kind == "i8" and cp.__version__.startswith("13."):
        continue  # CuPy 13 refuses it
    x = cp.zeros(3, kind)
    cupyx.scatter_add(x, cp.asarray(np.arange(600) % 2), 1)
    assert x.tolist() == [300, 300, 0], (kind, x)
print("same")
"""
        assert run(program, kernel_cache, start=LARGE) == "same\n"
