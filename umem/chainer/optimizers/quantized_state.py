"""State of an optimizer in blocks of 256 values: a byte for each, and a float32 for the block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from umem.chainer.optimizers.dynamic_map import DynamicMap, dynamic_map

BLOCK = 256
"""Values that share a scale, the largest of their absolute values. The paper has 2,048. With fewer,
a large value costs fewer others their digits; no measurement compares the two."""
CHUNK = 32 << 10
"""Values quantised at once; with temporaries they fit the cache. A guess, not measured."""
CODES, SCALES = "_codes", "_scales"
"""Suffixes to a state's name in files; under the plain name Chainer would load codes as values."""


class QuantizedState(NamedTuple):
    """One state of a parameter, flattened in C order: codes and scales.

    Attributes:
        codes: a byte for each element; uint8.
        scales: the factor of each block's codes; float32.
        map: from codes to values.
    """

    codes: Any
    scales: Any
    map: DynamicMap

    def part(self, start: int, stop: int) -> QuantizedState:
        """Return the state of a range of elements; ``start`` must begin a block."""
        scales = self.scales[start // BLOCK : block_count(stop)]
        return QuantizedState(self.codes[start:stop], scales, self.map)


def block_count(size: int) -> int:
    """Return the number of blocks of ``size`` values; the last may be shorter."""
    return -(-size // BLOCK)


def zeros(xp: Any, shape: tuple[int, ...], signed: bool) -> tuple[Any, Any]:
    """Make codes and scales of an all-zero state, as arrays of module ``xp``."""
    size = int(np.prod(shape, dtype=np.int64))
    codes = xp.full(shape, dynamic_map(signed).zero, dtype=np.uint8)
    return codes, xp.zeros(block_count(size), dtype=np.float32)


class Scratch:
    """Quantises chunks of whole blocks on NumPy, reusing its temporaries.

    Args:
        size: values of the largest chunk; 28 bytes are kept for each.
    """

    def __init__(self, size: int) -> None:
        padded = block_count(size) * BLOCK
        self._index = np.empty(padded, np.intp)  # `take` would convert any other type to this
        self._low, self._found = (np.empty(padded, np.uint32) for _ in range(2))
        self._absolute = np.empty(padded, np.float32)

    def dequantize(self, state: QuantizedState, out: np.ndarray[Any, Any]) -> None:
        """Write a state's values to ``out``, which has whole blocks; the rest is set to 0."""
        count = len(state.codes)
        index = self._index[: len(out)]
        index[:count] = state.codes
        index[count:] = state.map.zero
        state.map.values.take(index, out=out, mode="clip")
        blocks = out.reshape(-1, BLOCK)
        blocks *= state.scales[:, None]

    def quantize(self, values: np.ndarray[Any, Any], state: QuantizedState) -> None:
        """Quantise finite values, which are overwritten; the rest of the last block must be 0."""
        size, count = len(values), len(state.codes)
        self._scale(values, state)
        bits = values.view(np.uint32)
        index, low, found = (a[:size] for a in (self._index, self._low, self._found))
        np.right_shift(bits, 16, out=low)
        index[:] = low
        np.bitwise_and(bits, 0xFFFF, out=low)
        if state.map.signed:
            np.right_shift(values.view(np.int32), 31, out=found.view(np.int32))
            found &= 0xFFFF
            low ^= found
        state.map.table.take(index, out=found, mode="clip")
        found += low
        found >>= 16
        state.codes[...] = found[:count]

    def _scale(self, values: np.ndarray[Any, Any], state: QuantizedState) -> None:
        """Divide each block by its largest absolute value, and return that; zero blocks are
        unchanged.
        """
        absolute = self._absolute[: len(values)]
        np.abs(values, out=absolute)
        absolute.reshape(-1, BLOCK).max(axis=1, out=state.scales)
        blocks = values.reshape(-1, BLOCK)
        blocks /= np.where(state.scales > 0, state.scales, np.float32(1))[:, None]


def quantized(values: np.ndarray[Any, Any], signed: bool) -> tuple[Any, Any]:
    """Quantise finite values chunk by chunk; float32 temporaries take at most a chunk."""
    codes, scales = zeros(np, values.shape, signed)
    state = QuantizedState(codes.reshape(-1), scales, dynamic_map(signed))
    scratch = Scratch(min(values.size, CHUNK))
    for start in range(0, values.size, CHUNK):
        part = state.part(start, min(values.size, start + CHUNK))
        chunk = np.zeros(len(part.scales) * BLOCK, np.float32)
        chunk[: len(part.codes)] = values.flat[start : start + CHUNK]
        scratch.quantize(chunk, part)
    return codes, scales


def dequantized(codes: Any, scales: Any, signed: bool, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the values of codes and scales."""
    values = np.empty(codes.shape, dtype)
    flat = values.reshape(-1)
    state = QuantizedState(codes.reshape(-1), scales, dynamic_map(signed))
    scratch = Scratch(min(values.size, CHUNK))
    for start in range(0, values.size, CHUNK):
        part = state.part(start, min(values.size, start + CHUNK))
        chunk = np.empty(len(part.scales) * BLOCK, np.float32)
        scratch.dequantize(part, chunk)
        flat[start : start + CHUNK] = chunk[: len(part.codes)]
    return values
