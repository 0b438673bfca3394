"""How arrays lie on memory: on what was sent to a tier, and on what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import chainer
import numpy as np

from umem.trace.recording.storage import address_of, root_of


class Ground(NamedTuple):
    """Memory that has come back: the array that owns it, and where in it the contents begin."""

    root: Any
    skew: int

    @classmethod
    def of(cls, array: Any) -> Ground:
        """The memory that an array is all of."""
        root = root_of(array)
        return cls(root, address_of(array) - address_of(root))


class ArrayLayout(NamedTuple):
    """How an array lies on memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    kind: type

    @classmethod
    def of(cls, array: Any, start: int) -> ArrayLayout:
        """How an array lies on memory that begins at an address."""
        return cls(address_of(array) - start, array.shape, array.dtype, array.strides, type(array))

    def on(self, ground: Ground) -> Any:
        """An array that lies so on other memory; what owns that, where it is the same."""
        root, offset = ground.root, ground.skew + self.offset
        same = (0, self.shape, self.dtype, self.strides, self.kind)
        if same == (offset, root.shape, root.dtype, root.strides, type(root)):
            return root
        if not isinstance(root, np.ndarray):
            return self._on_cupy(root, offset)
        made: Any = np.ndarray(self.shape, self.dtype, bytes_of(root), offset, self.strides)
        return made if self.kind is np.ndarray else made.view(self.kind)

    def _on_cupy(self, root: Any, offset: int) -> Any:
        """By CuPy's own steps where these can make it, so that it holds the root."""
        if not _fills(self.shape, self.strides, self.dtype.itemsize):
            xp = chainer.backend.get_array_module(root)
            return xp.ndarray(self.shape, self.dtype, root.data + offset, self.strides)
        order = _by_stride(self.strides)
        length = self.dtype.itemsize * prod(self.shape)
        dense = bytes_of(root)[offset : offset + length].view(self.dtype)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return dense.reshape([self.shape[axis] for axis in order]).transpose(inverse)


def bytes_of(array: Any) -> Any:
    """The memory of an array that is dense in any order of its axes, the lowest address first."""
    return array.transpose(_by_stride(array.strides)).reshape(-1).view(np.uint8)


def is_dense(array: Any) -> bool:
    """Tell whether an array covers its memory without gaps, in any order of its axes."""
    return _fills(array.shape, array.strides, array.itemsize)


def is_bytes(root: Any) -> bool:
    """Tell whether memory can be copied as bytes: dense, each byte once, and no Python objects."""
    return root.nbytes > 0 and not root.dtype.hasobject and is_dense(root)


def _fills(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _by_stride(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])
