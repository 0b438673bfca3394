"""Every step between lower sets, with what it costs.

Costs are whole numbers of units, so that tables may go by times.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
INFINITE = 1 << 61
LEVELS = 4000
"""Costs are counted in at most so many levels, wherever that is not exact anyway."""
FINE = LEVELS // 4
"""The most costs of which each is rounded to its own nearest level."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo one are spread evenly, also over every n-th of them."""


class Units(NamedTuple):
    """Costs as whole numbers, for tables of times; ``total`` of None: they are too fine for one."""

    costs: npt.NDArray[Any]
    total: int | None


def units(costs: tuple[float, ...], *, exact: bool) -> Units:
    """Costs in units of their greatest common divisor.

    Where they are not whole numbers, or too many units: rounded to one of ``LEVELS`` levels of
    their sum, unless they have to be ``exact``. More than ``FINE`` are rounded up or down in turn.
    """
    if all(float(cost).is_integer() for cost in costs):
        whole = [int(cost) for cost in costs]
        unit = gcd(*whole) or 1
        if sum(whole) // unit <= 4 * LEVELS:
            found = np.array([cost // unit for cost in whole], np.int64)
            return Units(found, int(found.sum()))
        if exact and sum(whole) < 1 << 62:
            return Units(np.array(whole, np.int64), None)
    if exact:
        return Units(np.array(costs, np.float64), None)
    level = max(sum(costs) / LEVELS, sys.float_info.min * sys.float_info.epsilon)  # not zero
    if len(costs) <= FINE:
        found = np.array([round(cost / level) for cost in costs], np.int64)
    else:
        # Of so many, each may be less than half a level: up or down in turn, so that sums hold.
        turns = np.arange(len(costs)) * GOLDEN % 1
        found = np.floor(np.array([cost / level for cost in costs]) + turns).astype(np.int64)
    return Units(found, int(found.sum()))


class Hop(NamedTuple):
    """A step of a chain: from a lower set to a larger one, by numbers, in one of its kinds."""

    source: int
    target: int
    kind: int


Chain = tuple[Hop, ...]


@dataclass(frozen=True)
class Table:
    """The costs of every step: arrays of [kind, target, source].

    Attributes:
        sets: the lower sets as bit masks, sorted by size, from the empty set to all nodes.
        peak: the most bytes while the step's block is worked on, above what is cached before;
            INFINITE where there is no such step.
        cached: the bytes that the step adds to what is cached.
        time: its overhead, in units.
        rest: the cost of everything outside each set, in units.
        levels: the overhead of everything in units, None where they are too fine for a table.
    """

    sets: tuple[int, ...]
    peak: Ints
    cached: Ints
    time: npt.NDArray[Any]
    rest: npt.NDArray[Any]
    levels: int | None

    def every(self, step: int) -> Table:
        """The table with only one set in so many, the first and the last among them."""
        return self._of(np.unique([*range(0, len(self.sets), step), len(self.sets) - 1]))

    def of(self, sets: tuple[int, ...]) -> Table | None:
        """The table with these sets only; None where it has not all of them."""
        place = {mask: i for i, mask in enumerate(self.sets)}
        if any(mask not in place for mask in sets):
            return None
        return self._of(np.array([place[mask] for mask in sets]))

    def _of(self, some: npt.NDArray[np.int64]) -> Table:
        at = np.ix_(np.arange(len(self.peak)), some, some)
        sets = tuple(self.sets[i] for i in some)
        return Table(
            sets, self.peak[at], self.cached[at], self.time[at], self.rest[some], self.levels
        )

    @cached_property
    def least(self) -> int:
        """The smallest budget that a chain fits."""
        low, high = 0, _attempt(self, INFINITE - 1).peak
        while low < high:
            found = _attempt(self, (low + high) // 2)
            if found.fits:
                high = found.peak
            else:
                low = found.next_budget
        return high


class _Attempt(NamedTuple):
    """A try at a budget: does a chain fit, in how many bytes, and which peak is the next larger?"""

    fits: bool
    peak: int
    next_budget: int


def _attempt(table: Table, budget: int) -> _Attempt:
    """The chain that caches least within a budget: of cached bytes, less is never worse."""
    count = len(table.sets)
    cached = np.full(count, INFINITE, np.int64)
    highest = np.full(count, INFINITE, np.int64)
    cached[0] = highest[0] = 0
    rejected = INFINITE
    for target in range(1, count):
        before = cached[:target]
        peaks = np.minimum(table.peak[:, target, :target] + before, INFINITE)
        fits = peaks <= budget
        over = peaks[~fits]
        if over.size:
            rejected = min(rejected, int(over.min()))
        after = np.where(fits, before + table.cached[:, target, :target], INFINITE)
        place = int(after.argmin())
        kind, source = divmod(place, target)
        if after[kind, source] < INFINITE:
            cached[target] = after[kind, source]
            highest[target] = max(highest[source], peaks[kind, source])
    return _Attempt(bool(cached[-1] < INFINITE), int(highest[-1]), rejected)


def peak_of(table: Table, chain: Chain) -> int:
    """The most bytes that a chain takes."""
    cached = peak = 0
    for source, target, kind in chain:
        peak = max(peak, cached + int(table.peak[kind, target, source]))
        cached += int(table.cached[kind, target, source])
    return peak


def time_of(table: Table, chain: Chain) -> float:
    """The overhead of a chain, in units."""
    return float(sum(table.time[kind, target, source].item() for source, target, kind in chain))
