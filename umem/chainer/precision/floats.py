"""Rounding of arrays to float16, and the search for infinities and NaN.

A number too large for float16 becomes infinite, without a warning: the loss scale looks for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from chainer.backend import get_array_module

from umem.devices import is_dry

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
LARGEST = 65504.0
"""The largest finite number of float16."""


def quiet() -> Any:
    """Return a context in which NumPy does not warn of overflow and invalid values.

    The loss scale looks for infinities in the gradients instead.
    """
    return np.errstate(over="ignore", invalid="ignore")


def to_half(array: Any, out: Any = None) -> Any:
    """Round an array to float16, to the nearest, ties to even.

    Args:
        array: of NumPy or of CuPy.
        out: a float16 array of the same shape to write to; None for a new one.
    """
    with quiet():
        if out is None:
            return array.astype(HALF)
        out[...] = array
    return out


def constant_to_half(array: Any) -> Any:
    """Round a constant, such as a mask of -1e9, to float16, clipped to `LARGEST`."""
    xp = get_array_module(array)
    half = xp.asarray(to_half(array))
    with quiet():
        return xp.clip(half, -LARGEST, LARGEST, out=half)


def layer_norm_back(x: Any, gamma: Any, gy: Any, eps: float) -> tuple[Any, Any, Any]:
    """Compute the gradients of a layer normalisation of NumPy's float16 arrays, in float32.

    Chainer's own backward is some thirty functions, each of which would round to float16, so that
    scaled gradients overflow between them. See Ba, Kiros and Hinton, "Layer Normalization" (2016).

    Args:
        x: the input, of shape (n, m), in float16.
        gamma: the scale, of shape (m,), in float32.
        gy: the gradient of the output, of shape (n, m), in float16.
        eps: the number that was added to the variance.

    Returns:
        the gradients of x, rounded to float16, and of gamma and beta, in float32.
    """
    normal, given = x.astype(SINGLE), gy.astype(SINGLE)
    normal -= normal.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt(np.square(normal).mean(axis=1, keepdims=True) + SINGLE.type(eps))
    normal *= scale
    of_gamma, of_beta = (given * normal).sum(axis=0), given.sum(axis=0)
    given *= gamma
    normal *= (given * normal).mean(axis=1, keepdims=True)
    given -= given.mean(axis=1, keepdims=True)
    given -= normal
    given *= scale
    return to_half(given), of_gamma, of_beta


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
    """Tell whether floating-point arrays have no infinity and no NaN.

    On a GPU one kernel checks all arrays, with one wait. The bits of the exponents are tested, so
    that no floating-point temporaries are needed.

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
    is_bad = int(found[0])  # read in a dry run, too, which waits as long
    return is_dry() or not is_bad


def is_finite(array: Any) -> bool:
    """Tell whether an array has no infinity and no NaN; on NumPy with the workspace of a chunk."""
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
    """Return the tiles that one block of threads checks each: rows of address, count, item size."""
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
