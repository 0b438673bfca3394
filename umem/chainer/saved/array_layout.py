"""Layouts of arrays in a buffer, to restore them in fetched memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import chainer
import numpy as np

from umem.trace.recording import address_of, root_of


class Ground(NamedTuple):
    """Restored memory: the array that owns it, and the byte at which the contents begin."""

    root: Any
    skew: int

    @classmethod
    def of(cls, array: Any) -> Ground:
        """Return the memory whose contents are exactly this array's."""
        root = root_of(array)
        return cls(root, address_of(array) - address_of(root))


class ArrayLayout(NamedTuple):
    """The layout of an array in memory: its offset in bytes, shape, type, strides and class."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    kind: type

    @classmethod
    def of(cls, array: Any, start: int) -> ArrayLayout:
        """Return the layout of an array in memory that begins at the address ``start``."""
        return cls(address_of(array) - start, array.shape, array.dtype, array.strides, type(array))

    def on(self, ground: Ground) -> Any:
        """Make an array of this layout in other memory, or return its owner if it is equal."""
        root, offset = ground.root, ground.skew + self.offset
        same = (0, self.shape, self.dtype, self.strides, self.kind)
        if same == (offset, root.shape, root.dtype, root.strides, type(root)):
            return root
        if not isinstance(root, np.ndarray):
            return self._on_cupy(root, offset)
        made: Any = np.ndarray(self.shape, self.dtype, bytes_of(root), offset, self.strides)
        return made if self.kind is np.ndarray else made.view(self.kind)

    def _on_cupy(self, root: Any, offset: int) -> Any:
        """Make an array of CuPy at this offset: a view that refers to the root, if it is dense.

        With gaps it refers only to the root's memory.
        """
        if not _fills(self.shape, self.strides, self.dtype.itemsize):
            xp = chainer.backend.get_array_module(root)
            return xp.ndarray(self.shape, self.dtype, root.data + offset, self.strides)
        order = _by_stride(self.strides)
        length = self.dtype.itemsize * prod(self.shape)
        dense = bytes_of(root)[offset : offset + length].view(self.dtype)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return dense.reshape([self.shape[axis] for axis in order]).transpose(inverse)


def bytes_of(array: Any) -> Any:
    """Return a dense array's memory as a flat view of uint8, the lowest address first."""
    return array.transpose(_by_stride(array.strides)).reshape(-1).view(np.uint8)


def is_dense(array: Any) -> bool:
    """Tell whether an array covers its memory without gaps, in any order of its axes."""
    return _fills(array.shape, array.strides, array.itemsize)


def is_bytes(root: Any) -> bool:
    """Tell whether memory can be copied as bytes: dense, each byte once, and no Python objects."""
    return root.nbytes > 0 and not root.dtype.hasobject and is_dense(root)


def _fills(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Tell whether strides cover memory without gaps or overlaps, for items of ``step`` bytes."""
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _by_stride(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])
