"""Chainer's functions on NumPy's float16 arrays: computed in float32, rounded once at the end.

NumPy itself adds and multiplies float16 numbers singly, and accumulates sums in float16, which
loses digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from umem.chainer.precision.floats import HALF, SINGLE, layer_norm_back, quiet, to_half
from umem.chainer.precision.half_functions import MOVES

Proceed = Callable[..., Any]
_AS_THEY_ARE = MOVES | {"Cast"}
"""Functions that only move or cast numbers, which need no float32; some return views."""


def evaluate(proceed: Proceed, func: Any, *arrays: Any) -> Any:
    """Compute a function, in float32 if its floating-point arrays are all NumPy's float16.

    Its outputs are then rounded to float16; its function state stays float32.

    Args:
        proceed: computes the function.
        func: the function.
        arrays: one tuple of inputs, or, for a convolution by columns, the inputs themselves.
    """
    is_tuple = isinstance(arrays[0], tuple)
    inputs = arrays[0] if is_tuple else arrays
    with quiet():
        if type(func).__name__ in _AS_THEY_ARE or not _are_halves(inputs):
            return proceed(func, *arrays)
        singles = _singles(inputs)
        return _rounded(proceed(func, singles) if is_tuple else proceed(func, *singles))


def layer_norm_gradients(proceed: Proceed, func: Any, indexes: Any, gradients: Any) -> Any:
    """Compute the gradients of a layer normalisation of float16 arrays at once, in float32.

    Chainer's own thirty functions run instead for other arrays, and for double backprop.
    """
    x, gamma, gy = func.inputs[0].data, func.inputs[1].data, gradients[0].array
    if chainer.config.enable_backprop or not _are_halves((x, gy)):
        return proceed(func, indexes, gradients)
    with quiet():
        found = _rounded(layer_norm_back(x, gamma.astype(SINGLE), gy, func.eps))
    return tuple(chainer.Variable(found[index]) for index in indexes)


def _are_halves(inputs: Any) -> bool:
    """Tell whether NumPy's floating-point arrays among some inputs, at least one, are float16."""
    return {x.dtype for x in inputs if type(x) is np.ndarray and x.dtype.kind == "f"} == {HALF}


def _singles(inputs: Any) -> tuple[Any, ...]:
    return tuple(x.astype(SINGLE) if getattr(x, "dtype", None) == HALF else x for x in inputs)


def _rounded(outputs: Any) -> tuple[Any, ...]:
    return tuple(to_half(y) if getattr(y, "dtype", None) == SINGLE else y for y in outputs)
