"""The 256 values of a byte of optimizer state, and the nearest of them to a float32.

Dynamic quantisation of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861): 0, and values over seven powers of ten up to 1; smaller values have fewer
digits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

VERSION = 1
"""Version of the map from bytes to values, saved with every state."""
EXPONENTS = 7
"""Powers of ten that the values span, as in the paper."""
PREFIX_BITS = 16
LOW = 0xFFFF
"""The low bits of a float32 that the lookup table by prefix ignores."""


class DynamicMap(NamedTuple):
    """A map between bytes and 256 values: signed or unsigned.

    Attributes:
        values: the value of each code, ascending; float32.
        table: finds the nearest code of a float32 from -1 to 1. With its upper 16 bits as the
            index and its lower as ``low`` (all of them flipped for a negative number), the code
            is ``(table[index] + low) >> 16``; uint32. No prefix spans more than two codes, so
            that one carry tells which.
        zero: the code of 0.
        signed: whether there are negative values.
    """

    values: np.ndarray[Any, Any]
    table: np.ndarray[Any, Any]
    zero: int
    signed: bool


@cache
def dynamic_map(signed: bool) -> DynamicMap:
    """Return the map for signed or unsigned states, computed once."""
    values = _values(signed)
    table = _table(values)
    for array in (values, table):
        array.flags.writeable = False
    return DynamicMap(values, table, int(np.flatnonzero(values == 0)[0]), signed)


def _values(signed: bool) -> np.ndarray[Any, Any]:
    """Compute the 256 values: for each power of ten, midpoints of equal parts of 0.1 to 1."""
    found = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        # The sign takes a bit, so that the unsigned map has twice as many parts.
        borders = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        middles = 10.0 ** (exponent + 1 - EXPONENTS) * (borders[:-1] + borders[1:]) / 2
        found += [*middles, *(-middles if signed else ())]
    return np.array(sorted(found), np.float32)


def _table(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Compute the lookup table; a value half-way between two codes gets the lower code."""
    edges = _edges(values)
    prefix = np.arange(1 << PREFIX_BITS, dtype=np.uint32) << np.uint32(PREFIX_BITS)
    ends = np.nan_to_num(np.stack([prefix, prefix | LOW]).view(np.float32), nan=0.0)
    first, last = (np.searchsorted(edges, end) for end in (ends.min(axis=0), ends.max(axis=0)))
    edge_low = (edges.view(np.uint32) & LOW)[np.minimum(first, len(edges) - 1)].astype(np.int64)
    is_negative = prefix >> np.uint32(31) != 0
    last_of_first = np.where(is_negative, LOW - edge_low, edge_low)
    last_of_first[first == last] = LOW
    table: np.ndarray[Any, Any] = (first << PREFIX_BITS) + LOW - last_of_first
    return table.astype(np.uint32)


def _edges(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Compute the largest float32 that rounds to each code except the last."""
    middles = (values[:-1].astype(np.float64) + values[1:]) / 2  # exact in float64
    edges: np.ndarray[Any, Any] = middles.astype(np.float32)
    below = np.nextafter(edges, np.float32(-np.inf))
    edges[edges > middles] = below[edges > middles]
    return edges
