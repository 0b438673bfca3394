"""The position of requests in a known order, and whether they follow it."""

from __future__ import annotations

from math import exp, inf, log

from umem.data.next_uses import NextUses
from umem.data.orders import KnownOrder
from umem.data.store import RECENT, ItemStore

FARTHEST_LAG = 4096
"""At most this many positions behind the newest request are searched: workers' requests arrive out
of order within a batch."""
LEAST_FAR = 8
FAR_SHARE = 0.05
"""At most this share of the requests comes from far away while requests follow the order."""
MOST_DOUBT = 100_000
"""Threshold of the log-likelihood ratio, in thousandths, at which the order counts as another;
requests in another order reach it after some 100."""


class EpochPosition:
    """Tracks the position of requests in a known order, for all processes that share a cache.

    Args:
        store: whose head has where they are.
        order: the known order that they follow; None without one.
        count: of items.
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
            is_strict: only the next in the order will do, where those before were in order; else,
                as several ask at once, one of those about there.

        Returns:
            its position, None if it has none; and the item that should have been requested,
            where requests are found not to follow the order, which is then followed no more.
        """
        head, uses = self._store.head, self.uses
        if uses is None or not head["is_following"]:
            return None, None
        at = head["at"]
        expected = uses.item(at)
        if expected == item and is_strict:
            self._advance(at)
            return at, None
        found, often = uses.nearest(item, at)
        if (is_strict and self._are_in_order()) or self._is_doubted(abs(found - at), often):
            self.lose()
            return None, expected
        if found == inf:
            return None, None
        self._advance(int(found))
        return int(found), None

    def _are_in_order(self) -> bool:
        """Tell whether the last `RECENT` requests were at consecutive positions."""
        recent = self._store.recent
        return int(recent.max()) == self._store.head["at"] - 1 == int(recent.min()) + RECENT - 1

    def _is_doubted(self, distance: float, often: float) -> bool:
        """Test by likelihood ratio whether requests come from another order than the known one.

        By the sums of Page, "Continuous inspection schemes", Biometrika 41, 1954: by how much each
        request is likelier where another order is followed than where this one is.

        Args:
            distance: from where requests are.
            often: how many places the item has in an epoch.
        """
        head, uses = self._store.head, self.uses
        assert uses is not None
        limit = max(LEAST_FAR, uses.length // 4, 2 * head["batch"])
        chance = exp(-2 * often * limit / uses.length)  # that none is near in another order
        is_far = distance > limit
        likelier = chance / FAR_SHARE if is_far else min(1, (1 - chance) / (1 - FAR_SHARE))
        head["doubt"] = max(0, head["doubt"] + int(1000 * log(max(likelier, 0.01))))
        return head["doubt"] > MOST_DOUBT

    def _advance(self, position: int) -> None:
        head, recent = self._store.head, self._store.recent
        head["served"] += 1
        recent[head["served"] % RECENT] = position
        head["at"] = max(0, sorted(recent.tolist())[RECENT // 2] + RECENT // 2 + 1)
        if head["served"] % self.uses.length == 0:  # type: ignore[union-attr]
            self._refresh()

    def done(self, at: int | None) -> None:
        """Mark the request at a position as served, so that prefetch goes on behind it."""
        if at is not None:
            self._store.head["frontier"] = max(self._store.head["frontier"], at + 1)

    def lose(self) -> None:
        """Stop following the order: prefetched items are unpinned, and eviction becomes LRU."""
        store = self._store
        store.head["is_following"] = 0
        store.unpin()
        for item in store.residents():
            store.rescore(item, inf)

    def told(self, epoch: int, position: int, batch: int) -> None:
        """Set the position that an iterator reports, and rescore all items in memory."""
        assert self.uses is not None
        with self._store.held() as head:
            at = epoch * self.uses.length + position
            head["batch"] = max(head["batch"], batch)
            self._store.look_back_from(at)
            if head["at"] == at and head["is_following"]:
                return
            head["at"] = head["frontier"] = at
            head["doubt"] = 0 if not head["is_following"] else head["doubt"]
            head["is_following"] = 1
            self._store.unpin()
            for item in self._store.residents():
                self._store.rescore(item, self.uses.after(item, at - 1))

    def _refresh(self) -> None:
        """Rescore items whose next use has passed without a request, as a worker's may be lost."""
        head, store = self._store.head, self._store
        assert self.uses is not None
        for item in store.residents():
            if store.score[item] < head["at"] - min(FARTHEST_LAG, self.uses.length):
                store.rescore(item, self.uses.after(item, head["at"] - 1))
