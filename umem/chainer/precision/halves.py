"""Chainer's functions on halves of NumPy: computed as float32, and rounded once at the end.

NumPy adds and multiplies halves one by one, and sums them up in float16, which loses digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from umem.chainer.precision.floats import HALF, SINGLE, layer_norm_back, quiet, to_half
from umem.trace.analysis.half_functions import MOVES

Proceed = Callable[..., Any]
_AS_THEY_ARE = MOVES | {"Cast"}
"""Functions that give the numbers that they are given, views of them too."""


def evaluate(proceed: Proceed, func: Any, inputs: Any) -> Any:
    """Compute a function that `umem.chainer.tap` tells of; as float32 where it reads halves alone.

    Arrays that the function keeps on itself stay float32.
    """
    with quiet():
        if type(func).__name__ in _AS_THEY_ARE or not _are_halves(inputs):
            return proceed(func, inputs)
        return _rounded(proceed(func, _singles(inputs)))


def from_columns(proceed: Proceed, func: Any, *arrays: Any) -> Any:
    """As `evaluate`, for convolutions and poolings; a convolution's arrays are not in a tuple."""
    if isinstance(arrays[0], tuple):
        return evaluate(proceed, func, arrays[0])
    with quiet():
        if not _are_halves(arrays):
            return proceed(func, *arrays)
        return _rounded(proceed(func, *_singles(arrays)))


def layer_norm_gradients(proceed: Proceed, func: Any, indexes: Any, gradients: Any) -> Any:
    """Go backward through a layer normalisation at once, which Chainer does in 30 functions."""
    x, gamma, gy = func.inputs[0].data, func.inputs[1].data, gradients[0].array
    if chainer.config.enable_backprop or not _are_halves((x, gy)):
        return proceed(func, indexes, gradients)
    with quiet():
        found = _rounded(layer_norm_back(x, gamma.astype(SINGLE), gy, func.eps))
    return tuple(chainer.Variable(found[index]) for index in indexes)


def _are_halves(inputs: Any) -> bool:
    """Whether all floating-point arrays of NumPy among some inputs are halves, and one is."""
    return {x.dtype for x in inputs if type(x) is np.ndarray and x.dtype.kind == "f"} == {HALF}


def _singles(inputs: Any) -> tuple[Any, ...]:
    return tuple(x.astype(SINGLE) if getattr(x, "dtype", None) == HALF else x for x in inputs)


def _rounded(outputs: Any) -> tuple[Any, ...]:
    return tuple(to_half(y) if getattr(y, "dtype", None) == SINGLE else y for y in outputs)
