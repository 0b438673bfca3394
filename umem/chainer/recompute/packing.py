"""Dropout masks, one bit an element while nobody reads them.

Models: `chainer.functions.dropout` on arrays of NumPy or CuPy, whose mask is zero or one scale.
Does not model: masks that the user gave, and cuDNN's own states; they stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chainer


class Packed(NamedTuple):
    """A mask as bits, and what it takes to have it back."""

    bits: Any
    scale: Any
    shape: tuple[int, ...]


def pack(mask: Any) -> Packed | None:
    """The mask as bits; None where it is no array in C order of zeros and one other value."""
    if mask is None or not mask.flags.c_contiguous or not mask.size:
        return None
    xp = chainer.backend.get_array_module(mask)
    scale = mask.max()
    kept = mask != 0
    if not bool((mask[kept] == scale).all()):
        return None
    return Packed(xp.packbits(kept), scale, mask.shape)


def unpack(packed: Packed) -> Any:
    """The mask, bit for bit."""
    xp = chainer.backend.get_array_module(packed.bits)
    count = 1
    for length in packed.shape:
        count *= length
    flags = xp.unpackbits(packed.bits)[:count].astype(bool).reshape(packed.shape)
    return packed.scale * flags
