"""The next uses of items in a known order."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np

from umem.data.epoch_draws import Order
from umem.data.orders import KnownOrder

ENTRIES = 1 << 20
"""At most this many positions are looked up ahead, in whole epochs, two at least: 16 MiB a
process, a guess at what nobody misses."""
MOST_EPOCHS = 256
"""At most this many epochs are looked up ahead, a guess: an item that none of them has costs the
time to look through all."""


class _PlacesInEpoch:
    """Index from item to its positions in one epoch."""

    def __init__(self, items: Order) -> None:
        self.items = items
        self._places = np.argsort(items, kind="stable")
        self._sorted = items[self._places]
        self.is_each_once = bool(np.array_equal(self._sorted, np.arange(len(items))))

    def places(self, item: int) -> Order:
        """Return an item's positions in increasing order."""
        if self.is_each_once:
            return self._places[item : item + 1]
        first, end = np.searchsorted(self._sorted, (item, item + 1))
        return self._places[first:end]

    def after(self, item: int, position: int) -> int:
        """Return an item's first position after another; -1 if there is none."""
        places = self.places(item)
        at = int(np.searchsorted(places, position, side="right"))
        return int(places[at]) if at < len(places) else -1


class NextUses:
    """Looks up the next use of an item; positions are counted through all epochs.

    A choice between two items neither of which comes within what is looked ahead cannot cost a hit
    before then, so that hits up to there are those of knowing everything.

    Args:
        order: knows the number of items.
        length: of an epoch.

    Thread-safety: for one thread at a time.
    """

    def __init__(self, order: KnownOrder, length: int) -> None:
        self._order, self.length = order, length
        self._ahead = max(2, min(MOST_EPOCHS, ENTRIES // max(length, 1)))
        self._epochs: OrderedDict[int, _PlacesInEpoch] = OrderedDict()

    def _epoch(self, number: int) -> _PlacesInEpoch:
        if number not in self._epochs:
            self._epochs[number] = _PlacesInEpoch(self._order.items(number))
            if len(self._epochs) > self._ahead + 2:
                self._epochs.popitem(last=False)
        return self._epochs[number]

    def item(self, position: int) -> int:
        """Return the item at a position."""
        epoch, at = divmod(position, self.length)
        return int(self._epoch(epoch).items[at])

    def after(self, item: int, position: int) -> float:
        """Return an item's first position after another; infinity if it is beyond the epochs looked
        up.

        Args:
            position: -1 for before the first.
        """
        epoch, at = divmod(position, self.length) if position >= 0 else (0, -1)
        for number in range(epoch, epoch + self._ahead + 1):
            found = self._epoch(number).after(item, at)
            if found >= 0:
                return number * self.length + found
            at = -1
        return inf

    def nearest(self, item: int, position: int) -> int | None:
        """Return the position of an item nearest to another one, in its epoch and the two beside
        it; None if there is none.
        """
        epoch, found = position // self.length, list[int]()
        for number in range(max(0, epoch - 1), epoch + 2):
            start, places = number * self.length, self._epoch(number).places(item)
            at = int(np.searchsorted(places, position - start))
            found += [start + place for place in places[max(0, at - 1) : at + 1].tolist()]
        return min(found, key=lambda place: abs(place - position), default=None)
