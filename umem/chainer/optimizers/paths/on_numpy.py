"""Updates of NumPy arrays with 8-bit states, in chunks that stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from umem.chainer.optimizers.quantized_state import (
    BLOCK,
    CHUNK,
    QuantizedState,
    Scratch,
    block_count,
)
from umem.chainer.optimizers.steps import AdamStep, MomentumStep, Step

Array = np.ndarray[Any, Any]


class NumpyUpdate:
    """Updates chunks of a parameter by NumPy operations.

    Args:
        size: the parameter's size; 40 bytes are kept for each element of a chunk.
    """

    chunk = CHUNK

    def __init__(self, size: int) -> None:
        padded = block_count(min(size, CHUNK)) * BLOCK
        self._scratch = Scratch(padded)
        self._values = np.empty((2, padded), np.float32)
        self._temporary = np.empty(padded, np.float32)

    def run(self, step: Step, x: Array, grad: Array, states: Sequence[QuantizedState]) -> None:
        """Update a chunk of whole blocks; only the parameter's last may be shorter. ``x`` may be
        float64.
        """
        padded = block_count(len(x)) * BLOCK
        values = [row[:padded] for row in self._values[: len(states)]]
        for value, state in zip(values, states, strict=True):
            self._scratch.dequantize(state, value)
        _step(step, x, grad, [value[: len(x)] for value in values], self._temporary[: len(x)])
        for value, state in zip(values, states, strict=True):
            self._scratch.quantize(value, state)


def _step(step: Step, x: Array, grad: Array, values: list[Array], temporary: Array) -> None:
    if isinstance(step, AdamStep):
        _adam(step, x, grad, values[0], values[1], temporary)
    else:
        _momentum(step, x, grad, values[0], temporary)


def _adam(step: AdamStep, x: Array, grad: Array, m: Array, v: Array, temporary: Array) -> None:
    """Update a chunk and dequantised moments in place, with the operations of the compiled loop."""
    np.subtract(grad, m, out=temporary)
    temporary *= step.first_rate
    m += temporary
    np.multiply(grad, grad, out=temporary)
    temporary -= v
    temporary *= step.second_rate
    v += temporary
    np.sqrt(v, out=temporary)
    temporary += step.eps
    np.divide(step.rate, temporary, out=temporary)
    temporary *= m
    temporary *= step.scale
    if step.decay != 1:
        x *= step.decay
    x += temporary


def _momentum(step: MomentumStep, x: Array, grad: Array, v: Array, temporary: Array) -> None:
    v *= step.momentum
    np.multiply(grad, step.rate, out=temporary)
    v -= temporary
    x += v
