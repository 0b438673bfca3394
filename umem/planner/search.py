"""Dynamic programming over chains of lower sets.

Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of Recomputation
Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019, sections 4.2 to 4.4:
``opt[L, t]`` is the fewest bytes cached when a chain has reached the lower set L with the overhead
t. Differences: a step may have several kinds; of each lower set only the Pareto front of overhead
and bytes is followed, as labels; and a label is followed only if a lower bound lets it lead to a
chain within a limit of overhead, which grows until a chain is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.step_table import INFINITE, Chain, Hop, Ints, Table

NARROW = 128
"""The first search is for chains at most one part in this many above the lower bound.

It changes no plan, and half or twice of it planning by less than a tenth
(bench/planner_constants.py). Each search after it is `WIDER` times as wide.
"""
WIDER = 4
ROUNDS = 8
"""At most this many prices are tried; usually the best is found earlier.

Half and twice of it make the same 18 plans (bench/planner_constants.py).
"""
Floats = npt.NDArray[np.float64]


def best(table: Table, budget: int) -> Chain | None:
    """Return the chain of least overhead within a budget; None if no chain fits."""
    bound = _lower_bound(table, budget)
    if bound is None:
        return None
    width = max(abs(bound.time), table.total / 4) / NARROW
    while True:
        # Costs near the smallest float give a width of 0, which would never grow.
        limit = bound.time + width if 0 < width <= 2 * table.total else np.inf
        chain = _followed(table, budget, bound, limit)
        if chain is not None or limit == np.inf:
            return chain
        width *= WIDER


# -- labels --------------------------------------------------------------------------------------


class _Labels(NamedTuple):
    """Ways to reach lower sets, one a row.

    Attributes:
        time, cached: the overhead, and the cached bytes.
        home: the lower set.
        kind, origin: the kind of the last step, and the label before it.
    """

    time: npt.NDArray[Any]
    cached: Ints
    home: Ints
    kind: Ints
    origin: Ints


def _followed(table: Table, budget: int, bound: _Bound, limit: float) -> Chain | None:
    """Return the best chain of at most ``limit`` overhead; None: no such chain fits.

    Cost: the lower sets times the followed labels.
    """
    zero = np.zeros(1, np.int64)
    every = _Labels(zero.astype(table.time.dtype), zero, zero, zero, zero)
    for target in range(1, len(table.sets)):
        is_end = target == len(table.sets) - 1
        price = 0.0 if is_end else bound.price  # at the end, the last peak has paid for bytes
        most = limit if limit == np.inf else limit - bound.rest[target] + price * budget
        kinds = range(len(table.peak))
        parts = [_stepped(table, every, kind, target, budget, price, most) for kind in kinds]
        into = _Labels(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        front = _front(into.time, into.cached)
        new = _Labels(*(column[front] for column in into))
        every = _Labels(*(np.concatenate(columns) for columns in zip(every, new, strict=True)))
    if every.home[-1] != len(table.sets) - 1:
        return None
    place = len(every.home) - len(new.home)  # of the least overhead
    hops: list[Hop] = []
    while place:
        origin = int(every.origin[place])
        hops.append(Hop(int(every.home[origin]), int(every.home[place]), int(every.kind[place])))
        place = origin
    return tuple(reversed(hops))


def _front(time: npt.NDArray[Any], cached: Ints) -> Ints:
    """Return the places on the Pareto front, by rising time; of equal ones, the first.

    Sorting takes most of a search: whole times in a range that is not wide are looked up instead,
    and only the fewest bytes of each are sorted.
    """
    places = np.arange(time.size)
    if time.size and time.dtype.kind == "i":
        after = time - time.min()
        if after.max() <= time.size:
            fewest = np.full(int(after.max()) + 1, INFINITE)
            np.minimum.at(fewest, after, cached)
            places = np.flatnonzero(cached == np.minimum.accumulate(fewest)[after])
    order = places[np.lexsort((cached[places], time[places]))]
    ranked = cached[order]
    before = np.concatenate(([INFINITE], np.minimum.accumulate(ranked)[:-1]))[: len(ranked)]
    return order[ranked < before]


def _stepped(
    table: Table, labels: _Labels, kind: int, target: int, budget: int, price: float, most: float
) -> _Labels:
    """Return the labels that steps of one kind into a lower set make of all labels before it.

    Leaves out labels of more overhead than ``most``, with the price of their bytes.
    """
    possible = np.flatnonzero(table.peak[kind, target, :target] <= budget)
    first = np.searchsorted(labels.home, possible[0]) if possible.size else len(labels.home)
    home, cached = labels.home[first:], labels.cached[first:]
    some = np.flatnonzero(table.peak[kind, target][home] <= budget - cached)
    home = home[some]
    time = labels.time[first:][some] + table.time[kind, target][home]
    cached = cached[some] + table.cached[kind, target][home]
    inside = np.flatnonzero(time + price * cached <= most)
    return _Labels(
        time[inside],
        cached[inside],
        np.full(inside.size, target),
        np.full(inside.size, kind),
        some[inside] + first,
    )


# -- a bound from below --------------------------------------------------------------------------


class _Bound(NamedTuple):
    """A lower bound of the overhead of all chains within a budget, where each byte has a price.

    Attributes:
        time: the bound.
        price: of a byte, in units of overhead.
        rest: by lower set, the least overhead from there to the end, with the price of bytes.
    """

    time: float
    price: float
    rest: Floats


class _Priced(NamedTuple):
    """The cheapest chain where each byte has a price: its own overhead and bytes, and its bound."""

    time: float
    nbytes: float
    bound: _Bound


def _lower_bound(table: Table, budget: int) -> _Bound | None:
    """Find the price of the highest lower bound; None: no chain fits.

    Lagrangian relaxation of the budget: each step alone fits it, and bytes have a price. The next
    price is the one at which two chains cost the same, one with too many bytes and one that fits,
    until no chain is cheaper there. At the first price of the second kind, only bytes count.
    """
    if table.least > budget:
        return None
    fits = table.peak <= budget
    time, nbytes = np.where(fits, table.time, np.inf), np.where(fits, table.cached, 0).astype(float)
    nbytes[:, -1] = np.where(fits, table.peak, 0)[:, -1]
    best = much = _priced(time, nbytes, 0.0, budget)
    few = _priced(time, nbytes, 2 * table.total or 1.0, budget)
    for _ in range(ROUNDS):
        if much.nbytes <= budget or few.time <= much.time or few.nbytes >= much.nbytes:
            break
        price = (few.time - much.time) / (much.nbytes - few.nbytes)
        found = _priced(time, nbytes, price, budget)
        best = max(best, found, key=lambda one: one.bound.time)
        if found.bound.rest[0] >= (few.time + price * few.nbytes) * (1 - 1e-9):
            break
        if found.nbytes > budget:
            much = found
        else:
            few = found
    return best.bound


def _priced(time: Floats, nbytes: Floats, price: float, budget: int) -> _Priced:
    """Find the cheapest chain where each byte has a price; arrays are [kind, target, source]."""
    count = time.shape[-1]
    rest, chosen = np.zeros(count), np.zeros(count, np.int64)
    for source in range(count - 2, -1, -1):
        after = slice(source + 1, None)
        ways = time[:, after, source] + price * nbytes[:, after, source] + rest[after]
        chosen[source] = place = ways.argmin()
        rest[source] = ways.flat[place]
    own = used = 0.0
    source = 0
    while source < count - 1 and rest[0] < np.inf:
        kind, place = divmod(int(chosen[source]), count - 1 - source)
        at = kind, source + 1 + place, source
        own, used, source = own + float(time[at]), used + float(nbytes[at]), at[1]
    return _Priced(own, used, _Bound(float(rest[0]) - price * budget, price, rest))
