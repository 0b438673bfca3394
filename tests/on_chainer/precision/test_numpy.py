"""Arithmetic of halves on NumPy: functions and checks, beside float32 or float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.finite import all_finite, is_finite
from umem.chainer.precision import floats

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


@pytest.fixture
def half() -> Iterator[Any]:
    """Half precision is on, for a model that is not asked."""
    model = L.Linear(1, 1)
    with umem.chainer.half_precision(model, chainer.optimizers.SGD().setup(model), scale=1) as half:
        yield half


@pytest.mark.parametrize(
    "shape", [(3, 4, 5), (1, 1, 1), (2100, 700, 3), (5, 2300, 1030), (4, 0, 3)]
)
def test_products_are_those_of_float64_rounded_once(shape: tuple[int, int, int], half: Any) -> None:
    m, k, n = shape
    rng = np.random.RandomState(0)
    a, b, bias = (rng.randn(*s).astype("e") for s in ((k, m), (k, n), (n,)))
    y = F.linear(a.T, b.T, bias).array
    exact = a.T.astype(float) @ b.astype(float) + bias
    assert y.dtype == np.float16 and y.flags.c_contiguous
    np.testing.assert_allclose(y, exact, rtol=2.0**-10, atol=1e-4 * np.sqrt(max(k, 1)))


def test_a_rectifier_and_its_gradient_are_exact(half: Any) -> None:
    with np.errstate(all="ignore"):
        expected = np.maximum(HALVES.astype("f"), 0).astype("e")
        chosen = np.where(HALVES.astype("f") > 0, np.float16(2.5), np.float16(0))
    x = chainer.Variable(HALVES)
    y = F.relu(x)
    assert ((y.array == expected) | (np.isnan(y.array) & np.isnan(expected))).all()
    y.grad = np.full(HALVES.shape, 2.5, "e")
    y.backward()
    is_number = ~np.isnan(HALVES)
    assert np.array_equal(x.grad[is_number], chosen[is_number])


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_is_found_anywhere(dtype: str, bad: float) -> None:
    arrays = [
        np.ones(0, dtype),
        np.full(70_000, np.finfo(dtype).max, dtype),
        np.ones((3, 4), dtype),
    ]
    assert all_finite(arrays) and all_finite([])
    for array in arrays[1:]:
        for place in (0, array.size // 2, array.size - 1):
            before, array.flat[place] = array.flat[place], bad
            assert not all_finite(arrays)
            assert not is_finite(array)
            array.flat[place] = before


def test_layer_normalisation_goes_backward_as_in_float64() -> None:
    rng = np.random.RandomState(0)
    x, gy = rng.randn(50, 33).astype("e"), rng.randn(50, 33).astype("e")
    gamma = rng.randn(33).astype("f")
    found = floats.layer_norm_back(x, gamma, gy, 1e-5)
    wide = [chainer.Variable(a.astype(float)) for a in (x, gamma, np.zeros(33))]
    y = F.layer_normalization(*wide, eps=1e-5)
    y.grad = gy.astype(float)
    y.backward()
    for got, variable in zip(found, wide, strict=True):
        bound = 2e-3 * np.abs(variable.grad).max()
        np.testing.assert_allclose(got, variable.grad, rtol=0, atol=bound)


def test_gradients_of_many_functions_are_near_those_of_float32() -> None:
    rng = np.random.RandomState(0)
    x = rng.randn(40, 3, 8, 8).astype("e")

    def run(dtype: str) -> list[Any]:
        np.random.seed(1)
        model = chainer.Sequential(
            L.Convolution2D(3, 4, 3, groups=1), F.relu, L.Convolution2D(4, 4, 3, groups=2), F.tanh,
            L.Deconvolution2D(4, 2, 3), F.sigmoid,
            lambda h: F.average_pooling_2d(h, 2) + F.max_pooling_2d(h, 2), L.Linear(18, 12), F.elu,
            L.LayerNormalization(12), F.softmax, lambda h: F.matmul(h.reshape(40, 3, 4), h.reshape(
                40, 4, 3)), F.dropout, L.Linear(9, 1),
        )  # fmt: skip
        optimizer = chainer.optimizers.SGD().setup(model)
        is_half = dtype == "e"
        half = umem.chainer.half_precision(model, optimizer, scale=64) if is_half else None
        loss = F.mean(model(x.astype(dtype)) ** 2)
        model.cleargrads()
        loss.backward()
        found = [loss.array] + [
            p.grad.astype("f") / (64 if half else 1) for _, p in sorted(model.namedparams())
        ]
        if half:
            half.undo()
        return found

    for got, expected in zip(run("e"), run("f"), strict=True):
        bound = 2e-2 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound)


def test_no_warning_of_overflow_reaches_the_program() -> None:
    model = L.Linear(4, 4, initialW=1000)
    optimizer = chainer.optimizers.SGD().setup(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with umem.chainer.half_precision(model, optimizer) as half:
            optimizer.update(
                lambda: F.softmax_cross_entropy(model(np.full((2, 4), 60.0, "f")), np.zeros(2, "i"))
            )
            assert half.skipped_steps == 1
            F.exp(model(np.full((2, 4), 1e9, "f")) * 1e9)


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": False}, {"reduce": "no"}, {"ignore_label": 2}, {"class_weight": None}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(9000, 40), (7, 5, 3), (6, 4, 2, 2)])
def test_a_cross_entropy_of_halves_is_that_of_float32(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    rng = np.random.RandomState(0)
    if "class_weight" in options:
        options = {"class_weight": rng.rand(shape[1]).astype("f")}
    x, t = rng.randn(*shape).astype("e"), rng.randint(0, shape[1], (shape[0], *shape[2:]))

    def run(dtype: str) -> tuple[Any, Any]:
        v = chainer.Variable(x.astype(dtype))
        y = F.softmax_cross_entropy(v, t.astype("i"), **options)
        y.grad = np.ones(y.shape, y.dtype)
        y.backward()
        return y.array, v.grad.astype(float)

    expected, gradient = run("f")
    model = L.Linear(1, 1)
    with umem.chainer.half_precision(model, chainer.optimizers.SGD().setup(model), scale=16):
        found, halves = run("e")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(halves / 16, gradient, atol=1e-3 * np.abs(gradient).max())
