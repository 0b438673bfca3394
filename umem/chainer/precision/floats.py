"""Arrays of few bits: float16 and its products, bfloat16 as words, and whether all are finite.

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


def to_half(array: Any, out: Any = None) -> Any:
    """Round an array of float32 to float16, to the nearest, ties to even.

    NumPy's own conversion takes 70 ns for a number that becomes subnormal or infinite, as gradients
    often do, where this takes three; the results are the same.

    Args:
        array: of NumPy or of CuPy.
        out: a half array of its shape to write to; None for a new one.
    """
    if type(array) is np.ndarray and array.dtype == SINGLE:
        return _converted(array, HALF, out, _round)
    with quiet():
        if out is None:
            return array.astype(HALF)
        out[...] = array
    return out


def to_single(array: Any) -> Any:
    """A copy in float32; of halves of NumPy by a table of them all, 0.7 ns a number."""
    if type(array) is np.ndarray and array.dtype == HALF:
        return _converted(array, SINGLE, None, _look_up)
    return array.astype(SINGLE)


def _converted(array: Any, dtype: Any, out: Any, convert: Any) -> Any:
    """Convert chunk by chunk; a result without a place of its own lies as the array does."""
    if out is None and array.ndim == 2 and abs(array.strides[0]) < abs(array.strides[1]):
        return _converted(array.T, dtype, None, convert).T
    made = np.empty(array.shape, dtype) if out is None or not out.flags.c_contiguous else out
    given, into = np.ascontiguousarray(array).reshape(-1), made.reshape(-1)
    for start in range(0, given.size, _STEP):
        convert(given[start : start + _STEP], into[start : start + _STEP])
    if out is not None and made is not out:
        out[...] = made
    return made if out is None else out


def _look_up(halves: Any, into: Any) -> None:
    _all_halves().take(halves.view(np.uint16), out=into, mode="wrap")


@cache
def _all_halves() -> Any:
    """Every half as float32, 256 KiB."""
    return np.arange(1 << 16, dtype=np.uint16).view(HALF).astype(SINGLE)


def _round(singles: Any, into: Any) -> None:
    """Round by the bits, as in Giesen's float_to_half_fast3_rtne."""
    bits, u32 = singles.view(np.uint32), np.uint32
    size = bits & u32(0x7FFFFFFF)
    halves = size >> u32(13)
    halves &= u32(1)  # ties go to even
    halves += size
    halves += u32((0xFFF - (112 << 23)) & 0xFFFFFFFF)
    halves >>= u32(13)
    is_small = size < u32(113 << 23)
    if is_small.any():  # adding one half leaves what a subnormal half can hold
        small = (size.view(SINGLE) + SINGLE.type(0.5)).view(np.uint32)
        small -= u32(126 << 23)
        np.copyto(halves, small, where=is_small)
    if size.max(initial=0) >= 143 << 23:
        large = np.where(size > u32(0x7F800000), u32(0x7E00), u32(0x7C00))
        np.copyto(halves, large, where=size >= u32(143 << 23))
    sign = bits >> u32(16)
    sign &= u32(0x8000)
    halves |= sign
    into.view(np.uint16)[...] = halves


def constant_to_half(array: Any) -> Any:
    """A copy in float16 of something given, such as a mask of -1e9: cut to the largest halves."""
    if type(array) is np.ndarray and array.dtype == SINGLE:
        return _converted(array, HALF, None, _cut)
    xp = get_array_module(array)
    return xp.asarray(xp.clip(array, -LARGEST, LARGEST)).astype(HALF)


def _cut(singles: Any, into: Any) -> None:
    _round(np.clip(singles, -SINGLE.type(LARGEST), SINGLE.type(LARGEST)), into)


# -- products -------------------------------------------------------------------------------------

# NumPy multiplies halves one by one, at a tenth of the speed of float32, and adds up in float16.

TILE = 1024
"""Rows and columns of a tile: 4 MiB in float32, whose conversion is a twentieth of its product."""


def product(a: Any, b: Any, bias: Any = None) -> Any:
    """Multiply two matrices of halves, with sums in float32 and one rounding at the end.

    It takes four tiles, 16 MiB at most, beside the result.

    Args:
        a: of shape (m, k), in any layout.
        b: of shape (k, n), in any layout.
        bias: of shape (n,), added to each row; None for none.

    Returns:
        A half array of shape (m, n).
    """
    y = np.empty((a.shape[0], b.shape[1]), HALF)
    for columns in _tiles(b.shape[1]):
        added = None if bias is None else to_single(bias[columns])
        for rows in _tiles(a.shape[0]):
            to_half(_tile_of_product(a[rows], b[:, columns], added), out=y[rows, columns])
    return y


def _tile_of_product(a: Any, b: Any, bias: Any) -> Any:
    total = np.zeros((a.shape[0], b.shape[1]), SINGLE) if not a.shape[1] else None
    for inner in _tiles(a.shape[1]):
        if total is None:
            total = to_single(a[:, inner]) @ to_single(b[inner])
        else:
            total += to_single(a[:, inner]) @ to_single(b[inner])
    if bias is not None:
        total += bias
    return total


def _tiles(length: int) -> list[slice]:
    return [slice(start, start + TILE) for start in range(0, length, TILE)]


def layer_norm_back(x: Any, gamma: Any, gy: Any, eps: float) -> tuple[Any, Any, Any]:
    """The gradients of a layer normalisation of halves of NumPy, in float32 but for that of x.

    Chainer takes some thirty functions for it, each of which would round to halves. See Ba, Kiros
    and Hinton, "Layer Normalization" (2016).

    Args:
        x: what was normalised, of shape (n, m).
        gamma: of shape (m,), in float32.
        gy: the gradient of the output.
        eps: what was added to the variance.
    """
    gx = np.empty(x.shape, HALF)
    of_gamma, of_beta = np.zeros_like(gamma), np.zeros_like(gamma)
    step = max(1, _STEP // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        normal, given = to_single(x[rows]), to_single(gy[rows])
        normal -= normal.mean(axis=1, keepdims=True)
        scale = 1 / np.sqrt(np.square(normal).mean(axis=1, keepdims=True) + SINGLE.type(eps))
        normal *= scale
        of_beta += given.sum(axis=0)
        of_gamma += (given * normal).sum(axis=0)
        given *= gamma
        normal *= (given * normal).mean(axis=1, keepdims=True)
        given -= given.mean(axis=1, keepdims=True)
        given -= normal
        given *= scale
        to_half(given, out=gx[rows])
    return gx, of_gamma, of_beta


# -- halves by their bits -------------------------------------------------------------------------

# As int16, numbers below zero are the lowest, infinity included, then NaN with a sign, from -1023.


def rectified(x: Any) -> Any:
    """The larger of zero and each half of NumPy, NaN where it is NaN."""
    bits = x.view(np.int16)
    return (bits * (bits > -1024)).view(HALF)


def where_positive(x: Any, y: Any) -> Any:
    """The halves of y where those of x are above zero, otherwise zero; both of NumPy."""
    return (y.view(np.int16) * (x.view(np.int16) > 0)).view(HALF)


# -- finite ---------------------------------------------------------------------------------------

_CHUNK = 1 << 16
_STEP = 1 << 15
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
    tiles = _tables(whole)
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


def _tables(arrays: Sequence[Any]) -> Any:
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
