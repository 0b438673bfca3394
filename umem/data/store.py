"""Items in shared memory, and their eviction by a policy.

Only requests change the contents, so hits are exactly the policy's. The prefetch thread holds
prefetched items until they are requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, ClassVar

import numpy as np

from umem.data.counters import COUNTED
from umem.data.pages import HEAD, Pages
from umem.data.policies import CANDIDATE, victims
from umem.data.shared_block import SharedBlock

RECENT = 15
"""The position is the median of this many requests, because workers' requests arrive out of order.
A guess: it follows 97% of the requests of eight workers (tests/data/test_epoch_position.py)."""
FIXED_BYTES = 1 << 20
"""Index tables up to this size are not counted in the memory limit; larger ones are. A guess: this
is the size for 20,000 items, and few users limit so many to less than some MiB."""
AHEAD_SHARE = 40
"""Of the 5% above the limit, one half (a 40th) is for prefetched items, and one for tables and for
the waste of pages, which is at most a 100th if all items have one size."""
NAMES = (
    *HEAD, *COUNTED, "waited_ns", "used_bytes", "ahead_bytes", "clock", "at", "served", "moves",
    "is_following", "disk_end", "is_disk_full", "is_disk_off", "warned", "is_shared", "source",
    "checked_epoch",
)  # fmt: skip
TABLES = (("head", "i8", len(NAMES)), ("inflation", "f8", 1), ("recent", "i8", RECENT))
BY_ITEM = (
    ("first", "i4"), ("nbytes", "i8"), ("score", "f8"), ("last", "i8"), ("seconds", "f4"),
    ("disk_at", "i8"), ("disk_bytes", "i8"),
)  # fmt: skip


class Head:
    """Named integers stored in a shared array."""

    _at: ClassVar = {name: i for i, name in enumerate(NAMES)}

    def __init__(self, array: Any) -> None:
        self._values = memoryview(array)

    def __getitem__(self, name: str) -> int:
        return self._values[self._at[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._values[self._at[name]] = int(value)


class ItemStore:
    """Packed items in shared memory, with the tables that eviction needs.

    Call every method but `held` inside of `held`.

    Args:
        count: the number of items of the dataset.
        memory_bytes: limit of the packed items.
        policy: see `umem.data.policies`.

    Attributes:
        head: counters and positions, see `NAMES`.
        ahead_bytes: limit of the prefetched items.
        first: by item, its first page plus one; 0: it is not in memory.
        nbytes, score, last, seconds: by item, its packed bytes, its score in the policy, the time
            of its last use, and the time to load it.
        disk_at, disk_bytes: by item, its place on the disk; see `DiskTier`.
    """

    def __init__(self, count: int, memory_bytes: int, policy: str) -> None:
        fields = (*TABLES, *((name, dtype, count) for name, dtype in BY_ITEM))
        tables = sum(np.dtype(dtype).itemsize * length for _, dtype, length in fields)
        more = memory_bytes // 20 - max(0, tables - FIXED_BYTES)
        self.ahead_bytes = memory_bytes // AHEAD_SHARE
        room = max(0, memory_bytes + more - self.ahead_bytes)
        self._capacity, self.policy = min(memory_bytes, room), policy
        self.block = SharedBlock(fields, room)
        self._open()
        self.score[:] = -inf
        self.look_back_from(0)

    def _open(self) -> None:
        """Name the arrays of the shared block."""
        arrays = self.block.arrays
        self.head = Head(arrays["head"])
        self.first, self.nbytes, self.score = (arrays[n] for n in ("first", "nbytes", "score"))
        self.last, self.seconds = arrays["last"], arrays["seconds"]
        self.disk_at, self.disk_bytes = arrays["disk_at"], arrays["disk_bytes"]
        self.inflation, self.recent = arrays["inflation"], arrays["recent"]
        self._pages = Pages(self.head, arrays["tail"])

    def __getstate__(self) -> dict[str, Any]:
        names = ("block", "ahead_bytes", "_capacity", "policy")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @contextmanager
    def held(self) -> Iterator[Head]:
        """Hold the lock; drops the whole cache if a process died in the middle of a change."""
        with self.block.held() as is_half_done:
            if is_half_done:
                self.forget()
            yield self.head

    def forget(self) -> None:
        """Drop all items from memory and disk."""
        self._pages.forget()
        self.first[:] = self.nbytes[:] = self.disk_at[:] = 0
        self.score[:] = -inf
        self.head["used_bytes"] = 0
        self.head["lost_count"] += 1
        self.head["moves"] += 1
        self._count_memory()

    def _count_memory(self) -> None:
        head = self.head
        head["memory_bytes"] = head["used_bytes"] + head["ahead_bytes"]
        head["peak_memory_bytes"] = max(head["peak_memory_bytes"], head["memory_bytes"])

    def count_ahead(self, nbytes: int) -> None:
        """Note the bytes of prefetched items; items beyond their limit are not counted."""
        self.head["ahead_bytes"] = min(nbytes, self.ahead_bytes)
        self._count_memory()

    # -- requests ----------------------------------------------------------------------------

    def take(self, item: int, next_use: float) -> Any:
        """Copy the bytes of a requested item; None if it is not in memory. Counts as a use.

        Args:
            next_use: the position of the request after this one.
        """
        self.head["clock"] += 1
        self.last[item] = self.head["clock"]
        data = self.peek(item)
        if data is not None:
            self.head["hit_count"] += 1
            self.head["hit_bytes"] += len(data)
            self.rescore(item, next_use)
        return data

    def peek(self, item: int) -> Any:
        """Copy the bytes of an item without counting a use; None if it is not in memory."""
        if not self.first[item]:
            return None
        return self._pages.get(int(self.first[item]) - 1, int(self.nbytes[item]))

    def keep(self, item: int, data: bytes, next_use: float) -> list[tuple[int, Any]]:
        """Insert an item, evicting others, or leave it out, as the policy decides.

        The caller writes to the disk. If another process has stored the item, this does nothing.

        Args:
            data: the item's bytes.
            next_use: the position of its use after this one.

        Returns:
            The items evicted or left out, with their bytes; None for bytes that are on the disk.
        """
        if self.first[item]:  # another process was quicker
            return []
        self.nbytes[item] = len(data)
        self.head["bypass_count"] += len(data) > self._capacity
        chosen = self._victims(len(data), next_use)
        evicted = [self._evict(each) for each in chosen if each != CANDIDATE]
        is_kept = CANDIDATE not in chosen
        while is_kept and not self._pages.has_room(len(data)):  # pages are partly empty
            last = int(self.score.argmax())
            is_kept = self.score[last] > -inf
            if is_kept:
                evicted.append(self._evict(last))
        if is_kept:
            self.first[item] = self._pages.put(data) + 1
            self.head["used_bytes"] += len(data)
            self._count_memory()
            self.rescore(item, next_use)
        else:
            evicted.append((item, None if self.disk_at[item] else data))
        return evicted

    def _victims(self, size: int, next_use: float) -> list[int]:
        """Choose items to evict for one of ``size`` bytes; maybe that item, as `CANDIDATE`."""
        if size > self._capacity:
            return [CANDIDATE]
        over = self.head["used_bytes"] + size - self._capacity
        if over <= 0:
            return []
        is_known = self.policy == "next-use" and self.head["is_following"]
        candidate = (next_use, size) if is_known else None
        return victims(self.score, self.nbytes, over, candidate)

    def _evict(self, item: int) -> tuple[int, Any]:
        """Free an item's memory; returns it with its bytes, None if they are on the disk."""
        data = None if self.disk_at[item] else self.peek(item)
        self.inflation[0] = max(self.inflation[0], -self.score[item])
        self._pages.free(int(self.first[item]) - 1)
        self.head["used_bytes"] -= int(self.nbytes[item])
        self.first[item], self.score[item] = 0, -inf
        return item, data

    # -- when items are used -------------------------------------------------------------------

    def rescore(self, item: int, next_use: float) -> None:
        """Set the score of an item in memory, given the position of its next use."""
        if self.policy == "next-use" and self.head["is_following"]:
            self.score[item] = next_use
        elif self.policy == "cost":
            seconds = max(float(self.seconds[item]), 1e-9)
            a_byte = seconds / max(int(self.nbytes[item]), 1)
            self.score[item] = -(float(self.inflation[0]) + a_byte)
        else:
            self.score[item] = -float(self.last[item])

    def residents(self) -> list[int]:
        """List the items in memory."""
        return np.flatnonzero(self.first).tolist()

    def look_back_from(self, at: int) -> None:
        """Assume that the last `RECENT` requests were the consecutive positions before this one."""
        self.recent[:] = np.roll(np.arange(at - RECENT, at), self.head["served"] + 1)
