"""Random numbers that are the same on every NumPy version, and ties drawn with them."""

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
        draw: makes edges, as numbers, of a number of draws; some may be dropped or equal.
        count: of different ties.
        function: the caller's name, for the error.
        where: names the place that has too few, for the error.

    Raises:
        SizeError: many draws gave fewer.
    """
    ties = np.empty(0, np.int64)
    drawn, drawn_at_most = 0, 32 * count + 200_000
    while len(ties) < count:
        if drawn > drawn_at_most:
            raise SizeError(
                f"{function}: {drawn} draws gave only {len(ties)} of {count} different ties "
                f"{where}. Ask for fewer ties, or for more nodes."
            )
        batch = max(2 * (count - len(ties)), len(ties) // 4, 1024)
        batch = min(batch + batch % 2, _DRAWS_PER_ROUND)  # even: no half of a 64-bit draw is lost
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
        function: whose arguments they are.
        ranges: by name, an argument, the least and the most that it may be.

    Raises:
        SizeError: one is not.
    """
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise SizeError(f"{function}: {name} must be {low} to {high} here; got {value}")
