"""An allocator that notifies a watcher of allocations and frees."""

from __future__ import annotations

from collections import deque
from typing import Any

from umem.devices.base import Policy, Watcher
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.driver import Malloc
from umem.devices.cuda.ledger import MemoryOwner, MemoryOwnerRef


class WatchedAllocations:
    """The allocations that one watcher was notified of.

    Any thread may free, and `report_frees` may be called from any.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.live: set[MemoryOwnerRef] = set()
        self.dead: deque[MemoryOwnerRef] = deque()

    def report_frees(self) -> None:
        """Notify the watcher of all frees so far."""
        while self.dead:
            try:
                ref = self.dead.popleft()
            except IndexError:  # another thread was faster
                return
            self.live.discard(ref)
            self.watcher.freed(ref.ticket)


def watched(malloc: Malloc, watch: WatchedAllocations, policy: Policy | None) -> Malloc:
    """Wrap an allocator so that a watcher is notified of every non-empty allocation.

    Costs a few microseconds an allocation (bench/allocation.py). Arrays may outlive the watch; they
    hold no reference to the current allocator.
    """
    label = "memory of CuPy's allocator" if policy is None else f"{policy.mode} memory"
    allocated, borrowed = watch.watcher.allocated, cuda_driver.borrowed
    live, dead, died = watch.live, watch.dead, watch.dead.append

    def malloc_watched(nbytes: int) -> Any:
        """Allocate, and notify the watcher."""
        pointer = malloc(nbytes)
        if not nbytes:
            return pointer
        if dead:
            watch.report_frees()
        held = MemoryOwner(pointer)
        ref = MemoryOwnerRef(held, died)
        ref.ticket = allocated(nbytes, label, pointer.ptr)
        live.add(ref)
        return borrowed(pointer, nbytes, held)

    return malloc_watched
