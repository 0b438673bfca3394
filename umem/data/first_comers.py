"""The fixed subset that comes first: what it would have hit is counted beside a cache."""

from __future__ import annotations

from typing import Any


class FirstComers:
    """Items that are kept for good: each that has room when it is asked for.

    Args:
        head: a mapping to integers that is shared, with ``first_bytes`` of the items and
            ``lead_bytes`` that the cache has hit more.
        is_first: one an item: it is among them.
        capacity: bytes.
    """

    def __init__(self, head: Any, is_first: Any, capacity: int) -> None:
        self._head, self.is_first, self._capacity = head, is_first, capacity

    @property
    def lead_bytes(self) -> int:
        """Bytes that the cache has hit more."""
        return int(self._head["lead_bytes"])

    def count(self, item: int, nbytes: int, *, is_hit: bool) -> tuple[bool, int, int]:
        """Count a request, which the cache hits or not; returns what `restore` takes."""
        head, is_first = self._head, bool(self.is_first[item])
        before = is_first, head["first_bytes"], head["lead_bytes"]
        head["lead_bytes"] += nbytes * (is_hit - is_first)
        if not is_first and head["first_bytes"] + nbytes <= self._capacity:
            head["first_bytes"] += nbytes
            self.is_first[item] = True
        return before

    def restore(self, item: int, before: tuple[bool, int, int]) -> None:
        """Count a request of that item, the last one, no more."""
        self.is_first[item], self._head["first_bytes"], self._head["lead_bytes"] = before

    def forget(self) -> None:
        """Begin anew."""
        self.is_first[:] = False
        self._head["first_bytes"] = self._head["lead_bytes"] = 0
