"""bfloat16 as words: the upper half of a float32, in arrays of uint16 that anything can save.

NumPy and Chainer compute nothing in bfloat16, and need not: words are made float32 again for as
long as something computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer.backend import get_array_module

from umem.chainer.precision.floats import SINGLE

_CHUNK = 1 << 16
_WORD = np.dtype(np.uint16)
ROUNDING = 2.0**-8
"""The most that rounding to the nearest changes a number, relative to it: 0.4%."""


def to_words(array: Any) -> Any:
    """Round an array of float32 to the nearest bfloat16, ties to even, kept as words of its shape.

    NaN stays NaN, and what is beyond the largest becomes infinite. It takes no more than some
    chunks of 256 KiB beside the result on NumPy.

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
    """The float32 numbers that words stand for, exactly."""
    xp = get_array_module(words)
    bits = words.astype(np.uint32)
    xp.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(SINGLE)
