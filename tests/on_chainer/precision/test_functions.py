"""Every function that Chainer exports, on halves in half precision, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.links as L
from chainer_function_cases import CASES

from tests.compat.functions.test_functions import SAMPLE, arrays_for, flatten, weights_for

pytestmark = pytest.mark.thorough
TOLERANCE = 4e-3
"""Of the largest number; four roundings to halves."""
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def half() -> Iterator[Any]:
    """Half precision is on, for a model that is not asked."""
    model = L.Linear(1, 1)
    with umem.chainer.half_precision(model, chainer.optimizers.SGD().setup(model), scale=8) as half:
        yield half


def outputs_and_gradients(case: Any, arrays: Any, scale: float) -> tuple[list[Any], list[Any]]:
    np.random.seed(0)
    xs = [chainer.Variable(array.copy()) for array in arrays]
    ys = flatten(case.run(*xs))
    if case.gradient:
        for y, weight in zip(ys, weights_for(ys), strict=True):
            y.grad = weight.astype(y.dtype)
        chainer.backward(ys)
    zeros = [np.zeros(x.shape) if x.grad is None else x.grad.astype(float) / scale for x in xs]
    return [y.array for y in ys], zeros


@pytest.mark.filterwarnings("ignore:.* is deprecated. Use:DeprecationWarning")
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=slow) for n in CASES])
def test_a_function_of_halves_agrees_with_float64(name: str, half: Any) -> None:
    case = CASES[name]
    wide = [a.astype("f" if "float64" not in case.only else "d") for a in arrays_for(case)]
    narrow = [
        a.astype("f" if place in case.parameters else "e")
        for place, a in enumerate(arrays_for(case))
    ]
    got = outputs_and_gradients(case, narrow, half.scale)
    half.undo()
    expected = outputs_and_gradients(case, wide, 1.0)
    for kind, a, b in zip(("output", "gradient"), got, expected, strict=True):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            bound = case.tolerance * TOLERANCE * max(float(abs(y).max(initial=0)), 1e-2)
            error = float(abs(x.astype(float) - y).max(initial=0))
            assert error <= bound, f"{kind} {number}: off by {error}, {bound} allowed"
