"""An allocator that tells a watcher what it hands out, and when that is free again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem.devices.base import Policy, Watcher
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.driver import Malloc


class _Held:
    """Keeps an allocation while arrays use it, and tells when the last one lets go.

    CuPy's pooled memory cannot be weakly referenced, so arrays get memory that this owns.
    """

    __slots__ = ("_freed", "_pointer", "_ticket")

    def __init__(self, pointer: Any, freed: Callable[[Any], None], ticket: Any) -> None:
        self._pointer, self._freed, self._ticket = pointer, freed, ticket

    def __del__(self) -> None:
        self._freed(self._ticket)


def watched(malloc: Malloc, watcher: Watcher, policy: Policy | None) -> Malloc:
    """``malloc``, with ``watcher`` told of every allocation but empty ones.

    Costs a few microseconds an allocation (bench/allocation.py). Arrays may outlive the watch:
    what they hold knows nothing of who allocates now.
    """
    label = "memory of CuPy's allocator" if policy is None else f"{policy.mode} memory"
    allocated, freed, borrowed = watcher.allocated, watcher.freed, cuda_driver.borrowed

    def malloc_watched(nbytes: int) -> Any:
        pointer = malloc(nbytes)
        if not nbytes:
            return pointer
        return borrowed(pointer, nbytes, _Held(pointer, freed, allocated(nbytes, label)))

    return malloc_watched
