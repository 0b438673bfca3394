"""A million allocations and as many frees over eight threads, in any order: nothing overlaps,
nothing leaks, every byte is returned.

The oracle is a map of the address space, a byte for every 512 bytes of it, that knows nothing of
pools: whoever gets memory finds it blank and writes its tag, whoever gives it back finds the tag
whole and wipes it. Two owners of the same bytes cannot both come out of that unnoticed.

The default run makes 40,000; `-m slow` the whole million.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import defaultdict, deque

import pytest

import umem
from umem.devices import Policy
from umem.errors import OutOfMemoryError
from umem.trace import Alloc, Free

pytestmark = pytest.mark.thorough

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512
THREADS = 8
LIVE = 40
"""Allocations that a thread holds at most."""
SWITCH_SECONDS = 1e-5
"""How long a thread runs before another one takes over: 5 ms would seldom catch one half-way."""
COUNTS = [
    pytest.param(40_000, id="40k"),
    pytest.param(1_000_000, id="million", marks=pytest.mark.slow),
]


class Map:
    """Who owns which 512 bytes; single operations on a bytearray are atomic."""

    def __init__(self, nbytes: int) -> None:
        self.units = bytearray(nbytes // UNIT)

    def take(self, address: int, nbytes: int, tag: int) -> None:
        start, stop = address // UNIT, -(-(address + nbytes) // UNIT)
        assert address > 0 and address % UNIT == 0 and stop <= len(self.units)
        assert self.units.count(0, start, stop) == stop - start, "handed out twice"
        self.units[start:stop] = bytes((tag,)) * (stop - start)

    def wipe(self, address: int, nbytes: int, tag: int) -> None:
        start, stop = address // UNIT, -(-(address + nbytes) // UNIT)
        assert self.units.count(tag, start, stop) == stop - start, "somebody else wrote here"
        self.units[start:stop] = bytes(stop - start)


def run(work, count, record_property) -> None:
    """``work(thread, random, tags, count)`` on every thread; the first failure is raised."""
    errors, start = [], threading.Barrier(THREADS)

    def guarded(number: int) -> None:
        tags = range(1 + number * 31, 32 + number * 31)
        try:
            start.wait(300)
            work(number, random.Random(number), tags, count // THREADS)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    before, interval = time.perf_counter(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    seconds = time.perf_counter() - before
    if errors:
        raise errors[0]
    record_property("seconds", round(seconds, 2))
    print(f"{count} allocations and as many frees over {THREADS} threads: {seconds:.1f} s")


def some_size(rng: random.Random) -> int:
    """Mostly small, as arrays are; up to 2 MiB."""
    return rng.randint(1, rng.choice((KIB, 16 * KIB, 16 * KIB, 128 * KIB, 2 * MIB)))


def lives(rng: random.Random, tags: range, count: int, allocate, free) -> None:
    """``count`` allocations and frees in a random order; what is left is freed at the end."""
    live: list[object] = []
    made = 0
    while made < count:
        if live and (len(live) == LIVE or rng.random() < 0.45):
            free(live.pop(rng.randrange(len(live))))
        else:
            got = allocate(some_size(rng), tags[made % len(tags)])
            made += 1
            if got is not None:
                live.append(got)
    rng.shuffle(live)
    while live:
        free(live.pop())


# -- the virtual GPU's pools, under its lock -----------------------------------------------------

POLICIES = [
    Policy("managed"),
    Policy("hybrid"),
    Policy("unmanaged"),
    Policy("hybrid", spill="migrate"),
    Policy("managed"),
    Policy("hybrid"),
    Policy("managed", limit_bytes=1 << 30),
    Policy("managed", prefetch=True),
]


@pytest.mark.parametrize("count", COUNTS)
def test_the_virtual_gpus_pools(count, record_property):
    ground, refused = Map(2 << 30), []
    with umem.virtual_gpu("v100-16gb", vram="24MiB") as gpu:

        def work(number, rng, tags, count):
            restore = gpu.install(POLICIES[number], everywhere=False)
            ids = iter(range(number << 32, (number + 1) << 32))

            def allocate(nbytes, tag):
                tensor = next(ids)
                try:
                    gpu.on_event(Alloc(tensor, nbytes, "array", "x"))
                except OutOfMemoryError:
                    refused.append(POLICIES[number].mode)
                    return None
                span = gpu.model.tensors[tensor].span
                assert span.nbytes >= nbytes
                ground.take(*span, tag)
                return tensor, span, tag

            def free(got):
                tensor, span, tag = got
                ground.wipe(*span, tag)
                gpu.on_event(Free(tensor))

            lives(rng, tags, count, allocate, free)
            restore()

        run(work, count, record_property)
        driver = gpu.model.driver
        pools = (driver.unmanaged, driver.managed, driver.spill_host, driver.spill_migrate)
        peak = gpu.usage().peak_bytes
        assert peak > gpu.vram_bytes  # or nothing was tried
        assert all(pool.reserved_bytes for pool in pools)
        assert set(refused) <= {"unmanaged"}
        assert not gpu.model.tensors and not any(ground.units)
        assert [pool.used_bytes for pool in pools] == [0, 0, 0, 0]
        for pool in pools:
            pool.free_all_blocks()
        usage = gpu.usage()
        assert (usage.reserved_bytes, usage.managed_bytes, usage.resident_bytes) == (0, 0, 0)
        assert driver.pinned_count == 0 and driver.residency.count == 0


# -- hybrid on CUDA: the real allocator, pool growth and ledger over pools of made-up memory -----


class Addresses:
    """Made-up memory of a limited size: addresses, which nobody ever follows."""

    def __init__(self, base: int, nbytes: int, error) -> None:
        self.left, self.made, self.failures = nbytes, 0, 0
        self._next, self._error = base, error
        self._lock = threading.Lock()
        self._known: dict[int, list[int]] = defaultdict(list)
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int:
        with self._lock:
            self.settle()
            if nbytes > self.left:
                self.failures += 1
                raise self._error(2)
            self.left -= nbytes
            self.made += 1
            known = self._known[nbytes]
            if known:
                return known.pop()
            address, self._next = self._next, self._next + nbytes
            return address

    def give_back(self, address: int, nbytes: int) -> None:
        self._returned.append((address, nbytes))  # no lock: the garbage collector calls this

    def settle(self) -> None:
        while self._returned:
            address, nbytes = self._returned.popleft()
            self._known[nbytes].append(address)
            self.left += nbytes


class Owner:
    """Calls back when the last pointer to its memory is gone."""

    def __init__(self, gone, *args) -> None:
        self.gone, self.args = gone, args

    def __del__(self) -> None:
        self.gone(*self.args)


def pointer(address: int, nbytes: int, owner: Owner):
    import cupy

    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device_id=0)
    return cupy.cuda.MemoryPointer(memory, 0)


class SharedPool:
    """In the place of CuPy's pool: caches blocks by size, and any thread may use it."""

    def __init__(self, grow) -> None:
        self._grow, self._lock = grow, threading.RLock()
        self._free: dict[int, list[object]] = defaultdict(list)
        self._dead: deque[object] = deque()
        self._used = 0

    def malloc(self, nbytes: int):
        size = max(UNIT, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._settle()
            block = self._free[size].pop() if self._free[size] else None
        if block is None:
            block = self._grow(size)
        with self._lock:
            self._used += size
        return pointer(block.ptr, size, Owner(self._dead.append, block))

    def _settle(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            self._used -= block.mem.size
            self._free[block.mem.size].append(block)

    def used_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._used

    def n_free_blocks(self) -> int:
        return 1

    def free_all_blocks(self) -> None:
        with self._lock:
            self._settle()
            blocks, self._free = self._free, defaultdict(list)
        blocks.clear()

    def total_bytes(self) -> int:
        return 0

    def set_limit(self, size: int) -> None: ...


@pytest.mark.parametrize("count", COUNTS)
def test_hybrid(count, record_property):
    cupy = pytest.importorskip("cupy")
    from cuda_host_driver import DriverError, HostDriver

    from umem.devices.cuda import CudaDevice

    vram = Addresses(1 << 30, 24 * MIB, DriverError)
    host = Addresses(2 << 30, 1 << 30, DriverError)

    class Driver(HostDriver):
        def allocate(self, nbytes):
            address = vram.take(nbytes)
            return pointer(address, nbytes, Owner(vram.give_back, address, nbytes))

        def allocate_managed(self, nbytes):
            address = host.take(nbytes)
            return pointer(address, nbytes, Owner(host.give_back, address, nbytes))

        def make_pool(self, grow):
            return SharedPool(grow)

        def prefer_host(self, address, nbytes): ...

    device = CudaDevice(Driver(host=None))
    ground, fast, spilled = Map(4 << 30), [0] * THREADS, [0] * THREADS

    def work(number, rng, tags, count):
        def allocate(nbytes, tag):
            got = cupy.cuda.alloc(nbytes)
            assert got.mem.size >= nbytes and got.ptr % UNIT == 0
            which = fast if got.ptr < 2 << 30 else spilled
            which[number] += 1
            ground.take(got.ptr, got.mem.size, tag)
            return got, tag

        def free(got):
            ground.wipe(got[0].ptr, got[0].mem.size, got[1])

        lives(rng, tags, count, allocate, free)

    restore = device.install(Policy("hybrid"), everywhere=True)
    try:
        run(work, count, record_property)
    finally:
        restore()
    gc.collect()
    assert sum(fast) + sum(spilled) == count
    assert sum(fast) > count // 10 and sum(spilled) > count // 10 and vram.failures
    assert not any(ground.units)
    for kind in ("unmanaged", "spill"):
        pool = device.pools.pool(kind)
        assert pool.used_bytes() == 0
        pool.free_all_blocks()
    assert set(device.pools.ledger.reserved().values()) == {0}
    for memory, nbytes in ((vram, 24 * MIB), (host, 1 << 30)):
        memory.settle()
        assert memory.left == nbytes and memory.made
