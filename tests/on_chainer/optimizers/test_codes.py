"""A byte of optimizer state stands for the nearest of 256 values, found by float64 in the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from umem.chainer.optimizers.quantized_state import BLOCK, dequantized, quantized

Array = np.ndarray[Any, Any]
signed_and_not = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def values_of_the_paper(signed: bool) -> Array:
    """Section 2.1 of arXiv 2110.02861: an exponent of zeros, a bit, a linear fraction."""
    found = {0.0, 1.0}
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        for i in range(count):
            middle = 0.1 + 0.9 * (i + 0.5) / count
            found.add(middle * 10.0 ** (exponent - 6))
            if signed:
                found.add(-middle * 10.0 ** (exponent - 6))
    return np.array(sorted(found))


def codes_of(values: Array, signed: bool) -> Array:
    """Codes of values from -1 to 1: a 1 in each block has it scaled by 1."""
    rows = np.ones((-(-values.size // (BLOCK - 1)), BLOCK), np.float32)
    flat = np.zeros(len(rows) * (BLOCK - 1), np.float32)
    flat[: values.size] = values
    rows[:, 1:] = flat.reshape(len(rows), -1)
    codes, scales = quantized(rows, signed)
    assert (scales == 1).all()
    return codes[:, 1:].reshape(-1)[: values.size]


def nearest(values: Array, map_: Array) -> Array:
    """The first of the nearest values, in float64."""
    found = np.empty(values.size, np.int64)
    for start in range(0, values.size, 4096):
        part = values[start : start + 4096].astype(np.float64)
        found[start : start + 4096] = np.abs(part[:, None] - map_.astype(np.float64)).argmin(axis=1)
    return found


def map_of(signed: bool) -> Array:
    """What the codes stand for, as umem says it."""
    codes = np.arange(256, dtype=np.uint8)
    return dequantized(codes, np.ones(1, np.float32), signed, np.float32)


@signed_and_not
def test_codes_stand_for_the_values_of_the_paper(signed: bool) -> None:
    expected = values_of_the_paper(signed)
    assert len(expected) == 256
    np.testing.assert_allclose(map_of(signed), expected, rtol=1e-6, atol=0)


def ties_and_their_neighbours(signed: bool) -> Array:
    map_ = map_of(signed).astype(np.float64)
    middles = ((map_[1:] + map_[:-1]) / 2).astype(np.float32)
    near = [middles]
    for side in (-np.inf, np.inf):
        step = middles
        for _ in range(40):
            step = np.nextafter(step, np.float32(side))
            near.append(step)
    return np.concatenate([*near, map_of(signed)])


@signed_and_not
def test_every_tie_and_its_neighbours_get_the_nearest_code(signed: bool) -> None:
    values = ties_and_their_neighbours(signed)
    np.testing.assert_array_equal(codes_of(values, signed), nearest(values, map_of(signed)))


@signed_and_not
def test_exact_ties_are_among_them_and_get_the_lower_code(signed: bool) -> None:
    map_ = map_of(signed).astype(np.float64)
    middles = (map_[1:] + map_[:-1]) / 2
    exact = middles.astype(np.float32) == middles
    assert exact.sum() > 20
    codes = codes_of(middles[exact].astype(np.float32), signed)
    np.testing.assert_array_equal(codes, np.flatnonzero(exact))


@signed_and_not
def test_every_prefix_of_sixteen_bits_gets_the_nearest_code_at_its_ends(signed: bool) -> None:
    prefix = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF], np.uint32)
    values = (prefix[:, None] | low).reshape(-1).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(np.nan_to_num(values)) <= 1)]
    if not signed:
        values = values[values >= 0]
    np.testing.assert_array_equal(codes_of(values, signed), nearest(values, map_of(signed)))


@pytest.mark.thorough
@signed_and_not
def test_a_million_values_get_the_nearest_code(signed: bool) -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, np.float32(1).view(np.uint32), 1_000_000, dtype=np.uint32)
    values = bits.view(np.float32)
    if signed:
        values = values * generator.choice(np.array([-1, 1], np.float32), values.size)
    np.testing.assert_array_equal(codes_of(values, signed), nearest(values, map_of(signed)))


numbers = st.floats(-(2.0**100), 2.0**100, width=32)


@given(arrays(np.float32, st.integers(0, 700), elements=numbers))
def test_each_value_comes_back_within_half_a_gap_of_its_block(values: Array) -> None:
    codes, scales = quantized(values, True)
    assert codes.shape == values.shape and len(scales) == -(-values.size // 256)
    back = dequantized(codes, scales, True, np.float64)
    map_ = map_of(True).astype(np.float64)
    for block in range(len(scales)):
        part = slice(256 * block, 256 * (block + 1))
        scale = np.abs(values[part]).max()
        assert scales[block] == scale
        widest = np.diff(map_).max() * float(scale)
        lost = np.abs(back[part] - values[part])
        assert (lost <= max(widest / 2 * (1 + 1e-4), 1e-45)).all()


def test_gaussians_lose_a_hundredth() -> None:
    """Facts measured apart, in blocks of 256: gradients 1.08%, and their squares 0.64%."""
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    for signed, x, expected in ((True, values, 0.0108), (False, values**2, 0.0064)):
        back = dequantized(*quantized(x, signed), signed, np.float32)
        assert np.linalg.norm(back - x) / np.linalg.norm(x) == pytest.approx(expected, rel=0.05)


def test_blocks_of_zeros_and_of_the_smallest_numbers() -> None:
    values = np.zeros(3 * 256 + 5, np.float32)
    values[256] = np.float32(1e-45)
    values[600:] = -np.float32(3e-40)
    codes, scales = quantized(values, True)
    assert scales.tolist() == [0.0, np.float32(1e-45), np.float32(3e-40), np.float32(3e-40)]
    back = dequantized(codes, scales, True, np.float32)
    assert not back[:256].any() and back[256] == np.float32(1e-45)
    np.testing.assert_allclose(back[600:], values[600:], rtol=0.01)


def test_arrays_that_lie_otherwise_are_taken_in_the_order_of_their_indices() -> None:
    values = np.random.default_rng(1).standard_normal((70, 90)).astype(np.float32)
    whole = quantized(values, True)
    for other in (np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]):
        codes, scales = quantized(other, True)
        np.testing.assert_array_equal(codes, whole[0])
        np.testing.assert_array_equal(scales, whole[1])
