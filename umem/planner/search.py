"""Dynamic programming over chains of lower sets.

Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of Recomputation
Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019, sections 4.2 to 4.4:
``opt[L, t]`` is the least that is cached when a chain has come to the lower set L with the
overhead t. Differences: the least budget is found without t; a step may come in several kinds;
each row is closed before it is used, because the sets are sorted by size; only the Pareto front of
a row is followed, for the objective ``memory`` that of long times and few bytes.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.plans import Objective
from umem.planner.step_table import INFINITE, Chain, Hop, Ints, Table, time_of

COARSE = 128
"""At most this many lower sets are searched without a first chain to beat.

With more, a search over every fourth of them finds that chain, or prices bound the rest of chains.
"""
PRICED = 1000
"""At most this many lower sets for which prices bound a chain's rest: the arrays take memory."""
HALF = 0.5
"""Half a unit: whole times that differ by less are the same."""
NARROW = 128
"""The first search is for chains within one part in this many above the lower bound of time."""
_CHUNK = 1 << 22
"""At most about this many entries of rows are updated at once."""


def best(table: Table, budget: int, objective: Objective) -> Chain | None:
    """Return the chain of least overhead within a budget, of most for the objective ``memory``.

    None where no chain fits.
    """
    if table.levels is None:
        return _best_of_labels(table, budget, objective)
    return _best_of_rows(table, budget, objective, table.levels)


# -- times that fit a table --------------------------------------------------------------------


def _best_of_rows(table: Table, budget: int, objective: Objective, levels: int) -> Chain | None:
    """Return the best chain by rows of time, without times that cannot beat a known chain."""
    count = len(table.sets)
    if objective == "time" and COARSE < count <= PRICED:
        return _best_by_price(table, budget, levels)
    low = np.zeros(count)
    some = table.every(4) if count > COARSE else table
    if some is not table and (known := best(some, budget, objective)):
        if objective == "time":
            levels = int(time_of(some, known))
        else:
            low = time_of(some, known) - table.rest
    return _rows(table, budget, objective, levels, _Worth(low, np.full(count, np.inf), 0))


