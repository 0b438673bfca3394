"""The position of requests in a known order, and whether they follow it."""

from __future__ import annotations

from math import inf

from umem.data.next_uses import NextUses
from umem.data.orders import KnownOrder
from umem.data.store import RECENT, ItemStore

FARTHEST_LAG = 4096
"""An item whose next use is at most this many positions behind may still be requested, because
workers' requests arrive out of order within a batch. A guess, above any batch size."""


class EpochPosition:
    """Tracks the position of requests in a known order, for all processes that share a cache.

    Args:
        store: the store whose head holds the position.
        order: the known order that requests follow; None without one.
        count: the number of items.
    """

    def __init__(self, store: ItemStore, order: KnownOrder | None, count: int) -> None:
        self._store = store
        self.uses = None
        if order is not None:
            self.uses = NextUses(order, order.of_items(count))
            store.head["is_following"] = bool(self.uses.length)

    def next_use(self, item: int, at: int | None) -> float:
        """Return the position of an item's next use after ``at``; infinity if it is unknown."""
        head = self._store.head
        if self.uses is None or not head["is_following"]:
            return inf
        return self.uses.after(item, head["at"] - 1 if at is None else at)

    def request(self, item: int, *, is_strict: bool) -> tuple[int | None, int | None]:
        """Record that an item is requested.

        Args:
            is_strict: after requests in order, accept only the next item of the order. False, for
                concurrent requests: take the item's position nearest to the current one.

        Returns:
            The item's position, None if it has none; and, if requests left the order, the item that
            should have been requested. From then on the order is not followed.
        """
        head, uses = self._store.head, self.uses
        if uses is None or not head["is_following"]:
            return None, None
        at = head["at"]
        expected = uses.item(at)
        if expected == item and is_strict:
            self._advance(at)
            return at, None
        if is_strict and self._are_in_order():
            self.lose()
            return None, expected
        found = uses.nearest(item, at)
        if found is not None:
            self._advance(found)
        return found, None

    def _are_in_order(self) -> bool:
        """Tell whether the last `RECENT` requests were at consecutive positions."""
        recent = self._store.recent
        return int(recent.max()) == self._store.head["at"] - 1 == int(recent.min()) + RECENT - 1

    def _advance(self, position: int) -> None:
        """Move to behind the median of the last `RECENT` requests' positions."""
        head, recent = self._store.head, self._store.recent
        head["served"] += 1
        recent[head["served"] % RECENT] = position
        head["at"] = max(0, sorted(recent.tolist())[RECENT // 2] + RECENT // 2 + 1)
        if head["served"] % self.uses.length == 0:  # type: ignore[union-attr]
            self._refresh()

    def lose(self) -> None:
        """Stop following the order: nothing is fetched ahead, and eviction becomes LRU."""
        self._store.head["is_following"] = 0
        for item in self._store.residents():
            self._store.rescore(item, inf)

    def move(self, epoch: int, position: int) -> None:
        """Set the position that an iterator reports, and rescore all items in memory."""
        assert self.uses is not None
        with self._store.held() as head:
            at = epoch * self.uses.length + position
            self._store.look_back_from(at)
            if head["at"] == at and head["is_following"]:
                return
            head["at"], head["is_following"] = at, 1
            head["moves"] += 1
            for item in self._store.residents():
                self._store.rescore(item, self.uses.after(item, at - 1))

    def _refresh(self) -> None:
        """Rescore items whose next use has passed without a request, as a worker's may be lost."""
        head, store = self._store.head, self._store
        assert self.uses is not None
        for item in store.residents():
            if store.score[item] < head["at"] - min(FARTHEST_LAG, self.uses.length):
                store.rescore(item, self.uses.after(item, head["at"] - 1))
