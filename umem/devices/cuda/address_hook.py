"""CuPy's memory hooks as a watcher of allocations: it replaces no allocator.

A program may set allocators meanwhile, and memory of every pool that calls hooks is seen.
"""

from __future__ import annotations

from cupy.cuda import memory_hook

from umem._common.scopes import Scope
from umem.devices.base import Watcher
from umem.devices.cuda.arena import listeners


class AddressHook(memory_hook.MemoryHook):
    """Tells a watcher of the allocations of the thread that enters it, and of no free."""

    name = "umem.paging"

    def __init__(self, watcher: Watcher) -> None:
        self.is_on = True
        self._watcher = watcher

    def enter(self, scope: Scope) -> None:
        """Follow this thread until a scope is closed, by whichever thread."""
        stale = memory_hook.get_memory_hooks().get(self.name)
        if stale is not None:  # another thread has ended it, and cannot take it out of this one
            stale.__exit__()
        scope.at_close(self._end)
        listeners.append(self._note)
        self.__enter__()
        scope.open()

    def _end(self) -> None:
        self.is_on = False
        if self._note in listeners:
            listeners.remove(self._note)
        if memory_hook.get_memory_hooks().get(self.name) is self:
            self.__exit__()

    def _note(self, address: int, nbytes: int) -> None:
        """Tell of memory of an arena, which calls no hooks."""
        self._watcher.begin()
        self._watcher.allocated(nbytes, "managed memory", address)

    def malloc_preprocess(self, **allocation: int) -> None:
        if self.is_on:
            self._watcher.begin()

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        if self.is_on and mem_ptr:
            self._watcher.allocated(mem_size, "memory of CuPy's pools", mem_ptr)
