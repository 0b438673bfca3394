"""Counts the bytes that CUDA pools have reserved, because the driver does not for managed memory.

CuPy's pooled memory cannot be weakly referenced, so each allocation owns a `MemoryOwner`, whose end
marks the free. It has no ``__del__``: Python would check for signals in it, and drop an exception
that a signal handler raises there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, get_args

from umem.devices.base import Policy

Kind = Literal["managed", "spill", "pinned", "unmanaged"]
"""``spill`` is managed memory advised to stay on the host; ``pinned`` is host memory that the GPU
maps, used if managed memory cannot be oversubscribed; ``unmanaged`` is umem's own pool over
cudaMalloc, for hybrid and for a limit; without a limit `unmanaged` uses CuPy's default pool.
"""


def has_plain_pool(policy: Policy | None) -> bool:
    """Tell whether a policy allocates from umem's own pool over cudaMalloc."""
    if policy is None or policy.mode == "managed":
        return False
    return policy.mode == "hybrid" or policy.limit_bytes is not None


class MemoryOwner:
    """Keeps an allocation alive as long as an array over it."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: Any) -> None:
        self._memory = memory


class MemoryOwnerRef(weakref.ref[MemoryOwner]):
    """A weak reference to a `MemoryOwner`; ``ticket`` tells its callback the freed allocation."""

    __slots__ = ("ticket",)
    ticket: Any


class Ledger:
    """Counts the bytes that pools have reserved from the driver, now and at their peak.

    Thread-safety: any thread. `give_back` takes no lock, because a lease may end at any moment,
    even during `claim` in the same thread; for the same reason the lock is reentrant. No Python
    code runs when a lease ends, because an exception of a signal handler would be dropped there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reserved: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._returned: deque[tuple[Kind, int] | MemoryOwnerRef] = deque()
        self._leases: set[MemoryOwnerRef] = set()
        self._given: dict[weakref.ref[Any], int] = {}
        self._given_over: deque[weakref.ref[Any]] = deque()
        self._peak = self._other_bytes = 0

    def claim(
        self, kind: Kind, nbytes: int, refuse: Callable[[dict[Kind, int]], Exception | None]
    ) -> None:
        """Count ``nbytes`` as reserved, unless ``refuse`` returns an error for the new counts.

        Checking and counting are one step, so two threads cannot exceed a limit together.
        """
        with self._lock:
            before = self._counted()
            error = refuse({**before, kind: before[kind] + nbytes})
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # else its traceback and this frame keep the callers' arrays alive
            self._reserved[kind] += nbytes

    def claim_within(self, kind: Kind, nbytes: int, most: int) -> bool:
        """Count ``nbytes`` as reserved unless the kind would have more than ``most``."""
        with self._lock:
            reserved = self._counted()
            after = reserved[kind] + nbytes
            if after > most:
                return False
            reserved[kind] = after
            total = sum(reserved.values()) + self._other_bytes
            if total > self._peak:
                self._peak = total
            return True

    def follow_given(self, memory: Any, nbytes: int) -> None:
        """Count claimed bytes as returned when memory of another library's allocator dies."""
        self._given[weakref.ref(memory, self._given_over.append)] = nbytes

    def lease(self, kind: Kind, nbytes: int, memory: Any) -> MemoryOwner:
        """Make an owner of claimed memory that gives the bytes back when it dies."""
        held = MemoryOwner(memory)
        end = MemoryOwnerRef(held, self._returned.append)
        end.ticket = kind, nbytes
        self._leases.add(end)
        return held

    def give_back(self, kind: Kind, nbytes: int) -> None:
        """Count ``nbytes`` as returned to the driver."""
        self._returned.append((kind, nbytes))

    def reserved(self) -> dict[Kind, int]:
        """Return the bytes reserved by each pool."""
        with self._lock:
            return dict(self._counted())

    def given_bytes(self) -> int:
        """Return the bytes of managed memory from another library; walks its allocations."""
        with self._lock:
            self._counted()
            return sum(list(self._given.values()))

    def peak(self, other_bytes: int = 0) -> int:
        """Return the peak of reserved bytes; ``other_bytes`` is the current size of other pools."""
        with self._lock:
            self._other_bytes = other_bytes
            self._peak = max(self._peak, sum(self._counted().values()) + other_bytes)
            return self._peak

    def _counted(self) -> dict[Kind, int]:
        """Return the reserved bytes, after subtracting freed allocations."""
        while self._given_over:
            self._reserved["managed"] -= self._given.pop(self._given_over.popleft())
        while self._returned:
            returned = self._returned.popleft()
            if isinstance(returned, MemoryOwnerRef):
                self._leases.discard(returned)
                returned = returned.ticket
            kind, nbytes = returned
            self._reserved[kind] -= nbytes
        return self._reserved
