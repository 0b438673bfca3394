"""Updates of NumPy arrays with 8-bit states, in one compiled loop over the blocks.

Numba (extra `fast`) compiles it when it is first used, without fast math: a product is rounded
before it is added, so that the bits equal `on_numpy`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from umem.chainer.optimizers.quantized_state import BLOCK, QuantizedState
from umem.chainer.optimizers.steps import AdamStep, Step

Array = np.ndarray[Any, Any]


class CompiledUpdate:
    """Updates chunks of a parameter by a loop compiled by Numba.

    Args:
        loop: a result of `compiled`.
    """

    chunk = 128 << 10

    def __init__(self, loop: Callable[..., None]) -> None:
        self._loop = loop
        self._values = np.empty((2, BLOCK), np.float32)

    def run(self, step: Step, x: Array, grad: Array, states: Sequence[QuantizedState]) -> None:
        """Update a chunk of whole blocks; only the parameter's last may be shorter. ``x`` may be
        float64.
        """
        numbers: list[Any] = [np.float32(number) for number in step]
        if isinstance(step, AdamStep):
            numbers[-1] = x.dtype.type(step.decay)
        maps = (part for state in states for part in (state.map.values, state.map.table))
        arrays = (part for state in states for part in (state.codes, state.scales))
        self._loop(x, grad, *arrays, *maps, *numbers, *self._values[: len(states)])


@cache
def compiled(step: str) -> Callable[..., None] | None:
    """Compile the loop of a step by the step's name; None if Numba cannot be imported.

    Cost: about two seconds and some 60 MiB, once a process.
    """
    try:
        import numba
    except ImportError:  # also one that does not know this NumPy yet
        return None
    # As NumPy divides: Python's rule needs a branch at each division, and prevents vector code.
    jit = numba.njit(nogil=True, error_model="numpy")
    made: Callable[..., None] = jit((_adam if step == "AdamStep" else _momentum)(jit(_quantize)))
    return made


def _quantize(values: Array, codes: Array, scales: Array, block: int, table: Array) -> None:
    """Quantise one block of a state from its values, which are overwritten."""
    count = len(codes)
    bits = values.view(np.uint32)
    peak = np.uint32(0)
    for i in range(count):  # as integers, which have the order of absolute values
        peak = max(peak, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    whole = scales.view(np.uint32)
    whole[block] = peak
    scale = scales[block]
    if scale == 0:
        scale = np.float32(1)
    for i in range(count):
        values[i] = values[i] / scale
    for i in range(count):
        flip = np.uint32(np.uint32(np.int32(bits[i]) >> np.int32(31)) & np.uint32(0xFFFF))
        low = np.uint32(np.uint32(bits[i] & np.uint32(0xFFFF)) ^ flip)
        found = np.uint32(table[bits[i] >> np.uint32(16)] + low)
        codes[i] = np.uint8(found >> np.uint32(16))


def _adam(quantize: Callable[..., None]) -> Callable[..., None]:
    """Make the function that Numba compiles: one Adam step over all blocks of a chunk."""

    def adam(  # type: ignore[no-untyped-def]
        x, grad, m_codes, m_scales, v_codes, v_scales, m_map, m_table, v_map, v_table,
        first_rate, second_rate, rate, eps, scale, decay, m, v,
    ):  # fmt: skip
        """Update a chunk and both moments in place."""
        for block in range(len(m_scales)):
            start = block * BLOCK
            stop = min(len(x), start + BLOCK)
            m_scale, v_scale = m_scales[block], v_scales[block]
            part, slope = x[start:stop], grad[start:stop]
            m_part, v_part = m_codes[start:stop], v_codes[start:stop]
            for i in range(stop - start):  # a loop of its own, so that the next one is vectorised
                m[i], v[i] = m_map[m_part[i]], v_map[v_part[i]]
            for i in range(stop - start):
                g, m_now, v_now = slope[i], m[i] * m_scale, v[i] * v_scale
                m_now += first_rate * (g - m_now)
                v_now += second_rate * (g * g - v_now)
                m[i], v[i] = m_now, v_now
                part[i] = decay * part[i] + scale * (rate / (np.sqrt(v_now) + eps) * m_now)
            quantize(m, m_part, m_scales, block, m_table)
            quantize(v, v_part, v_scales, block, v_table)

    return adam


def _momentum(quantize: Callable[..., None]) -> Callable[..., None]:
    """Make the function that Numba compiles: one momentum SGD step over all blocks of a chunk."""

    def momentum(x, grad, codes, scales, values, table, keep, rate, v):  # type: ignore[no-untyped-def]
        """Update a chunk and its velocity in place."""
        for block in range(len(scales)):
            start = block * BLOCK
            stop = min(len(x), start + BLOCK)
            scale = scales[block]
            part, slope, codes_part = x[start:stop], grad[start:stop], codes[start:stop]
            for i in range(stop - start):
                v[i] = values[codes_part[i]]
            for i in range(stop - start):
                v[i] = keep * (v[i] * scale) - rate * slope[i]
                part[i] += v[i]
            quantize(v, codes_part, scales, block, table)

    return momentum
