"""Floats by their bits: float16, bfloat16 as words, and whether all are finite.

What is too large for a half becomes infinite, without a warning: the loss scale looks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from chainer.backend import get_array_module

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
LARGEST = 65504.0
"""The largest finite half."""


def quiet() -> Any:
    """A context without warnings of overflow: the loss scale finds infinity in the gradients."""
    return np.errstate(over="ignore", invalid="ignore")


def to_half(array: Any) -> Any:
    """A copy in float16; the loss scale looks for what became infinite."""
    with quiet():
        return array.astype(HALF)


def to_single(array: Any) -> Any:
    """A copy in float32."""
    return array.astype(SINGLE)


def constant_to_half(array: Any) -> Any:
    """A copy in float16 of something given, such as a mask of -1e9: cut to the largest halves."""
    xp = get_array_module(array)
    return xp.asarray(xp.clip(array, -LARGEST, LARGEST)).astype(HALF)


# -- finite ---------------------------------------------------------------------------------------

_CHUNK = 1 << 16
_TILE = 1 << 14
_BITS = {2: ("uint16", 0x7C00), 4: ("uint32", 0x7F800000), 8: ("uint64", 0x7FF0000000000000)}
"""By the size of a float: the integer of its bits, and the exponent of infinity and NaN."""
_SOURCE = r"""
extern "C" __global__
void any_not_finite(const unsigned long long* tiles, int* found) {
    const unsigned long long* tile = tiles + 3 * blockIdx.x;
    const long long count = tile[1];
    bool is_bad = false;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        if (tile[2] == 2) {
            const unsigned short* bits = reinterpret_cast<const unsigned short*>(tile[0]);
            is_bad |= (bits[i] & 0x7C00u) == 0x7C00u;
        } else if (tile[2] == 4) {
            const unsigned int* bits = reinterpret_cast<const unsigned int*>(tile[0]);
            is_bad |= (bits[i] & 0x7F800000u) == 0x7F800000u;
        } else {
            const unsigned long long* bits = reinterpret_cast<const unsigned long long*>(tile[0]);
            is_bad |= (bits[i] & 0x7FF0000000000000ull) == 0x7FF0000000000000ull;
        }
    }
    if (is_bad) {
        *found = 1;
    }
}
"""


def all_finite(arrays: Sequence[Any]) -> bool:
    """Whether no number in floating-point arrays is infinite or NaN.

    On a GPU all are looked at by one kernel, and it is waited for once. No float is made: the bits
    of the exponents tell.

    Args:
        arrays: of NumPy or of CuPy, all on one device.
    """
    if not arrays:
        return True
    xp = get_array_module(*arrays)
    if xp is np:
        return all(map(is_finite, arrays))
    found = xp.zeros(1, np.int32)
    whole = [xp.ascontiguousarray(array) for array in arrays]
    tiles = _tiles(whole)
    if len(tiles):
        _kernel(xp)((len(tiles),), (256,), (xp.asarray(tiles), found))
    return not int(found[0])


def is_finite(array: Any) -> bool:
    """Whether no number in an array is infinite or NaN; it takes no more than a chunk."""
    xp = get_array_module(array)
    if xp is not np:
        return bool(xp.isfinite(array).all())
    kind, exponent = _BITS[array.itemsize]
    bits = np.ascontiguousarray(array).reshape(-1).view(kind)
    sign_free = np.iinfo(kind).max >> 1
    return all(
        int((bits[start : start + _CHUNK] & sign_free).max()) < exponent
        for start in range(0, len(bits), _CHUNK)
    )


def _tiles(arrays: Sequence[Any]) -> Any:
    """Address, count and item size of the parts that one block of threads looks at each."""
    parts = []
    for array in arrays:
        starts = np.arange(0, array.size, _TILE, dtype=np.uint64)
        tiles = np.empty((len(starts), 3), np.uint64)
        tiles[:, 0] = np.uint64(array.data.ptr) + starts * np.uint64(array.itemsize)
        tiles[:, 1] = np.minimum(np.uint64(_TILE), np.uint64(array.size) - starts)
        tiles[:, 2] = array.itemsize
        parts.append(tiles)
    return np.concatenate(parts)


@cache
def _kernel(xp: Any) -> Any:
    return xp.RawKernel(_SOURCE, "any_not_finite")


# -- bfloat16 -------------------------------------------------------------------------------------

# The upper half of a float32, kept in arrays of uint16 that anything can save: NumPy and Chainer
# compute nothing in bfloat16, and need not.

WORD = np.dtype(np.uint16)
ROUNDING = 2.0**-8
"""The most that rounding to the nearest changes a number, relative to it: 0.4%."""


def to_words(array: Any, seed: int | None = None) -> Any:
    """Round an array of float32 to bfloat16, kept as words of the same shape.

    NaN stays NaN, and what is beyond the largest becomes infinite. It takes no more than some
    chunks of 256 KiB beside the result on NumPy.

    Args:
        array: of float32, of NumPy or of CuPy.
        seed: None rounds to the nearest, ties to even. A number rounds up or down at random, the
            nearer the likelier, so that the mean is right: the same numbers for the same seed, on
            NumPy and on CuPy.
    """
    xp = get_array_module(array)
    words = xp.empty(array.shape, WORD)
    values, into = xp.ascontiguousarray(array).reshape(-1), words.reshape(-1)
    step = _CHUNK if xp is np else max(1, values.size)
    for start in range(0, values.size, step):
        bits = values[start : start + step].view(np.uint32)
        added = _nearest(xp, bits) if seed is None else _drawn(xp, start, bits.size, seed)
        is_finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        into[start : start + step] = (bits + added * is_finite) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        into[start : start + step] |= is_nan.astype(WORD) << WORD.type(6)
    return words


def from_words(words: Any) -> Any:
    """The float32 numbers that words stand for, exactly."""
    xp = get_array_module(words)
    bits = words.astype(np.uint32)
    xp.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(SINGLE)


def _nearest(xp: Any, bits: Any) -> Any:
    return ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)


def _drawn(xp: Any, start: int, count: int, seed: int) -> Any:
    """16 random bits for each place, from the place and the seed: the finaliser of MurmurHash3."""
    x = xp.arange(start, start + count, dtype=np.uint32)
    x *= np.uint32(0x9E3779B1)
    x += np.uint32(seed & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    x &= np.uint32(0xFFFF)
    return x
