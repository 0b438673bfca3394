"""A codec of bfloat16 as words: the upper 16 bits of float32, in arrays of uint16.

Neither NumPy nor Chainer computes in bfloat16: words are decoded to float32 before they are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer.backend import get_array_module

from umem.chainer.precision.floats import SINGLE

_CHUNK = 1 << 16
_WORD = np.dtype(np.uint16)
ROUNDING = 2.0**-8
"""The largest relative error of rounding to bfloat16: 0.4%."""


def to_words(array: Any) -> Any:
    """Round a float32 array to the nearest bfloat16, ties to even; return words of its shape.

    NaN stays NaN, and numbers beyond the largest bfloat16 become infinite. On NumPy the workspace
    is a few chunks of 256 KiB.

    Args:
        array: of float32, of NumPy or of CuPy.
    """
    xp = get_array_module(array)
    words = xp.empty(array.shape, _WORD)
    values, into = xp.ascontiguousarray(array).reshape(-1), words.reshape(-1)
    step = _CHUNK if xp is np else max(1, values.size)
    for start in range(0, values.size, step):
        bits = values[start : start + step].view(np.uint32)
        added = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        is_finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        into[start : start + step] = (bits + added * is_finite) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        into[start : start + step] |= is_nan.astype(_WORD) << _WORD.type(6)
    return words


def from_words(words: Any) -> Any:
    """Decode words of bfloat16 to float32, exactly; return an array of their shape."""
    xp = get_array_module(words)
    bits = words.astype(np.uint32)
    xp.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(SINGLE)
