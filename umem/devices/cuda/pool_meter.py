"""Measures a GPU's memory: levels from the pools' own figures, peaks from CuPy's memory hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cupy
from cupy.cuda import memory_hook

from umem.devices.cuda.arena import Arena, listeners
from umem.devices.cuda.driver import CupyPool, own_pool
from umem.devices.cuda.gpus import open_cuda
from umem.devices.cuda.pool_in_use import PoolInUse
from umem.devices.cuda.retrying import bare
from umem.trace.recording import AllocationReporter, HeldBytes
from umem.units import BLOCK_BYTES

Level = CupyPool | Arena
"""Memory that reports the bytes used by arrays."""


class _PeakHook(memory_hook.MemoryHook):
    """Reads the level after each allocation of the thread that entered it."""

    def __init__(self, meter: PoolMeter) -> None:
        # CuPy keeps a thread's hooks by name; a second one of a name is a KeyError.
        self.name = f"umem PoolMeter {id(self):x}"
        self.is_on = True
        self._meter = meter

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        if self.is_on:
            self._meter.note()
            self._meter.pools.note(mem_ptr, mem_size)

    def alloc_postprocess(self, mem_size: int, **allocation: int) -> None:
        if self.is_on and mem_size >= BLOCK_BYTES // 2:  # the driver puts smaller ones together
            self._meter.pools.rounding_bytes += -mem_size % BLOCK_BYTES


class _BlockHook(_PeakHook):
    """Reports each block too."""

    def __init__(self, meter: PoolMeter, reporter: AllocationReporter) -> None:
        super().__init__(meter)
        self._reporter = reporter

    def malloc_postprocess(self, mem_ptr: int, mem_size: int, **allocation: int) -> None:
        super().malloc_postprocess(mem_ptr, mem_size, **allocation)
        if self.is_on:
            self._reporter.begun(mem_ptr, allocation["size"])

    def free_postprocess(self, mem_ptr: int, **allocation: int) -> None:
        if self.is_on:
            self._reporter.ended(mem_ptr)


class PoolMeter:
    """Measures the bytes that arrays use in the current GPU's pools: CuPy's own, umem's, the
    allocator's.

    Sizes are the pools', in steps of 512 bytes. The level counts every thread's arrays; the peak is
    sampled at allocations of followed threads, and when it is read. Unlike `HostMeter`, a free of
    memory from before `start` lowers the level. umem's arenas call no hooks, and report their
    allocations themselves.

    Args:
        reporter: notified of allocated and freed blocks.

    Attributes:
        is_blind: whether the current allocator calls no memory hooks, determined at `start` and
            `reset`; False without a reporter, for which `why_not` tells it.

    Cost: some microseconds an allocation between `start` and `stop` (bench/allocation.py).
    Never run on a real GPU.
    """

    is_ours = False

    def __init__(self, reporter: AllocationReporter | None = None) -> None:
        self.pools = gpu_pools()
        self.is_blind = False
        self._reporter = reporter
        self._allocator: Any = None
        self._levels: tuple[Level, ...] = ()
        self._hook: _PeakHook | None = None
        self._peak = 0

    def start(self) -> None:
        """Follow the existing pools and this thread's allocations; reset the peak.

        Only resets the peak if already started.

        Raises:
            StateError, DeviceNotFoundError: this process was forked from one that used CUDA; it
                follows nothing.
        """
        if self._hook is None:
            self._look()
            self._hook = (
                _PeakHook(self) if self._reporter is None else _BlockHook(self, self._reporter)
            )
            self.follow_thread()
            listeners.append(self.note)
        self.reset()

    def follow_thread(self) -> None:
        """Follow the calling thread too; does nothing if already followed, or before `start`."""
        hooks = memory_hook.get_memory_hooks()
        if self._hook is None or hooks.get(self._hook.name) is self._hook:
            return
        for hook in list(hooks.values()):
            if isinstance(hook, _PeakHook) and not hook.is_on:  # another thread stopped it
                hook.__exit__()
        self._hook.__enter__()

    def _look(self) -> None:
        """Find the pools of the current allocator, and whether it calls memory hooks."""
        self._allocator = cupy.cuda.get_allocator()
        self._levels = tuple(levels())
        if self._reporter is not None:
            with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError), _without_hooks():
                self.is_blind = self.why_not() is not None

    def stop(self) -> None:
        """Stop following allocations; a second call does nothing. Any thread may stop it."""
        hook, self._hook = self._hook, None
        if hook is None:
            return
        hook.is_on = False
        listeners.remove(self.note)
        if hook.name in memory_hook.get_memory_hooks():  # those of this thread
            hook.__exit__()

    def __enter__(self) -> PoolMeter:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def why_not(self) -> str | None:
        """Return why the current allocator's peaks cannot be measured; None if they can.

        Allocates 512 bytes and frees them: peaks can be measured if that calls memory hooks, as
        `cupy.cuda.MemoryPool` does, and raises the level.

        Raises:
            OutOfMemoryError: CuPy's, which the next allocation would raise too.
        """
        allocator = cupy.cuda.get_allocator()
        with PoolMeter() as probe:
            before = probe.held().live
            block = allocator(1)
            found = probe._peak  # what the hook has seen, which held() would not tell apart
            del block
        return None if found > before else _unmeasured(allocator)

    def _level(self) -> int:
        total = 0
        for level in self._levels:  # sum() over a generator takes twice as long for one pool
            total += level.used_bytes()
        return total

    def note(self, address: int = 0, nbytes: int = 0) -> None:
        """Raise the peak to the current level."""
        level = self._level()
        if level > self._peak:
            self._peak = level

    def held(self) -> HeldBytes:
        """Return the bytes that arrays use and their peak since `reset`; zeros before `start`."""
        self.note()
        return HeldBytes(self._level(), self._peak)

    def reset(self) -> None:
        """Set the peak to the level, and follow the pools of a changed allocator."""
        if self._allocator is not cupy.cuda.get_allocator() and self._hook is not None:
            self._look()
        self._peak = self._level()


class GpuPools:
    """The pools of one GPU: their reserved bytes and limits, and one piece for a budget.

    A pool asks the driver for a piece for each array that finds no free block, and the driver
    rounds each piece up to whole blocks of 2 MiB. So arrays slightly over 1 MiB take twice their
    size. `reserve` asks only once.

    Attributes:
        rounding_bytes: the driver's rounding of the segments that a `PoolMeter` saw allocated.
    """

    def __init__(self) -> None:
        self.rounding_bytes = 0
        self._piece = range(0)
        self._top = 0

    def in_use(self) -> int:
        """Return the bytes that arrays use."""
        return sum(one.used_bytes() for one in levels())

    def reserved(self) -> int:
        """Return the bytes that the pools have reserved, for freed arrays too.

        A cache has no such figure; it counts with the bytes that arrays use.
        """
        return sum(getattr(one, "total_bytes", one.used_bytes)() for one in levels())

    def needed(self) -> int:
        """Return the reserved bytes without the end of the piece, which no array has used.

        Counts use since `forget_use`, and includes the driver's rounding.
        """
        unused = len(self._piece) and self._piece.stop - max(self._top, self._piece.start)
        return self.reserved() - unused + self.rounding_bytes

    @property
    def is_vram(self) -> bool:
        """True if the current allocator is CuPy's own pool, which uses VRAM only."""
        return _current_pool() is own_pool()

    def spare(self) -> int:
        """Return the most that the pools can reserve, from free VRAM and their limits.

        Leaves space for modules and libraries. Other processes may take VRAM that is free now.
        """
        driver = open_cuda().driver
        free = driver.free_bytes() // BLOCK_BYTES * BLOCK_BYTES
        most = free + self.reserved() - driver.headroom_bytes
        limits = [limit for one in levels() if (limit := getattr(one, "get_limit", int)())]
        return min(most, *limits) if limits else most

    def reserve(self, nbytes: int) -> None:
        """Make the current pool reserve one piece, so that it has so many bytes in all, if
        available.

        The pool keeps it until it is unused and free blocks are returned. Does nothing if the
        current allocator is not a pool's own method: in hybrid mode the piece might be in host
        memory.
        """
        pool = _current_pool()
        if pool is None or nbytes - self.reserved() < BLOCK_BYTES:
            return
        missing = min(nbytes, self.spare()) - self.reserved()
        if missing >= BLOCK_BYTES:
            with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError), _without_hooks():
                piece = pool.malloc(missing // BLOCK_BYTES * BLOCK_BYTES)
                self._piece = range(piece.ptr, piece.ptr + piece.mem.size)

    def give_back(self) -> None:
        """Return free blocks to the GPU."""
        before, user_pool, pools = self.reserved(), _current_pool(), open_cuda().pools
        pools.give_back_everything()
        if user_pool is not None and user_pool not in (own_pool(), *pools.made()):
            pools.flush(user_pool)
        if before - self.reserved() >= len(self._piece):
            self._piece = range(0)  # it may be gone

    def forget_use(self) -> None:
        """Forget which part of the piece arrays have used."""
        self._top = self.rounding_bytes = 0

    def note(self, address: int, nbytes: int) -> None:
        """Record that an array uses a range."""
        if address in self._piece and address + nbytes > self._top:
            self._top = address + nbytes


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Disable this thread's memory hooks, because the allocation is not an array of the program."""
    hooks = memory_hook.get_memory_hooks()
    kept = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(kept)


_gpus: dict[int, GpuPools] = {}


def gpu_pools() -> GpuPools:
    """Return the pools of the current GPU."""
    return _gpus.setdefault(cupy.cuda.Device().id, GpuPools())


def levels() -> list[Level]:
    """Return the current GPU's pools, each once: CuPy's, umem's, the current allocator's."""
    found: list[Level] = [own_pool(), *open_cuda().pools.made()]
    user_pool = _current_pool()
    if user_pool is not None and user_pool not in found:
        found.append(user_pool)
    return found


def _current_pool() -> CupyPool | None:
    """Return the pool of the current allocator; None if that is not a pool's method.

    For a `PoolInUse`, which only passes requests on, returns the pool that serves it.
    """
    user_pool: Any = getattr(bare(cupy.cuda.get_allocator()), "__self__", None)
    while isinstance(user_pool, PoolInUse):
        user_pool = getattr(bare(user_pool.serve), "__self__", None)
    return user_pool if isinstance(user_pool, cupy.cuda.memory.MemoryPool) else None


def _unmeasured(allocator: Any) -> str:
    """Explain why an allocator cannot be measured, with its name."""
    user_pool = getattr(allocator, "__self__", None)
    owner = allocator if user_pool is None or isinstance(user_pool, ModuleType) else type(user_pool)
    name = getattr(owner, "__name__", type(allocator).__name__)
    return (
        f"the current allocator of CuPy ({name}) calls no memory hooks, so peaks and workspace are "
        "not measured; use cupy.cuda.MemoryPool over it"
    )
