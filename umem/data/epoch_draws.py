"""Draw an epoch's order, the same on every NumPy: from raw bits, by integer arithmetic alone.

The bits come from Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011) with the seed and the epoch as its key, so any epoch can be drawn without earlier ones.
NumPy promises to keep these bits, but not the results of ``permutation`` and ``choice``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.errors import SizeError

Order = npt.NDArray[np.int64]
_HIGH = np.uint64(32)


class EpochBits:
    """Random bits that depend on seed and epoch alone.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._philox = np.random.Philox(counter=0, key=seed + (epoch << 64))

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        """Draw ``count`` integers of 64 bits."""
        return self._philox.random_raw(count)

    def below(self, limit: Any, count: int) -> Order:
        """Draw integers from 0 to ``limit`` - 1; ``limit`` is below 2**32, or an array of limits.

        It multiplies the high 32 bits by the limit (Lemire's method without its rejection), so no
        number is more than ``limit`` / 2**32 more likely than another.
        """
        scaled = (self.raw(count) >> _HIGH) * np.asarray(limit, np.uint64)
        return (scaled >> _HIGH).astype(np.int64)


Draw = Callable[[EpochBits, int], Any]
"""A function from an epoch's bits and an item count, and nothing else, to the epoch's order."""


def shuffle(bits: EpochBits, count: int) -> Order:
    """Draw a permutation: every item once, sorted by ``count`` random keys of 64 bits."""
    return np.argsort(bits.raw(count), kind="stable").astype(np.int64, copy=False)


def with_replacement(bits: EpochBits, count: int) -> Order:
    """Draw items uniformly with replacement."""
    return bits.below(count, count)


@dataclass(frozen=True)
class Weighted:
    """Draws items with replacement, with probabilities proportional to given weights.

    Args:
        weights: one weight an item: finite, not negative, and not all zero. They are rounded
            down to integers, with the largest weight as 2**40.

    Raises:
        SizeError: the weights are invalid.
    """

    weights: Any
    _ends: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, np.float64)
        if weights.ndim != 1 or not weights.size or not np.isfinite(weights).all():
            raise SizeError("weights must be finite numbers, one for each item")
        if weights.min() < 0 or weights.max() <= 0:
            raise SizeError("weights must not be negative, nor all zero")
        parts = np.floor(weights / weights.max() * (1 << 40)).astype(np.int64)
        object.__setattr__(self, "_ends", np.cumsum(parts))

    def __call__(self, bits: EpochBits, count: int) -> Order:
        """Draw an epoch's order."""
        _check_length("weights", len(self._ends), count)
        total = int(self._ends[-1])
        # 53 bits as a fraction of one: exact, and the product rounded as IEEE 754 says.
        fractions = (bits.raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        at = np.minimum((fractions * float(total)).astype(np.int64), total - 1)
        found = np.searchsorted(self._ends, at, side="right")
        return found.astype(np.int64, copy=False)


@dataclass(frozen=True)
class ClassBalanced:
    """Draws a label uniformly, then an item with that label, uniformly.

    Args:
        labels: one label an item, of any sortable type.
    """

    labels: Any
    _groups: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or not labels.size:
            raise SizeError("labels must be one for each item")
        _, group = np.unique(labels, return_inverse=True)
        counts = np.bincount(group)
        items = np.argsort(group, kind="stable").astype(np.int64)
        object.__setattr__(self, "_groups", (items, np.cumsum(counts) - counts, counts))

    def __call__(self, bits: EpochBits, count: int) -> Order:
        """Draw an epoch's order."""
        items, starts, counts = self._groups
        _check_length("labels", len(items), count)
        group = bits.below(len(counts), count)
        found: Order = items[starts[group] + bits.below(counts[group], count)]
        return found


def _check_length(name: str, length: int, count: int) -> None:
    if length != count:
        raise SizeError(f"{length} {name} for {count} items: give one for each item")


def check_seed(seed: Any) -> int:
    """Return a seed as an int.

    Raises:
        SizeError: it is not an integer from 0 to 2**64 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise SizeError(f"seed must be an int from 0 to 2**64 - 1; got {seed!r}")
    return int(seed)


def largest(count: int) -> int:
    """Return the number of epochs that can be searched for an order in about a second.

    A guess: about 20 million items are drawn and compared in that time.
    """
    return max(2, min(10_000, math.ceil(2e7 / max(count, 1))))
