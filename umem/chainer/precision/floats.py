"""Rounding of arrays to float16.

A number too large for float16 becomes infinite, without a warning: the loss scale checks for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer.backend import get_array_module

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
LARGEST = 65504.0
"""The largest finite number of float16."""


def quiet() -> Any:
    """Return a context in which NumPy does not warn of overflow and invalid values.

    The loss scale checks for infinities in the gradients instead.
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
        The gradients of x, rounded to float16, and of gamma and beta, in float32.
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
