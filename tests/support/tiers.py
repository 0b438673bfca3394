"""A tier in memory for tests, which spoils what was let go too early."""

from __future__ import annotations

from typing import Any

import numpy as np


class MemorySent:
    """An array that was copied aside."""

    def __init__(self, tier: MemoryTier, array: Any) -> None:
        self.nbytes = int(array.nbytes)
        self._tier = tier
        self._array: Any = array
        self._copy: Any = array.copy(order="K")
        self._back: Any = None
        tier.sent_bytes += self.nbytes
        tier.below.add(self)

    def is_gone(self) -> bool:
        return self._array is None

    def release(self) -> None:
        self._array = None

    def fetch(self) -> None:
        if self._back is None:
            self._back = self._copy.copy(order="K")
            self._tier.fetched_bytes += self.nbytes

    def array(self) -> Any:
        self.fetch()
        found, self._back = self._back, None
        return found

    def forget(self) -> None:
        self._copy = None
        self._tier.below.discard(self)


class MemoryTier:
    """Takes what it is sent, up to ``room`` bytes at once."""

    name = "memory"

    def __init__(self, room: int = 1 << 40) -> None:
        self.sent_bytes = self.fetched_bytes = 0
        self.waited_seconds = 0.0
        self.below: set[MemorySent] = set()
        self.is_closed = False
        self._room = room

    def send(self, array: np.ndarray[Any, Any]) -> MemorySent | None:
        if sum(one.nbytes for one in self.below) + array.nbytes > self._room:
            return None
        return MemorySent(self, array)

    def close(self) -> None:
        self.is_closed = True
