"""Simulated times of CuPy's products by their types, on the software GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_compiler, needs_cupy]
START = """
import numpy as np
import umem
gpu = umem.software_gpu("{}", "256MiB", force=True)
import cupy as cp

def seconds(f, *given):
    before = gpu.figures.compute_seconds
    f(*given)
    return gpu.figures.compute_seconds - before

def ones(t, *shape):
    return cp.asarray(np.ones(shape), t)
"""
PRODUCTS = """
for shape in ((1024, 1024), (5, 256, 256)):
    times = {t: seconds(cp.matmul, ones(t, *shape), ones(t, *shape)) for t in ("f2", "f4", "f8")}
    print(*(times["f4"] / times[t] for t in ("f2", "f8")))
"""


def ratios(program: str, gpu: str, cache: Path) -> list[float]:
    found = run(program, cache, start=START.format(gpu))
    return [float(word) for word in found.split()]


def test_half_goes_by_tensor_cores_and_double_by_its_own_rate(kernel_cache: Path) -> None:
    """Stacks of float16 matrices are cast to float32 by CuPy 14.2, which takes time of its own."""
    half, double = (0.66 * 65) / (0.6 * 8.1), 1 / 32
    found = ratios(PRODUCTS, "t4", kernel_cache)
    assert [found[1], found[3]] == pytest.approx([double, double])
    assert found[0] == pytest.approx(half, rel=0.01) and found[2] < 1


def test_half_has_no_rate_of_its_own_without_tensor_cores(kernel_cache: Path) -> None:
    found = ratios(PRODUCTS, "p100-16gb", kernel_cache)
    double = 4.7 / 9.3
    assert found[0] == pytest.approx(1) and 0.5 < found[2] <= 1
    assert found[1] == pytest.approx(double) and found[3] == pytest.approx(double)


TF32 = """
from cupy.cuda import cublas, device
from cupy._core import _routines_linalg as linalg
a = ones("f4", 768, 768)
plain = seconds(cp.matmul, a, a)
linalg.set_compute_type("f4", linalg.COMPUTE_TYPE_TF32)
print(plain / seconds(cp.matmul, a, a))
linalg.set_compute_type("f4", linalg.COMPUTE_TYPE_PEDANTIC)
print(plain / seconds(cp.matmul, a, a))
linalg.set_compute_type("f4", linalg.COMPUTE_TYPE_DEFAULT)
handle = device.get_cublas_handle()
cublas.setMathMode(handle, 3)  # CUBLAS_TF32_TENSOR_OP_MATH
print(plain / seconds(cp.matmul, a, a))
cublas.setMathMode(handle, cublas.CUBLAS_DEFAULT_MATH)
print(plain / seconds(cp.matmul, a, a))
"""


def test_float32_goes_by_tf32_where_cupy_is_told_to(kernel_cache: Path) -> None:
    faster = (0.66 * 156) / (0.6 * 19.5)
    assert ratios(TF32, "a100-40gb", kernel_cache) == pytest.approx([faster, 1, faster, 1])


def test_the_environment_tells_cupy_to_use_tf32(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_TF32", "1")
    program = 'a = ones("f4", 768, 768)\nprint(seconds(cp.matmul, a, a))'
    found = ratios(program, "a100-40gb", kernel_cache)
    assert found == pytest.approx([2 * 768**3 / (0.66 * 156e12)])


def test_a_recording_has_the_arithmetic_of_products(kernel_cache: Path) -> None:
    program = """
import warnings
warnings.simplefilter("ignore")  # Chainer's, of cuDNN
import umem.chainer
import chainer
with umem.record() as recorder:
    ones("f2", 64, 64) @ ones("f2", 64, 64)
    ones("f4", 64, 64) @ ones("f4", 64, 64)
    ones("f8", 64, 64) + 1
    chainer.functions.linear(ones("f2", 4, 64), ones("f2", 8, 64))
    chainer.functions.relu(ones("f2", 4, 64))
for op in recorder.trace.ops:
    if op.name in ("gemm", "add", "LinearFunction", "ReLU"):
        print(op.name, op.arithmetic.replace(" ", "_"))
"""
    found = run(program, kernel_cache, start=START.format("t4")).split()
    assert found == [
        "gemm", "float16_product", "gemm", "float32", "add", "float32", "LinearFunction",
        "float16_product", "ReLU", "float32",
    ]  # fmt: skip
