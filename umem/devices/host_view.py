"""A NumPy array over memory that something else owns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np


def host_view(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any, owner: Any
) -> np.ndarray[Any, Any]:
    """The memory at ``address`` as a writable array, which keeps ``owner`` alive.

    Nothing is copied or checked: the host must be able to reach every byte. Any strides will do.
    """
    dtype = np.dtype(dtype)
    if not all(shape):
        return np.empty(shape, dtype)
    reach = [(count - 1) * step for count, step in zip(shape, strides, strict=True)]
    low = sum(step for step in reach if step < 0)
    nbytes = sum(step for step in reach if step > 0) - low + dtype.itemsize
    buffer: Any = (ctypes.c_ubyte * nbytes).from_address(address + low)
    buffer.owner = owner  # the array's base is the buffer, so both live as long as any view
    return np.ndarray(shape, dtype, buffer, -low, strides)


def unmanaged_text(shape: Sequence[int]) -> str:
    """Why an array has no host view."""
    return (
        f"an array of shape {tuple(shape)} is not managed memory of this device, so the host "
        "cannot see it; allocate it under umem.managed(), or copy it with .get()"
    )