def _best_by_price(table: Table, budget: int, levels: int) -> Chain | None:
    """Return the chain of least time, searched from a lower bound of all chains upwards."""
    relaxed = Relaxed(table, budget)
    priced = relaxed.best(levels + 1.0)
    if priced is None:
        return None
    least = max(0, ceil(relaxed.bound(priced) - HALF))
    most = min(levels, least + least // NARROW + 1)
    nothing = np.zeros(len(table.sets))
    while True:
        high = most + HALF + priced.price * budget - priced.rest
        chain = _rows(table, budget, "time", most, _Worth(nothing, high, priced.price))
        if chain is not None or most == levels:
            return chain
        most = min(levels, least + 4 * (most - least))


class _Worth(NamedTuple):
    """The bounds of the times that are followed, by lower set.

    A time is followed if it is at least ``low`` and, with ``price`` added for each cached byte, at
    most ``high``.
    """

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    price: float


def _rows(
    table: Table, budget: int, objective: Objective, levels: int, worth: _Worth
) -> Chain | None:
    """Return the best chain of at most ``levels`` units of time; None: no such chain fits."""
    count = len(table.sets)
    rows = np.full((count, levels + 1), INFINITE, np.int64)
    rows[0, 0] = 0
    flat = rows.reshape(-1)
    for source in range(count - 1):
        times, cached = _front(rows[source], objective)
        inside = times >= worth.low[source]
        inside &= times + worth.price * cached <= worth.high[source]
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
    """Return the times on the Pareto front, in order, and the bytes cached with each.

    A time is on it if no shorter one (for ``memory``, longer) is reached with as few bytes cached.
    """
    ranked = row if objective == "time" else row[::-1]
    before = np.concatenate(([INFINITE], np.minimum.accumulate(ranked)[:-1]))
    reached = np.flatnonzero(ranked < before)
    if objective == "memory":
        reached = row.size - 1 - reached[::-1]
    return reached, row[reached]


def _push(
    table: Table, flat: Ints, kind: int, source: int, times: Ints, cached: Ints, budget: int
) -> None:
    """Update the rows of all targets by the steps of one kind out of a source, in place."""
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
    """Return the chain of a time, followed back through the rows from the last lower set."""
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


# -- times too fine for a table ----------------------------------------------------------------


class _Labels(NamedTuple):
    """The labels that reach a lower set: time, bytes cached, and the label it comes from."""

    time: npt.NDArray[Any]
    cached: Ints
    kind: Ints
    source: Ints
    place: Ints


def _best_of_labels(table: Table, budget: int, objective: Objective) -> Chain | None:
    """Return the best chain by labels of time and cached bytes, for times too fine for rows."""
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
    """Return the labels of a lower set, from those of all smaller ones."""
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
    order = np.lexsort((every.cached, every.time if objective == "time" else -every.time))
    cached = every.cached[order]
    before = np.concatenate(([INFINITE], np.minimum.accumulate(cached)[:-1]))
    kept = cached < before[: cached.size]
    return _Labels(*(part[order[kept]] for part in every))


ROUNDS = 8
"""At most this many prices are tried; usually the best is found before."""
Floats = npt.NDArray[np.float64]


class Priced(NamedTuple):
    """The cheapest chain where each byte has a price.

    Attributes:
        price: of a byte, in units of time.
        rest: by lower set, the least time, with bytes at their price, from there to the end.
        time, nbytes: of the whole chain.
    """

    price: float
    rest: Floats
    time: float
    nbytes: float


class Relaxed:
    """Lagrangian relaxation of a budget: every step fits it alone, and bytes have a price."""

    def __init__(self, table: Table, budget: int) -> None:
        fits = table.peak <= budget
        self._budget = budget  # arrays are [source, kind, target]
        self._time = np.where(fits, table.time, np.inf).transpose(2, 0, 1).copy()
        self._nbytes = np.where(fits, table.cached, 0).transpose(2, 0, 1).astype(np.float64)
        self._nbytes[:, :, -1] = np.where(fits, table.peak, 0)[:, -1].T

    def bound(self, one: Priced) -> float:
        """Return a lower bound of the time of every chain within the budget, by one price."""
        return float(one.rest[0]) - one.price * self._budget

    def best(self, dearest: float) -> Priced | None:
        """Find the price of the highest lower bound; None: no chain fits.

        The next price is the one at which two chains cost the same, one of too many bytes and one
        that fits, until no chain is cheaper there. At the price ``dearest``, bytes alone count.
        """
        best = much = self._priced(0.0)
        few = self._priced(dearest)
        if not few.rest[0] < np.inf or few.nbytes > self._budget:
            return None
        for _ in range(ROUNDS):
            if much.nbytes <= self._budget or few.time <= much.time or few.nbytes >= much.nbytes:
                break
            found = self._priced((few.time - much.time) / (much.nbytes - few.nbytes))
            best = max(best, found, key=self.bound)
            if found.rest[0] >= (few.time + found.price * few.nbytes) * (1 - 1e-9):
                break
            if found.nbytes > self._budget:
                much = found
            else:
                few = found
        return best

    def _priced(self, price: float) -> Priced:
        """Find the cheapest chain where each byte has a price."""
        count = len(self._time)
        steps = self._time + price * self._nbytes
        rest = np.full(count, np.inf)
        rest[-1] = 0
        chosen = np.zeros(count, np.int64)
        for source in range(count - 2, -1, -1):
            ways = steps[source, :, source + 1 :] + rest[source + 1 :]
            chosen[source] = place = ways.argmin()
            rest[source] = ways.flat[place]
        time = nbytes = 0.0
        source = 0
        while source < count - 1 and rest[0] < np.inf:
            kind, place = divmod(int(chosen[source]), count - 1 - source)
            at = source, kind, source + 1 + place
            time, nbytes = time + float(self._time[at]), nbytes + float(self._nbytes[at])
            source = at[2]
        return Priced(price, rest, time, nbytes)
