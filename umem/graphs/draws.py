"""Random numbers that are the same on every NumPy version, and random edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from umem.errors import SizeError
from umem.graphs.csr import Array

INT32_MAX = 2**31 - 1
_DRAWS_PER_ROUND = 1 << 20


def draws(bits: np.random.PCG64, count: int) -> npt.NDArray[np.uint32]:
    """Draw ``count`` integers of 32 bits."""
    raw: Array = bits.random_raw((count + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:count]


def below(bits: np.random.PCG64, count: int, limit: int | Array) -> Array:
    """Draw ``count`` int32 from 0 to ``limit`` - 1; ``limit`` may be an array."""
    scaled: Array = draws(bits, count).astype(np.uint64) * np.asarray(limit, np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int32)


def different_ties(draw: Callable[[int], Array], count: int, *, function: str, where: str) -> Array:
    """Draw ``count`` different edges, int64, in the order drawn.

    Args:
        draw: returns coded edges from a number of draws; some may be dropped or equal.
        count: number of different edges.
        function: the caller's name, for the error.
        where: the place of the edges and the reason, for the error.

    Raises:
        SizeError: many draws gave too few edges.
    """
    ties = np.empty(0, np.int64)
    drawn, drawn_at_most = 0, 32 * count + 200_000
    while len(ties) < count:
        if drawn > drawn_at_most:
            raise SizeError(
                f"{function}: {drawn} draws gave only {len(ties)} of {count} different edges "
                f"{where}. Ask for fewer edges or more nodes."
            )
        batch = max(2 * (count - len(ties)), len(ties) // 4, 1024)
        batch = min(batch + batch % 2, _DRAWS_PER_ROUND)  # even: wastes no half of a 64-bit draw
        drawn += batch
        ties = _without_repeats(np.concatenate([ties, draw(batch)]))
    return ties[:count]


def _without_repeats(values: Array) -> Array:
    """Return the first occurrence of each value, in order."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def check_arguments(function: str, **ranges: tuple[int, int, int]) -> None:
    """Check that arguments are in range.

    Args:
        function: the function of the arguments, for the error.
        ranges: by name, an argument, its minimum and its maximum.

    Raises:
        SizeError: an argument is out of range.
    """
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise SizeError(f"{function}: {name} must be {low} to {high} here; got {value}")
