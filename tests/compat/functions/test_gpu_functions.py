"""Chainer's functions and links on CuPy, held against NumPy, forward and backward.

The cases are those of test_functions.py and test_links.py; what a precision may be
off by is said there too. CuPy draws NumPy's random numbers here, so that masks are the same.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import chainer_function_cases
import numpy as np
import pytest

from tests.compat.functions import test_functions as functions
from tests.compat.functions import test_links as links
from tests.compat.test_shims import chainer

pytestmark = pytest.mark.gpu
DRAWN = "binomial gumbel normal permutation rand randint randn standard_normal uniform".split()
DTYPES = ("float32", "float16")


@pytest.fixture(scope="module")
def cupy() -> Any:
    assert chainer.backends.cuda.available
    return importlib.import_module("cupy")


@pytest.fixture
def constants_on_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays that a case makes for itself are CuPy's, and so is what it draws, by NumPy."""
    monkeypatch.setattr(chainer_function_cases, "np", cupy)
    monkeypatch.setattr(chainer_function_cases, "TIED", cupy.asarray(chainer_function_cases.TIED))
    monkeypatch.setattr(links, "LABELS", cupy.asarray(links.LABELS))
    for name in DRAWN:
        monkeypatch.setattr(cupy.random, name, drawn(cupy, name))


def drawn(cupy: Any, name: str) -> Any:
    def draw(*given: Any, dtype: Any = None, **more: Any) -> Any:
        return cupy.asarray(getattr(np.random, name)(*given, **more), dtype=dtype)

    return draw


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Some functions are deprecated, and say so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is deprecated. Use", DeprecationWarning)
        yield


def computed(variables: Sequence[Any], ys: Sequence[Any], *, backward: bool) -> list[np.ndarray]:
    """Return the outputs, and the gradients of their weighted sum, on the host."""
    if backward:
        for y, weight in zip(ys, functions.weights_for(ys), strict=True):
            y.grad = y.xp.asarray(weight.astype(y.dtype))
        chainer.backward(ys)
    grads = [x.grad for x in variables if x.grad is not None] if backward else []
    return [chainer.backends.cuda.to_cpu(found) for found in [*(y.array for y in ys), *grads]]


def function_on(device: str, name: str, dtype: str) -> list[np.ndarray]:
    case = chainer_function_cases.CASES[name]
    xs = [chainer.Variable(array.astype(dtype)) for array in functions.arrays_for(case)]
    for x in xs:
        x.to_device(device)
    np.random.seed(0)
    with chainer.using_config("dtype", np.dtype(dtype)):
        return computed(xs, functions.flatten(case.run(*xs)), backward=case.gradient)


def link_on(device: str, name: str, dtype: str) -> list[np.ndarray]:
    case = links.CASES[name]
    arrays = links.arrays_for(case)
    with links.config(dtype):
        link, parameters = links.made(case)
        count = len(case.shapes)
        for parameter, array in zip(parameters, arrays[count:], strict=True):
            parameter.array[...] = array
        xs = [chainer.Variable(array.astype(dtype)) for array in arrays[:count]]
        link.to_device(device)
        for x in xs:
            x.to_device(device)
        np.random.seed(0)
        ys = functions.flatten(case.call(link, *xs))
        return computed([*xs, *parameters], ys, backward=True)


def assert_agrees(got: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), number
        bound = tolerance * max(float(abs(other.astype(float)).max(initial=0)), 1e-2)
        error = float(abs(one.astype(float) - other).max(initial=0))
        assert error <= bound, f"array {number}: off by {error}, {bound} allowed"


def of(cases: dict[str, Any]) -> list[Any]:
    """Return cases: all in single precision, in half precision each ninth, and others if slow."""
    return [
        pytest.param(
            name, dtype, marks=[pytest.mark.slow] * (dtype == "float16" and number % 9 > 0)
        )
        for number, (name, case) in enumerate(cases.items())
        for dtype in DTYPES
        if dtype in case.only
    ]


@pytest.mark.parametrize(("name", "dtype"), of(chainer_function_cases.CASES))
def test_a_function_agrees_with_numpy(name, dtype, request):
    expected = function_on("@numpy", name, dtype)
    request.getfixturevalue("constants_on_gpu")
    case = chainer_function_cases.CASES[name]
    tolerance = functions.TOLERANCE[dtype] * (1 if dtype == "float32" else case.tolerance)
    assert_agrees(function_on("@cupy:0", name, dtype), expected, tolerance)


@pytest.mark.parametrize(("name", "dtype"), of(links.CASES))
def test_a_link_on_cupy_agrees_with_numpy(name, dtype, request):
    expected = link_on("@numpy", name, dtype)
    request.getfixturevalue("constants_on_gpu")
    case = links.CASES[name]
    tolerance = functions.TOLERANCE[dtype] * (1 if dtype == "float32" else case.tolerance)
    assert_agrees(link_on("@cupy:0", name, dtype), expected, tolerance)
