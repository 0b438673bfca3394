"""Quantised layers at the ends of their ranges: scales, sums and zero points."""

from __future__ import annotations

import numpy as np
import pytest
import quantization_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.on_chainer.quantization.test_quantize import called

import umem.chainer  # isort: skip  (before chainer)
import chainer.links as L


@pytest.mark.parametrize("zero", [0, 255])
def test_sums_that_float32_has_not_are_whole_before_they_are_rounded_once(zero: int) -> None:
    """66,000 columns: 255 * 127 each is 2,137,410,000, just below 2**31."""
    k = 66_000
    w = np.full((3, k), 127)
    w[1, ::2] = -127
    w[2, -1] = -126
    q = np.full((2, k), 255 - zero)
    q[1, 5], q[1, 6] = zero, zero and 1
    ends = np.zeros((1, k), "i")
    ends[0, 0] = 255
    x = np.concatenate([q, ends]) - zero
    link = L.Linear(k, 3, nobias=True, initialW=w.astype("f"))
    small = umem.chainer.quantize(link, x.astype("f"))
    assert not small.quantization_report.stays
    expected = x.astype(np.int64) @ w.T
    assert np.abs(expected).max() > 2**30
    assert (called(small, x.astype("f")) == expected.astype("f")).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 5), st.sampled_from([8, 4]),
       st.integers(-30, 30), st.integers(-30, 30), st.integers(0, 2**32 - 1))  # fmt: skip
def test_scales_of_any_size_leave_an_error_of_half_a_code(
    m: int, k: int, n: int, bits: int, power: int, other: int, seed: int
) -> None:
    """Weights times 2**power, inputs times 2**other; one row is zero, one is 2**20 times larger."""
    generator = np.random.default_rng(seed)
    w = generator.standard_normal((n, k)) * 2.0**power
    w[0] *= 2.0**20
    w[-1] = 0
    w = w.astype("f")
    x = (generator.standard_normal((m, k)) * 2.0**other).astype("f")
    b = generator.standard_normal(n).astype("f")
    small = umem.chainer.quantize(L.Linear(k, n, initialW=w, initial_bias=b), x, bits)
    _, scales = oracle.weight_codes(w, {8: 127, 4: 7}[bits])
    scale, _ = oracle.range_of(x.min(), x.max(), 255)
    # |xw - x'w'| <= |x - x'| |w| + |x'| |w - w'|, and a code is off by half a step; at the ends of
    # the range, where the zero point was rounded, by a whole one.
    room = (
        np.abs(w).sum(axis=1, dtype="d") * scale
        + scales / 2 * (np.abs(x).sum(axis=1) + k * scale)[:, None]
    )
    exact = x.astype("d") @ w.astype("d").T + b
    found = called(small, x)
    assert np.isfinite(found).all()
    assert (np.abs(found - exact) <= 1.001 * room + 1e-5 * np.abs(b) + 1e-30).all()
    assert (found[:, -1] == b[-1]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-30, -1e30])
def test_a_weight_of_one_number_is_itself(bits: int, value: float) -> None:
    link = L.Linear(1, 1, nobias=True, initialW=np.array([[value]], "f"))
    small = umem.chainer.quantize(link, np.array([[0], [255]], "f"), bits)
    found = called(small, np.array([[0], [1], [7], [255]], "f"))
    assert np.allclose(found[:, 0], np.float32(value) * np.array([0, 1, 7, 255]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1.1e-38])
def test_weights_that_no_scale_of_float32_has_are_zero(bits: int, value: float) -> None:
    w = np.array([[value, -value, 0], [1, 0.5, -1]], "f")
    small = umem.chainer.quantize(
        L.Linear(3, 2, initialW=w, initial_bias=np.ones(2, "f")), np.eye(3, dtype="f"), bits
    )
    found = called(small, np.eye(3, dtype="f"))
    assert (found[:, 0] == 1).all()
    assert np.abs(found[:, 1] - [2, 1.5, 0]).max() < {8: 0.02, 4: 0.15}[bits]


@pytest.mark.parametrize(
    "low, high", [(0, 5), (-5, 0), (2, 5), (-5, -2), (-1e-3, 1e3), (-3e38, 3e38), (0, 1e-35)]
)
def test_zero_is_a_code_in_every_range_so_that_padding_is_exact(low: float, high: float) -> None:
    link = L.Convolution2D(1, 1, 1, pad=1, nobias=True, initialW=np.ones((1, 1, 1, 1), "f"))
    x = np.array([[[[low, high]]]], "f")
    y = called(umem.chainer.quantize(link, x), x)
    assert (y[0, 0, 0] == 0).all() and (y[0, 0, :, 0] == 0).all()
    widest = max(high, 0) - min(low, 0)
    assert np.abs(y[0, 0, 1, 1:3].astype("d") - [low, high]).max() <= 0.51 * widest / 255 * 1.01
