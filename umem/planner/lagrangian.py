"""What the rest of a chain of lower sets takes at least, once its bytes have a price.

A chain that fits a budget takes at least what the cheapest of all chains does when each byte that
it takes costs a price, and each byte of the budget earns it: Lagrangian relaxation, by which
labels of a constrained shortest path are left out (Handler and Zang, "A dual algorithm for the
constrained shortest path problem", Networks 1980). A chain's bytes are here what all of its steps
but the last cache, and the peak of the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.step_table import Table

ROUNDS = 8
"""So many prices are tried at most; most often the best is found before."""
Floats = npt.NDArray[np.float64]


class Priced(NamedTuple):
    """The cheapest chain at a price.

    Attributes:
        price: of a byte, in units of time.
        rest: by lower set, the least of time and price together from there to the end.
        time, nbytes: of the whole chain.
    """

    price: float
    rest: Floats
    time: float
    nbytes: float


class Relaxed:
    """The steps of a table that fit a budget, to be priced."""

    def __init__(self, table: Table, budget: int) -> None:
        fits = table.peak <= budget
        self._budget = budget  # arrays are [source, kind, target]
        self._time = np.where(fits, table.time, np.inf).transpose(2, 0, 1).copy()
        self._nbytes = np.where(fits, table.cached, 0).transpose(2, 0, 1).astype(np.float64)
        self._nbytes[:, :, -1] = np.where(fits, table.peak, 0)[:, -1].T

    def bound(self, one: Priced) -> float:
        """What a chain within the budget takes at least."""
        return float(one.rest[0]) - one.price * self._budget

    def best(self, dearest: float) -> Priced | None:
        """The price of the highest bound that is found; None: no chain fits.

        Prices are where two chains, one that takes too many bytes and one that does not, cost the
        same, until none is cheaper there. ``dearest`` is a price at which bytes alone count.
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
