"""Items in shared memory, and their eviction.

Positions are those of requests in the known order, through all epochs. Prefetch treats them one by
one as if the request came then, so that hits are exactly those of the policy. An item that the
policy evicts after its prefetch and before its request *lingers* until the request comes, in the
few percent that memory may exceed its limit.
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
from umem.data.shared_block import Fields, SharedBlock

ABSENT, RESIDENT, LINGERING = 0, 1, 2
MOST_AHEAD = 1024
"""At most this many positions are prefetched ahead of requests; memory usually limits it first."""
RECENT = 15
"""The position is the median of this many requests, as those of workers arrive out of order."""
FIXED_BYTES = 1 << 20
"""Index tables up to this size are not counted in the memory limit; larger ones are."""
NAMES = (
    *HEAD, *COUNTED, "waited_ns", "used_bytes", "clock", "at", "frontier", "served",
    "is_following", "generation", "disk_end", "is_disk_full", "is_disk_off", "said",
    "is_shared", "source", "checked_epoch",
)  # fmt: skip
TABLES = (
    ("head", "i8", len(NAMES)), ("inflation", "f8", 1), ("is_miss", "?", MOST_AHEAD),
    ("recent", "i8", RECENT),
)  # fmt: skip
BY_ITEM = (
    ("state", "u1"), ("pins", "u2"), ("first", "i4"), ("nbytes", "i8"), ("score", "f8"),
    ("last", "i8"), ("seconds", "f4"), ("disk_at", "i8"), ("disk_bytes", "i8"),
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

    Every method is called inside of `held`, but for `held`.

    Args:
        count: of items of the dataset.
        memory_bytes: the most that items take, packed.
        policy: see `umem.data.policies`.
    """

    def __init__(self, count: int, memory_bytes: int, policy: str) -> None:
        fields = (*TABLES, *((name, dtype, count) for name, dtype in BY_ITEM))
        tables = sum(np.dtype(dtype).itemsize * length for _, dtype, length in fields)
        room = memory_bytes + memory_bytes // 20 - max(0, tables - FIXED_BYTES)
        self._setup(fields, max(0, room), min(memory_bytes, max(0, room)), policy)

    def _setup(self, fields: Fields, room: int, capacity: int, policy: str) -> None:
        self.capacity, self.policy = capacity, policy
        self.block = SharedBlock(fields, room)
        self._open()
        self.score[:] = -inf
        self.look_back_from(0)

    def _open(self) -> None:
        arrays = self.block.arrays
        self.head = Head(arrays["head"])
        self.state, self.pins, self.first = (arrays[n] for n in ("state", "pins", "first"))
        self.nbytes, self.score, self.last = (arrays[n] for n in ("nbytes", "score", "last"))
        self.is_miss, self.seconds = arrays["is_miss"], arrays["seconds"]
        self.disk_at, self.disk_bytes = arrays["disk_at"], arrays["disk_bytes"]
        self.inflation, self.recent = arrays["inflation"], arrays["recent"]
        self._pages = Pages(self.head, arrays["tail"])

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self.block, "capacity": self.capacity, "policy": self.policy}

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
        self.state[:], self.pins[:], self.score[:] = ABSENT, 0, -inf
        self.disk_at[:] = 0
        head = self.head
        self.nbytes[:] = 0
        head["used_bytes"] = head["memory_bytes"] = 0
        head["frontier"] = head["at"]
        head["generation"] += 1
        head["lost_count"] += 1

    # -- requests ----------------------------------------------------------------------------

    def take(self, item: int, at: int | None, next_use: float) -> Any:
        """Copy the bytes of a requested item; None if it is not in memory. Counts as a use.

        Args:
            at: the position of the request; None: it is at none.
            next_use: the position of the one after.
        """
        self._used(item)
        if self.state[item] == ABSENT:
            return None
        data = self._pages.get(int(self.first[item]), int(self.nbytes[item]))
        if at is not None and self.pins[item] and self.is_miss[at % MOST_AHEAD]:
            self.head["ahead_count"] += 1
        else:
            self.head["hit_count"] += 1
            self.head["hit_bytes"] += len(data)
        if self.pins[item]:
            self.pins[item] -= 1  # it was compared when it was dealt with
            if self.state[item] == LINGERING and not self.pins[item]:
                self._drop(item)
        else:
            self.score[item] = self._score(item, next_use)
        return data

    def _used(self, item: int) -> None:
        self.head["clock"] += 1
        self.last[item] = self.head["clock"]

    def peek(self, item: int) -> Any:
        """Copy the bytes of an item without counting a use; None if it is not in memory."""
        if self.state[item] == ABSENT:
            return None
        return self._pages.get(int(self.first[item]), int(self.nbytes[item]))

    def pin(self, item: int, at: int, next_use: float) -> list[tuple[int, Any]] | None:
        """Pin the item of a coming request in memory.

        Returns:
            the items evicted for it, as `keep`; None: the item is not in memory, nothing was done.
        """
        if self.state[item] == ABSENT:
            return None
        self.pins[item] += 1
        self.is_miss[at % MOST_AHEAD] = self.state[item] == LINGERING
        size, gone = int(self.nbytes[item]), list[int]()
        if self.state[item] == LINGERING:  # the policy has let it go, and is asked again
            gone = self._who_goes(size, next_use)
            if CANDIDATE not in gone:
                self.state[item] = RESIDENT
                self.head["used_bytes"] += size
        spilled = [self._let_go(each) for each in gone if each != CANDIDATE]
        if self.state[item] == RESIDENT:
            self.score[item] = self._score(item, next_use)
        return [(each, data) for each, data in spilled if not self.disk_at[each]]

    def keep(
        self, item: int, data: bytes, next_use: float, at: int | None, *, is_ahead: bool = False
    ) -> list[tuple[int, Any]] | None:
        """Insert an item, evicting others, or leave it out, as the policy decides.

        Args:
            data: its bytes.
            next_use: the position of its use after this one.
            at: the position that it is for; None: that is not known.
            is_ahead: it is fetched ahead, and is there at that position whatever the policy says.

        Returns:
            what went and is not on the disk, with its bytes, the item itself included; None, of one
            that is ahead alone: there is no room to have it, and nothing was done.
        """
        if self.state[item] != ABSENT:  # another process was quicker
            return self.pin(item, at, next_use) if is_ahead and at is not None else []
        self.nbytes[item] = len(data)
        gone = self._who_goes(len(data), next_use)
        if not self._has_pages(len(data), gone, is_ahead=is_ahead):
            if is_ahead:
                return None
            gone = self._all_that_can(len(data), gone)
        spilled = [self._let_go(each) for each in gone if each != CANDIDATE]
        if CANDIDATE in gone:
            spilled.append((item, data))
        state = RESIDENT if CANDIDATE not in gone else LINGERING
        self._put(item, data, next_use, at if is_ahead else None, state)
        self.head["bypass_count"] += len(data) > self.capacity
        return [(each, bytes_) for each, bytes_ in spilled if not self.disk_at[each]]

    def _who_goes(self, size: int, next_use: float) -> list[int]:
        if size > self.capacity:
            return [CANDIDATE]
        over = self.head["used_bytes"] + size - self.capacity
        if over <= 0:
            return []
        is_known = self.policy == "next-use" and self.head["is_following"]
        candidate = (next_use, size) if is_known else None
        return victims(self.score, self.nbytes, over, candidate)

    def _has_pages(self, size: int, gone: list[int], *, is_ahead: bool) -> bool:
        """Tell whether evicting the victims frees enough pages for an item of ``size`` bytes."""
        free, needed = self._pages.free_count_for(size)
        if CANDIDATE in gone and not is_ahead:
            return True
        back = sum(
            self._pages.free_count_for(int(self.nbytes[each]))[1]
            for each in gone
            if each != CANDIDATE and not self.pins[each]
        )
        return free + back >= needed

    def _all_that_can(self, size: int, gone: list[int]) -> list[int]:
        """Return more victims for want of pages; only the new item itself if that does not help."""
        more = victims(self.score, self.nbytes, 2 * size, None)
        wider = [*gone, *(each for each in more if each not in gone)]
        return wider if self._has_pages(size, wider, is_ahead=False) else [*gone, CANDIDATE]

    def _let_go(self, item: int) -> tuple[int, Any]:
        """Evict an item now, or once the requests that pin it are served."""
        size = int(self.nbytes[item])
        data = b"" if self.disk_at[item] else self._pages.get(int(self.first[item]), size)
        self.inflation[0] = max(self.inflation[0], -self.score[item])
        self.head["used_bytes"] -= size
        self.state[item], self.score[item] = LINGERING, -inf
        if not self.pins[item]:
            self._drop(item)
        return item, data

    def _drop(self, item: int) -> None:
        size = int(self.nbytes[item])
        self._pages.free(int(self.first[item]), size)
        if self.state[item] == RESIDENT:
            self.head["used_bytes"] -= size
        self.head["memory_bytes"] -= size
        self.state[item], self.score[item], self.pins[item] = ABSENT, -inf, 0

    def _put(self, item: int, data: bytes, next_use: float, at: int | None, state: int) -> None:
        """Write an item into pages and enter it in the tables, in the given state."""
        if at is None and state == LINGERING:
            return
        size, head = len(data), self.head
        self.first[item], self.nbytes[item] = self._pages.put(data), size
        self.state[item], self.pins[item] = state, int(at is not None)
        if at is not None:
            self.is_miss[at % MOST_AHEAD] = True
        head["memory_bytes"] += size
        head["peak_memory_bytes"] = max(head["peak_memory_bytes"], head["memory_bytes"])
        if state == RESIDENT:
            head["used_bytes"] += size
            self.score[item] = self._score(item, next_use)

    def _score(self, item: int, next_use: float) -> float:
        if self.policy == "next-use" and self.head["is_following"]:
            return next_use
        if self.policy == "cost":
            seconds = max(float(self.seconds[item]), 1e-9)
            return -(float(self.inflation[0]) + seconds / max(int(self.nbytes[item]), 1))
        return -float(self.last[item])

    # -- where the program is ----------------------------------------------------------------

    def look_back_from(self, at: int) -> None:
        """Assume that the last `RECENT` requests were the consecutive positions before this one."""
        self.recent[:] = np.roll(np.arange(at - RECENT, at), self.head["served"] + 1)

    def residents(self) -> list[int]:
        """List the items that the policy may evict."""
        return np.flatnonzero(self.state == RESIDENT).tolist()

    def rescore(self, item: int, next_use: float) -> None:
        """Set when an item in memory is used next."""
        self.score[item] = self._score(item, next_use)

    def unpin(self) -> None:
        """Forget all coming requests, and evict items that were kept only for them."""
        for item in np.flatnonzero(self.state == LINGERING).tolist():
            self._drop(item)
        self.pins[:] = 0
        self.head["generation"] += 1
