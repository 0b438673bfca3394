"""Follows the blocks that CuPy's pools allocate.

Importing this module imports CuPy.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from cupy.cuda import memory_hook

from umem.host_cuda.runtime import HostRuntime


class BlockHook(memory_hook.MemoryHook):
    """CuPy's memory hook in every thread that uses the runtime, for the life of the process.

    It replaces no allocator. CuPy has hooks for each thread; the runtime announces new threads.

    Args:
        runtime: announces threads.
    """

    name = "umem.pool_blocks"

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        runtime.thread_begins = self.follow_thread
        self.follow_thread()
        # CuPy asks for its hooks at every free, of which some come when its modules are gone.
        atexit.register(memory_hook.get_memory_hooks().pop, self.name, None)

    def follow_thread(self) -> None:
        """Follow the calling thread."""
        memory_hook.get_memory_hooks()[self.name] = self


class PoolBlockHook(BlockHook):
    """Reports the blocks to the runtime.

    Args:
        runtime: notified of blocks.
    """

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        if mem_ptr:  # of a request that failed, or of no bytes, there is none
            self._runtime.new_block(mem_ptr, mem_size)


class FreshBlockHook(BlockHook):
    """Fills new pool blocks, because a reused block may contain anything.

    Args:
        runtime: fills the blocks.
        current_stream: returns CuPy's stream for a block.
    """

    def __init__(self, runtime: HostRuntime, current_stream: Callable[[], int]) -> None:
        super().__init__(runtime)
        self._current_stream = current_stream

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        if mem_ptr:
            self._runtime.fill_block(mem_ptr, mem_size, self._current_stream())
