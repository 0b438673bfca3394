"""Every function that Chainer exports, forward and backward, in every precision it takes.

In float64 the gradient must agree with central differences of the forward pass along a random
direction. In float16, float32 and mixed16 the outputs and gradients must agree with float64. Inputs
are distinct multiples of 1/1024, exact in float16, so kinks and ties are far from every step.

The whole matrix says of a new NumPy, Python or CuPy whether Chainer is right on it: it is `slow`.
A sample of it is not: what umem mends, and what most models are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from chainer_function_cases import CASES, SINGLE, Case, F

from tests.compat.test_shims import chainer

pytestmark = pytest.mark.thorough

SAMPLE = set(
    "add as_strided batch_normalization black_out connectionist_temporal_classification "
    "convolution_2d deconvolution_2d det einsum embed_id fix layer_normalization max_pooling_2d "
    "n_step_lstm negative_sampling pad_sequence resize_images softmax_cross_entropy sparse_matmul "
    "spatial_transformer_sampler".split()
)
TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "mixed16": 2e-2}
FLAT = ("ceil", "floor", "fix", "sign")  # right, and zero everywhere
slow = pytest.mark.slow
DTYPES = ["float16", "float32", pytest.param("mixed16", marks=slow)]
deprecated = pytest.mark.filterwarnings("ignore:.* is deprecated. Use:DeprecationWarning")


def slow_but(sample: set[str], names: Iterable[str]) -> list[Any]:
    """Return what a test is parametrized with: all that is not in the sample is slow."""
    return [name if name in sample else pytest.param(name, marks=slow) for name in names]


def arrays_for(case: Case) -> list[np.ndarray]:
    """Return float64 inputs: distinct values in random order, exact in float16."""
    sizes = [int(np.prod(shape)) for shape in case.shapes]
    grid = np.round(np.linspace(case.low, case.high, sum(sizes)) * 1024) / 1024
    values = np.random.RandomState(1).permutation(grid.astype("float16").astype(float))
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, case.shapes, strict=True)]


def flatten(outputs: Any) -> list[Any]:
    """Return the float variables in a nesting of tuples and lists."""
    if isinstance(outputs, (tuple, list)):
        return [variable for item in outputs for variable in flatten(item)]
    if not isinstance(outputs, chainer.Variable) or outputs.dtype.kind != "f":
        return []
    return [outputs]


def forward(case: Case, arrays: Sequence[np.ndarray]) -> tuple[list[Any], list[Any]]:
    """Return inputs and float outputs; random functions draw the same numbers each time."""
    np.random.seed(0)
    xs = [chainer.Variable(array.copy()) for array in arrays]
    return xs, flatten(case.run(*xs))


def weights_for(ys: Sequence[Any]) -> list[np.ndarray]:
    rng = np.random.RandomState(2)
    return [np.asarray(rng.uniform(0.25, 1, y.shape)).astype("float16") for y in ys]


def gradients(
    case: Case, arrays: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return outputs and the gradients of their weighted sum."""
    xs, ys = forward(case, arrays)
    for y, weight in zip(ys, weights_for(ys), strict=True):
        y.grad = weight.astype(y.dtype)
    chainer.backward(ys)
    zeros = (np.zeros(x.shape, x.dtype) if x.grad is None else x.grad for x in xs)
    return [y.array for y in ys], list(zeros)


def loss(case: Case, arrays: Sequence[np.ndarray]) -> float:
    _, ys = forward(case, arrays)
    return float(sum((y.array * w).sum() for y, w in zip(ys, weights_for(ys), strict=True)))


def central_difference(
    case: Case, arrays: Sequence[np.ndarray], direction: Sequence[np.ndarray], step: float
) -> float:
    ahead = [a + step * d for a, d in zip(arrays, direction, strict=True)]
    behind = [a - step * d for a, d in zip(arrays, direction, strict=True)]
    return (loss(case, ahead) - loss(case, behind)) / (2 * step)


def cast(case: Case, arrays: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
    if dtype != "mixed16":
        return [array.astype(dtype) for array in arrays]
    kinds = ["float32" if i in case.parameters else "float16" for i in range(len(arrays))]
    return [array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)]


def assert_gradient_is_right(case: Case) -> None:
    """Compare the gradient in the widest dtype with a difference along a random direction."""
    single = "float64" not in case.only
    arrays = [a.astype("float32" if single else "float64") for a in arrays_for(case)]
    _, grads = gradients(case, arrays)
    rng = np.random.RandomState(3)
    direction = [rng.uniform(-1, 1, array.shape).astype(array.dtype) for array in arrays]
    expected = central_difference(case, arrays, direction, 2.0**-11 if single else 1e-6)
    got = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
    scale = sum(float(abs(g * d).sum()) for g, d in zip(grads, direction, strict=True))
    assert abs(got - expected) <= (1e-2 if single else 1e-5) * scale + 1e-7, (got, expected)
    assert scale > 0


def assert_agrees_with_float64(case: Case, dtype: str) -> None:
    """Compare outputs and gradients in a narrower dtype with those in float64."""
    arrays = arrays_for(case)
    wide, narrow = cast(case, arrays, "float64"), cast(case, arrays, dtype)
    if case.gradient:
        expected, got = gradients(case, wide), gradients(case, narrow)
        assert [g.dtype for g in got[1]] == [a.dtype for a in narrow]
    else:
        expected, got = (([y.array for y in forward(case, a)[1]], []) for a in (wide, narrow))
    tolerance = TOLERANCE[dtype] * (1 if dtype == "float32" else case.tolerance)
    for kind, a, b in zip(("output", "gradient"), got, expected, strict=True):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            bound = tolerance * max(float(abs(y).max(initial=0)), 1e-2)
            error = float(abs(x.astype(float) - y).max(initial=0))
            assert error <= bound, f"{kind} {number}: off by {error}, {bound} allowed"


def exported() -> list[str]:
    """Return the names of the functions that ``chainer.functions`` exports."""
    return [
        name
        for name, value in vars(F).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def test_every_function_has_a_case():
    assert sorted(set(exported()) - set(CASES)) == []
    assert sorted(set(CASES) - set(exported())) == []


@deprecated
@pytest.mark.parametrize(
    "name", slow_but(SAMPLE, (n for n, case in CASES.items() if case.gradient))
)
def test_gradient_agrees_with_central_differences(name):
    case = CASES[name]
    if name in FLAT:
        assert not any(g.any() for g in gradients(case, arrays_for(case))[1])
    else:
        assert_gradient_is_right(case)


@deprecated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", slow_but(SAMPLE, CASES))
def test_narrow_dtypes_agree_with_float64(name, dtype):
    case = CASES[name]
    if case.only == SINGLE and dtype == "float32":
        return  # held against central differences, and there is no wider dtype to compare with
    with chainer.using_config("dtype", chainer.mixed16 if dtype == "mixed16" else np.dtype(dtype)):
        if dtype in case.only:
            assert_agrees_with_float64(case, dtype)
        else:
            with pytest.raises((chainer.utils.type_check.InvalidType, TypeError)):
                forward(case, cast(case, arrays_for(case), dtype))
