"""The memory behind an array: its root, and the part of it that a view covers."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

Reach = tuple[Any, ...]
"""An `Access` while recording: a plain tuple that begins with tensor, start and stop."""


class RootRef(weakref.ref[Any]):
    """A weak reference to a root array that knows how it was stored, see `Raw`, and its address.

    The address is None until a part of the array is used.
    """

    __slots__ = ("address", "key", "whole")
    key: int
    whole: Reach
    address: int | None


def root_of(array: Any) -> Any:
    """The array at the end of the ``.base`` chain: the one whose death frees the memory."""
    kinds = (np.ndarray, type(array))
    base = getattr(array, "base", None)
    while base is not None:
        if isinstance(base, kinds):  # as_strided puts an object of its own in between
            array = base
        base = getattr(base, "base", None)
    return array


def part_of(array: Any, root: Any, whole: Reach, root_address: int) -> Reach:
    """The byte range of a view; the whole root when the view has as many bytes."""
    nbytes = array.nbytes
    if nbytes == root.nbytes:
        return whole
    if not array.size:
        return whole[0], 0, 0
    low = address_of(array) - root_address
    high = low + array.itemsize
    if array.flags.c_contiguous:
        high = low + nbytes
    else:
        for count, step in zip(array.shape, array.strides, strict=True):
            if count > 1 and step < 0:
                low += (count - 1) * step
            elif count > 1:
                high += (count - 1) * step
    low = min(max(low, 0), root.nbytes)  # memory of others may have gaps that nbytes leaves out
    return whole[0], low, max(low, min(high, root.nbytes))


def address_of(array: Any) -> int:
    """Where an array's first element is."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
