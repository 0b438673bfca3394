"""Watches allocations with CuPy's memory hooks, without replacing an allocator.

A program may set allocators meanwhile. The hooks see memory of every pool that calls hooks.
"""

from __future__ import annotations

from cupy.cuda import memory_hook

from umem._common.scopes import Scope
from umem.devices.base import Watcher
from umem.devices.cuda.arena import listeners


class AddressHook(memory_hook.MemoryHook):
    """Notifies a watcher of allocations, but not frees, in the thread that enters it."""

    name = "umem.paging"

    def __init__(self, watcher: Watcher) -> None:
        self.is_on = True
        self._watcher = watcher

    def enter(self, scope: Scope) -> None:
        """Follow this thread until any thread closes a scope."""
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
        """Report an arena's allocation, which calls no hooks."""
        self._watcher.begin()
        self._watcher.allocated(nbytes, "managed memory", address)

    def malloc_preprocess(self, **allocation: int) -> None:
        if self.is_on:
            self._watcher.begin()

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        if self.is_on and mem_ptr:
            self._watcher.allocated(mem_size, "memory of CuPy's pools", mem_ptr)
