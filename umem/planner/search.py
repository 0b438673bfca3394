"""Dynamic programming over chains of lower sets.

Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of Recomputation
Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019, sections 4.2 to 4.4:
``opt[L, t]`` is the least that is cached when a chain has come to the lower set L with the
overhead t. What differs: the least budget is found without t; a step may come in several kinds;
each row is closed before it is used, because the sets are sorted by size; for the objective
``memory`` a row keeps every t, not only the Pareto front.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.plans import Objective

Ints = npt.NDArray[np.int64]
INFINITE = 1 << 61
LEVELS = 4000
"""Costs are counted in at most so many levels, wherever that is not exact anyway."""
FINE = LEVELS // 4
"""Up to so many costs, each is rounded to its own nearest level."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo one are spread evenly, also over every n-th of them."""
COARSE = 128
"""With more lower sets than that, some of them alone give a first chain to beat."""
_CHUNK = 1 << 22


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
        some = np.unique([*range(0, len(self.sets), step), len(self.sets) - 1])
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


def best(table: Table, budget: int, objective: Objective) -> Chain | None:
    """The chain with the least overhead within a budget (``time``), or with the most (``memory``).

    None where no chain fits.
    """
    if table.levels is None:
        return _best_of_labels(table, budget, objective)
    return _best_of_rows(table, budget, objective, table.levels)


# -- times that fit a table --------------------------------------------------------------------


def _best_of_rows(table: Table, budget: int, objective: Objective, levels: int) -> Chain | None:
    """Rows by time; what cannot beat a chain of few sets is left out."""
    count = len(table.sets)
    low = np.zeros(count, np.int64)
    if count > COARSE and (known := best(table.every(4), budget, objective)):
        if objective == "time":
            levels = int(time_of(table.every(4), known))
        else:
            low = np.maximum(int(time_of(table.every(4), known)) - table.rest, 0)
    rows = np.full((count, levels + 1), INFINITE, np.int64)
    rows[0, 0] = 0
    flat = rows.reshape(-1)
    for source in range(count - 1):
        times, cached = _front(rows[source], objective)
        inside = times >= low[source]
        times, cached = times[inside], cached[inside]
        if times.size:
            for kind in range(len(table.peak)):
                _push(table, flat, kind, source, times, cached, budget)
    times, _ = _front(rows[-1], objective)
    if not times.size:
        return None
    time = int(times[-1] if objective == "memory" else times[0])
    return _walk_back(table, rows, time, budget)


def _front(row: Ints, objective: Objective) -> tuple[Ints, Ints]:
    """The times that are reached, and what is cached with each; for ``time`` only the front."""
    if objective == "time":
        before = np.concatenate(([INFINITE], np.minimum.accumulate(row)[:-1]))
        reached = np.flatnonzero(row < before)
    else:
        reached = np.flatnonzero(row < INFINITE)
    return reached, row[reached]


def _push(
    table: Table, flat: Ints, kind: int, source: int, times: Ints, cached: Ints, budget: int
) -> None:
    """Take every step out of a source."""
    width = flat.size // len(table.sets)
    after = slice(source + 1, None)
    possible = table.peak[kind, after, source] <= budget - int(cached.min())
    possible &= table.time[kind, after, source] < width - int(times[0])
    targets = np.flatnonzero(possible) + source + 1
    step = max(1, _CHUNK // times.size)
    for start in range(0, targets.size, step):
        some = targets[start : start + step]
        room = budget - table.peak[kind, some, source]
        left = width - table.time[kind, some, source]
        base = some * width + table.time[kind, some, source]
        places = base[:, None] + times
        values = table.cached[kind, some, source][:, None] + cached
        fits = (cached <= room[:, None]) & (times < left[:, None])
        places, values = places[fits], values[fits]
        flat[places] = np.minimum(flat[places], values)


def _walk_back(table: Table, rows: Ints, time: int, budget: int) -> Chain:
    links: list[Hop] = []
    target = len(rows) - 1
    while target:
        cached = rows[target, time]
        before = time - table.time[:, target, :target]
        sources = np.arange(target)
        held = np.where(before >= 0, rows[sources, np.maximum(before, 0)], INFINITE)
        good = held + table.cached[:, target, :target] == cached
        good &= held + np.minimum(table.peak[:, target, :target], INFINITE) <= budget
        kind, source = map(int, np.argwhere(good)[0])
        links.append(Hop(source, target, kind))
        target, time = source, int(before[kind, source])
    return tuple(reversed(links))


# -- times that do not -------------------------------------------------------------------------


class _Labels(NamedTuple):
    """The labels that reach a lower set: time, bytes cached, and the label it comes from."""

    time: npt.NDArray[Any]
    cached: Ints
    kind: Ints
    source: Ints
    place: Ints


def _best_of_labels(table: Table, budget: int, objective: Objective) -> Chain | None:
    none = np.full(1, -1, np.int64)
    zero = np.zeros(1, table.time.dtype)
    reached = [_Labels(zero, np.zeros(1, np.int64), none, none, none)]
    for target in range(1, len(table.sets)):
        reached.append(_into(table, reached, target, budget, objective))
    last = reached[-1]
    if not last.time.size:
        return None
    place = int(last.time.argmax() if objective == "memory" else last.time.argmin())
    links: list[Hop] = []
    target = len(table.sets) - 1
    while target:
        labels = reached[target]
        source, kind = int(labels.source[place]), int(labels.kind[place])
        links.append(Hop(source, target, kind))
        target, place = source, int(labels.place[place])
    return tuple(reversed(links))


def _into(
    table: Table, reached: list[_Labels], target: int, budget: int, objective: Objective
) -> _Labels:
    found: list[_Labels] = []
    for kind in range(len(table.peak)):
        for source in np.flatnonzero(table.peak[kind, target, :target] <= budget):
            labels = reached[source]
            peak = int(table.peak[kind, target, source])
            place = np.flatnonzero(labels.cached + peak <= budget)
            time = labels.time[place] + table.time[kind, target, source]
            cached = labels.cached[place] + table.cached[kind, target, source]
            same = np.full(place.size, source), np.full(place.size, kind)
            found.append(_Labels(time, cached, same[1], same[0], place))
    if not found:
        nothing = np.zeros(0, np.int64)
        return _Labels(nothing, nothing, nothing, nothing, nothing)
    every = _Labels(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    order = np.lexsort((every.cached, every.time))
    time, cached = every.time[order], every.cached[order]
    if objective == "time":
        before = np.concatenate(([INFINITE], np.minimum.accumulate(cached)[:-1]))
        kept = cached < before[: cached.size]
    else:
        kept = np.concatenate(([True], time[1:] != time[:-1]))[: time.size]
    return _Labels(*(part[order[kept]] for part in every))
