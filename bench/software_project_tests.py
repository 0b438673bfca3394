"""The tests of a small CuPy project; bench/software_project.py runs them."""

from __future__ import annotations

import subprocess
import sys

import cupy as cp
import cupyx
import cupyx.scipy.sparse as sparse
import numpy as np
import pytest
from cupyx import jit

SQUARE = cp.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "square_of_difference")
NORM = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
REVERSE = r"""
extern "C" __global__ void reverse(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}"""
HISTOGRAM = r"""
template <typename T> __global__ void histogram(const T* x, int* counts, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&counts[int(x[i])], 1);
}"""


def numbers(*shape: int) -> cp.ndarray:
    return cp.asarray(np.random.default_rng(0).standard_normal(shape))


def test_elementwise_expressions_broadcast() -> None:
    x = cp.arange(12, dtype="f4").reshape(3, 4)
    y = cp.where(x > 5, cp.exp(-x), x / 3)
    expected = np.where(x.get() > 5, np.exp(-x.get()), x.get() / np.float32(3))
    np.testing.assert_allclose(y.get(), expected, rtol=1e-5)


def test_reductions_along_axes() -> None:
    x = numbers(5, 7, 3)
    for axis in (None, 0, (1, 2)):
        np.testing.assert_allclose(x.mean(axis).get(), x.get().mean(axis), rtol=1e-10)
    assert int(x.argmax()) == int(x.get().argmax())


def test_an_elementwise_kernel() -> None:
    x, y = numbers(8), cp.ones(8)
    np.testing.assert_allclose(SQUARE(x, y).get(), (x.get() - 1) ** 2)


def test_a_reduction_kernel() -> None:
    x = numbers(100)
    np.testing.assert_allclose(float(NORM(x)), np.linalg.norm(x.get()))


def test_a_raw_kernel_with_a_barrier() -> None:
    x = cp.arange(64, dtype="f4")
    cp.RawKernel(REVERSE, "reverse")((1,), (64,), (x,))
    assert x.tolist() == [float(i) for i in reversed(range(64))]


def test_a_raw_module_of_templates() -> None:
    module = cp.RawModule(
        code=HISTOGRAM, options=("-std=c++11",), name_expressions=["histogram<float>"]
    )
    x, counts = (cp.arange(100) % 10).astype("f4"), cp.zeros(10, "i4")
    module.get_function("histogram<float>")((4,), (32,), (x, counts, 100))
    assert counts.tolist() == [10] * 10


@pytest.mark.filterwarnings("ignore:cupyx.jit.rawkernel is experimental")
def test_a_kernel_in_python() -> None:
    @jit.rawkernel()
    def twice(x, y, size):  # type: ignore[no-untyped-def]
        start = jit.blockIdx.x * jit.blockDim.x + jit.threadIdx.x
        for i in range(start, size, jit.gridDim.x * jit.blockDim.x):
            y[i] = x[i] * 2

    x, y = cp.arange(100, dtype="f4"), cp.zeros(100, "f4")
    twice((2,), (32,), (x, y, cp.uint32(100)))
    assert (y == 2 * x).all()


def test_fused_functions() -> None:
    @cp.fuse(kernel_name="length")
    def length(x, y):  # type: ignore[no-untyped-def]
        return cp.sqrt(x * x + y * y)

    assert length(cp.full(3, 3.0), cp.full(3, 4.0)).tolist() == [5.0] * 3


def test_transforms_there_and_back() -> None:
    x = numbers(4, 32)
    np.testing.assert_allclose(cp.fft.irfft(cp.fft.rfft(x), 32).get(), x.get(), atol=1e-12)
    np.testing.assert_allclose(cp.fft.fft2(x).get(), np.fft.fft2(x.get()), atol=1e-10)


def test_sparse_products() -> None:
    dense = cp.where(numbers(20, 20) > 1, 1.0, 0.0)
    matrix, vector = sparse.csr_matrix(dense), numbers(20)
    np.testing.assert_allclose((matrix @ vector).get(), dense.get() @ vector.get(), atol=1e-12)
    assert (matrix @ matrix.T).shape == (20, 20)


def test_linear_algebra() -> None:
    a, b = numbers(6, 6) + 6 * cp.eye(6), numbers(6)
    np.testing.assert_allclose((a @ cp.linalg.solve(a, b)).get(), b.get(), atol=1e-10)
    u, s, vt = cp.linalg.svd(a)
    np.testing.assert_allclose(((u * s) @ vt).get(), a.get(), atol=1e-10)


def test_streams_and_events() -> None:
    stream, event = cp.cuda.Stream(non_blocking=True), cp.cuda.Event()
    with stream:
        x = cp.full(1000, 2.0)
        event.record()
    other = cp.cuda.Stream(non_blocking=True)
    other.wait_event(event)
    with other:
        y = x * 3
    other.synchronize()
    assert float(y.sum()) == 6000


def test_random_numbers_are_sorted_and_gathered() -> None:
    x = cp.random.default_rng(0).random(1000)
    order = cp.argsort(x)
    assert bool((cp.diff(x[order]) >= 0).all()) and x[x > 0.5].size > 300


def test_memory_is_full() -> None:
    with pytest.raises(cp.cuda.memory.OutOfMemoryError):
        cp.empty(1 << 40, "u1")
    cupyx.empty_pinned(16, "f4")[:] = 1
    assert float(cp.ones(3).sum()) == 3


def test_a_child_has_the_gpu() -> None:
    program = "import cupy; print(int(cupy.arange(4).sum()))"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"6\n"
