"""Where in a known order the requests are, whether they follow it, and when items come next."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np

from umem.data.epoch_draws import Order
from umem.data.orders import KnownOrder
from umem.data.store import ItemStore

ENTRIES = 1 << 20
"""So many positions are looked ahead, in whole epochs, two at least: 16 MiB a process."""
MOST_EPOCHS = 256
FARTHEST_LAG = 4096
"""Workers' requests come in another order than their positions, within a batch; so many positions
are looked at at most."""
MOST_STRAYS = 16


class _PlacesInEpoch:
    """Where in an epoch each item is."""

    def __init__(self, items: Order) -> None:
        self.items = items
        self._places = np.argsort(items, kind="stable")
        self._sorted = items[self._places]
        self._is_each_once = bool(np.array_equal(self._sorted, np.arange(len(items))))

    def places(self, item: int) -> Order:
        """Its positions, in order."""
        if self._is_each_once:
            return self._places[item : item + 1]
        first, end = np.searchsorted(self._sorted, (item, item + 1))
        return self._places[first:end]

    def after(self, item: int, position: int) -> int:
        """The first position of an item after another; -1: none."""
        places = self.places(item)
        at = int(np.searchsorted(places, position, side="right"))
        return int(places[at]) if at < len(places) else -1


class NextUses:
    """Positions of items in an order, counted through all epochs.

    A choice between two items neither of which comes within what is looked ahead cannot cost a hit
    before then, so that hits up to there are those of knowing everything.

    Args:
        order: which has been told how many items there are.
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
        """The item at a position."""
        epoch, at = divmod(position, self.length)
        return int(self._epoch(epoch).items[at])

    def after(self, item: int, position: int) -> float:
        """The first position of an item after another; infinity: not within what is looked at."""
        epoch, at = divmod(position, self.length)
        for number in range(epoch, epoch + self._ahead + 1):
            found = self._epoch(number).after(item, at)
            if found >= 0:
                return number * self.length + found
            at = -1
        return inf

    def nearest(self, item: int, position: int) -> float:
        """The position of an item nearest to another, in its epoch and those beside it."""
        epoch, best = position // self.length, inf
        for number in range(max(0, epoch - 1), epoch + 2):
            for place in self._epoch(number).places(item).tolist():
                found = number * self.length + place
                if abs(found - position) < abs(best - position):
                    best = found
        return best


class Course:
    """The positions of requests, for all processes together.

    Args:
        store: whose head has where they are.
        order: which they follow; None where nobody knows.
        count: of items.
    """

    def __init__(self, store: ItemStore, order: KnownOrder | None, count: int) -> None:
        self._store = store
        self.uses = None
        if order is not None:
            self.uses = NextUses(order, order.of_items(count))
            store.head["is_following"] = bool(self.uses.length)

    def next_use(self, item: int, at: int | None) -> float:
        """The position of an item's use after another; infinity where nobody knows."""
        head = self._store.head
        if self.uses is None or not head["is_following"]:
            return inf
        return self.uses.after(item, head["at"] - 1 if at is None else at)

    def request(self, item: int, *, is_strict: bool) -> tuple[int | None, int | None]:
        """Say that an item is asked for.

        Args:
            is_strict: only the next in the order will do; else, as several ask at once, one of
                those about there.

        Returns:
            its position, None where there is none; and the item that should have been asked for,
            where requests are found not to follow the order, which is then followed no more.
        """
        head, uses = self._store.head, self.uses
        if uses is None or not head["is_following"]:
            return None, None
        at = head["at"]
        expected = uses.item(at)
        if expected == item:
            self._advance(at)
            return at, None
        if not is_strict:
            found = uses.nearest(item, at)
            if abs(found - at) <= min(FARTHEST_LAG, uses.length) and not self._has_run_away():
                self._advance(int(found))
                return int(found), None
        self.lose()
        return None, expected

    def _advance(self, position: int) -> None:
        head = self._store.head
        head["served"] += 1
        if head["served"] % self.uses.length == 0:  # type: ignore[union-attr]
            self._refresh()
        if position >= head["at"]:
            head["at"] = position + 1

    def done(self, at: int | None) -> None:
        """Say that a request has been dealt with, so that the next may be."""
        if at is not None:
            self._store.head["frontier"] = max(self._store.head["frontier"], at + 1)

    def _has_run_away(self) -> bool:
        """Whether positions are farther ahead than so many requests can have come."""
        head = self._store.head
        assert self.uses is not None
        return head["at"] - head["told_at"] > head["served"] + self.uses.length + MOST_STRAYS

    def lose(self) -> None:
        """Follow the order no more; what is there is kept by its last use."""
        store = self._store
        store.head["is_following"] = 0
        store.unpin()
        for item in store.residents():
            store.rescore(item, inf)

    def told(self, epoch: int, position: int) -> None:
        """Go to where an iterator says that it is."""
        assert self.uses is not None
        with self._store.held() as head:
            at = epoch * self.uses.length + position
            head["told_at"], head["served"] = at, 0
            if head["at"] == at and head["is_following"]:
                return
            head["at"] = head["frontier"] = at
            head["is_following"] = 1
            self._store.unpin()
            for item in self._store.residents():
                self._store.rescore(item, self.uses.after(item, at - 1))

    def _refresh(self) -> None:
        """Look up the next uses of items whose own went by: a worker's request may be lost."""
        head, store = self._store.head, self._store
        assert self.uses is not None
        for item in store.residents():
            if store.score[item] < head["at"] - min(FARTHEST_LAG, self.uses.length):
                store.rescore(item, self.uses.after(item, head["at"] - 1))
