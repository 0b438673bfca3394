"""The next uses of items in a known order."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np

from umem.data.epoch_draws import Order
from umem.data.orders import KnownOrder

ENTRIES = 1 << 20
"""At most this many positions are looked up ahead, in whole epochs, at least two. A guess: 16 MiB a
process is a small cost."""
MOST_EPOCHS = 256
"""At most this many epochs are looked up ahead. A guess: for an item in none of them, all are
searched."""


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

    Within the epochs looked up, hits are as many as with complete knowledge: a choice between two
    items that are used only later costs no hit before.

    Args:
        order: the order, with its number of items set.
        length: the number of positions in an epoch.

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
        """Return an item's first position after another; infinity if none is in the epochs looked
        up.

        Args:
            position: the other position; -1 is before the first.
        """
        epoch, at = divmod(position, self.length) if position >= 0 else (0, -1)
        for number in range(epoch, epoch + self._ahead + 1):
            found = self._epoch(number).after(item, at)
            if found >= 0:
                return number * self.length + found
            at = -1
        return inf

    def nearest(self, item: int, position: int) -> int | None:
        """Return an item's position nearest to another one, in that one's epoch and the two beside
        it; None if there is none.
        """
        epoch, found = position // self.length, list[int]()
        for number in range(max(0, epoch - 1), epoch + 2):
            start, places = number * self.length, self._epoch(number).places(item)
            at = int(np.searchsorted(places, position - start))
            found += [start + place for place in places[max(0, at - 1) : at + 1].tolist()]
        return min(found, key=lambda place: abs(place - position), default=None)
