"""Dropout masks of a whole batch, drawn once and handed out part by part; a bit an element."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from chainer.backend import get_array_module

from umem.errors import AccumulationError

CHUNK_BYTES = 1 << 20
"""Random numbers are drawn in pieces of this size, to bound the memory beside the packed bits."""


class _Packed(NamedTuple):
    bits: Any
    """uint8, one row a sample, eight elements a byte."""
    elements: int
    """Elements of a sample."""


class DropoutMasks:
    """Draws dropout masks for a whole batch, and hands each part its rows.

    On NumPy the numbers are those that the whole batch would have drawn, in the same order, and the
    generator stands in the end where it would have stood. On CuPy they are drawn in pieces, and a
    whole batch would draw others.
    """

    def __init__(self, size: int, *, stay: bool = False) -> None:
        self._size, self._stay = size, stay
        self._kept: list[_Packed] = []
        self._start = self._count = self._call = 0

    @property
    def are_used(self) -> bool:
        """Tell whether dropout was called."""
        return bool(self._kept)

    def begin(self, part: slice) -> None:
        """Select the samples whose masks are handed out next."""
        self._start, self._count, self._call = part.start, part.stop - part.start, 0

    def again(self) -> None:
        """Draw the masks anew after the generators were restored, unless they are to stay."""
        if not self._stay:
            self._kept = []

    def mask(self, ratio: float, x: Any, label: str) -> Any:
        """Return the mask for the next call of dropout, in the shape of its input.

        Raises:
            AccumulationError: the first dimension of the input is no multiple of the samples.
        """
        if not x.ndim or len(x) % self._count or x.size % self._count:
            raise AccumulationError(
                f"'{label}' has an input of {x.shape} for {self._count} samples, so its mask "
                'cannot be cut from one of the whole batch: pass dropout="micro"'
            )
        at, self._call = self._call, self._call + 1
        if at == len(self._kept):
            self._kept.append(self._drawn(ratio, x))
        bits, count = self._kept[at]
        if count != x.size // self._count:
            raise AccumulationError(
                f"'{label}' has {x.size // self._count} elements a sample, and {count} in the part "
                'before: the loss function does not do the same for each part; pass dropout="micro"'
            )
        xp = get_array_module(x)
        mine = bits[self._start : self._start + self._count]
        flags = xp.unpackbits(mine.ravel()).reshape(self._count, -1)[:, :count]
        return x.dtype.type(1.0 / (1 - ratio)) * flags.astype(bool).reshape(x.shape)

    def _drawn(self, ratio: float, x: Any) -> _Packed:
        """Draw the mask of one call for the whole batch, packed to a bit an element."""
        xp = get_array_module(x)
        count = prod(x.shape) // self._count
        bits = xp.empty((self._size, -(-count // 8)), "u1")
        rows = max(1, CHUNK_BYTES // (8 * max(count, 1)))
        for start in range(0, self._size, rows):
            chunk = bits[start : start + rows]
            flags = xp.zeros((len(chunk), 8 * bits.shape[1]), bool)
            flags[:, :count] = xp.random.rand(len(chunk), count) >= ratio
            chunk[...] = xp.packbits(flags.ravel()).reshape(chunk.shape)
        return _Packed(bits, count)
