"""The meter of a GPU's pools, on the software GPU: every program in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import START, lines, needs_compiler, needs_cupy, run

pytestmark = [needs_compiler, needs_cupy]
METER = """
from umem.devices.cuda.pool_meter import PoolMeter
KIB = 1024
def array(kib): return cp.empty(kib * KIB, cp.uint8)
def kib(held): return held.live // KIB, held.peak // KIB
at_first = set(cp.cuda.memory_hook.get_memory_hooks())  # of the software GPU itself
def hooks(): return len(set(cp.cuda.memory_hook.get_memory_hooks()) - at_first)
meter = PoolMeter()
"""


def said(program: str, cache: Path) -> list[str]:
    return run(METER + program, cache).splitlines()


def test_level_and_peak_are_the_pool_s_own(kernel_cache: Path) -> None:
    program = """
print(kib(meter.held()))
old = array(8)
with meter:
    base = meter.held().live
    assert base == cp.get_default_memory_pool().used_bytes()
    x, y = array(64), array(32)
    del x
    print(kib(meter.held()), meter.held().workspace // KIB)
    meter.reset()
    print(kib(meter.held()))
    del old
    print(kib(meter.held()))
    tiny = cp.empty(1, cp.uint8)
    print(meter.held().live % KIB)
"""
    assert said(program, kernel_cache) == ["(0, 0)", "(40, 104) 64", "(40, 40)", "(32, 40)", "512"]


def test_arrays_of_other_threads_and_the_collector_count(kernel_cache: Path) -> None:
    program = """
import gc, threading
kept = []
meter.start()
other = threading.Thread(target=lambda: kept.append(array(16)))
other.start(); other.join()
print(kib(meter.held()))
class Loop: pass
loop = Loop(); loop.self, loop.array = loop, array(64)
del loop
freeing = threading.Thread(target=lambda: (kept.clear(), gc.collect()))
freeing.start(); freeing.join()
print(kib(meter.held()))
"""
    assert said(program, kernel_cache) == ["(16, 16)", "(0, 80)"]


def test_hooks_of_the_program_s_own_come_and_go_in_any_order(kernel_cache: Path) -> None:
    program = """
class Mine(cp.cuda.memory_hook.MemoryHook):
    name, count = "mine", 0
    def malloc_postprocess(self, **k): self.count += 1
mine, second = Mine(), PoolMeter()
meter.start()
mine.__enter__()
second.start()
x = array(4)
meter.stop()
y = array(4)
mine.__exit__()
z = array(4)
print(mine.count, kib(second.held()))
second.stop(); second.stop(); meter.stop()
print(hooks())
meter.start(); meter.start(); meter.stop()
print(hooks())
"""
    assert said(program, kernel_cache) == ["2 (12, 12)", "0", "0"]


def test_a_meter_that_another_thread_stops_follows_nothing_any_more(kernel_cache: Path) -> None:
    program = """
import threading
meter.start()
stopping = threading.Thread(target=meter.stop)
stopping.start(); stopping.join()
x = array(64); del x
print(meter.held().peak // KIB)
meter.start()
x = array(64); del x
print(meter.held().peak // KIB, hooks())
"""
    assert said(program, kernel_cache) == ["0", "64 1"]


def test_pools_of_umem_s_modes_are_measured(kernel_cache: Path) -> None:
    program = """
for mode in (umem.managed, umem.hybrid, umem.unmanaged):
    with mode():
        first = array(8)
        with meter:
            x = array(64); y = array(8); del x
            print(meter.why_not(), kib(meter.held()))
        del first, y
"""
    assert said(program, kernel_cache) == ["None (16, 80)"] * 3


def test_an_allocator_without_hooks_is_said_and_one_of_cupy_s_own_is_measured(
    kernel_cache: Path,
) -> None:
    program = """
print(meter.why_not())
cp.cuda.set_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc)
with meter:
    x = array(64)
    print(meter.why_not(), kib(meter.held()))
cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)
print(meter.why_not())
cp.cuda.set_allocator(cp.cuda.malloc_managed)
print(meter.why_not())
cp.cuda.set_allocator(None)
print("None is", meter.why_not())
"""
    none, own, pool, function, last = said(program, kernel_cache)
    assert (none, own) == ("None", "None (64, 64)")
    assert "(MemoryAsyncPool) calls no memory hooks" in pool
    assert "(malloc_managed) calls no memory hooks" in function
    assert "None is" in last


def test_a_watched_allocator_is_measured_and_one_that_bypasses_the_pool_is_said(
    kernel_cache: Path,
) -> None:
    program = """
with umem.track():
    with meter:
        x = array(64); del x
        print(meter.why_not(), kib(meter.held()))
cp.cuda.set_allocator(lambda nbytes: cp.cuda.malloc_managed(nbytes))
print(meter.why_not()[:50])
"""
    first, second = said(program, kernel_cache)
    assert first == "None (0, 64)"
    assert second == "the current allocator of CuPy (<lambda>) calls no "


def test_checked_mode_has_no_pools_that_could_be_measured(kernel_cache: Path) -> None:
    start = START.replace("force=True", "force=True, checked=True")
    program = """
print("calls no memory hooks" in meter.why_not())
with umem.managed():
    print("calls no memory hooks" in meter.why_not())
"""
    assert run(METER + program, kernel_cache, start=start).splitlines() == ["True", "True"]


def test_an_arena_tells_of_its_allocations(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda.gpus import open_cuda
from umem._common.scopes import Scope
scope = Scope()
with umem.managed():
    open_cuda().repeat_places(scope)
    print(meter.why_not())
    with meter:
        kept = array(4)
        array(8)
        print(kib(meter.held()))
    array(32)
    print(kib(meter.held()))
    scope.close()
"""
    assert said(program, kernel_cache) == ["None", "(4, 12)", "(4, 12)"]


def test_a_piece_is_divided_among_arrays_and_its_end_is_not_needed(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda.pool_meter import GpuPools, gpu_pools
MIB = KIB * KIB
pool, pools = cp.get_default_memory_pool(), gpu_pools()
assert pools is gpu_pools()
class Seen(cp.cuda.memory_hook.MemoryHook):
    name, count = "seen", 0
    def malloc_postprocess(self, **allocation): self.count += 1
seen = Seen()
with seen:
    pools.reserve(17 * MIB)
print(seen.count, pools.reserved() // MIB, pools.in_use())
with meter:
    pools.forget_use()
    x, y = array(1100), array(1100)
    print(pools.reserved() // MIB, pools.needed() // KIB)
    del x
    z = array(100)
    print(pools.needed() // KIB)
pools.reserve(16 * MIB)
pools.give_back()
print(pools.reserved() // MIB)
del y, z
pools.give_back()
print(pools.reserved(), pools.needed())
with meter:
    pools.forget_use()
    x = array(1100)
    print(pools.reserved() // KIB, pools.needed() // KIB)
"""
    assert said(program, kernel_cache) == [
        "0 16 0", "16 2200", "2200", "16", "0 0", "1100 2048",
    ]  # fmt: skip


def test_what_there_is_to_spare_is_bounded_by_vram_and_by_a_pool_s_limit(
    kernel_cache: Path,
) -> None:
    program = """
from umem.devices.cuda.pool_meter import gpu_pools
MIB = KIB * KIB
pool, pools = cp.get_default_memory_pool(), gpu_pools()
free = cp.cuda.Device().mem_info[0]
print(pools.spare() == free)
x = array(8 * KIB)
print(pools.spare() == free, pools.in_use() // MIB)
pool.set_limit(size=20 * MIB)
print(pools.spare() // MIB)
pools.reserve(1 << 40)
print(pools.reserved() // MIB)
pools.reserve(1)
pool.set_limit(size=4 * MIB)
pools.reserve(16 * MIB)
print(pools.reserved() // MIB)
"""
    assert said(program, kernel_cache) == ["True", "True 8", "20", "20", "20"]


def test_no_piece_is_reserved_where_it_might_be_in_host_memory(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda.pool_meter import gpu_pools
pools = gpu_pools()
for mode in ("hybrid", "managed"):
    with umem.enable(mode):
        pools.reserve(8 * KIB * KIB)
        print(mode, pools.reserved() // (KIB * KIB))
cp.cuda.set_allocator(lambda nbytes: cp.get_default_memory_pool().malloc(nbytes))
pools.give_back()
pools.reserve(8 * KIB * KIB)
print(pools.reserved())
"""
    assert said(program, kernel_cache) == ["hybrid 0", "managed 8", "0"]


@pytest.mark.parametrize("mode", ["managed", "hybrid", "unmanaged"])
def test_memory_counts_once_where_the_default_pool_is_set_as_the_allocator(
    kernel_cache: Path, mode: str
) -> None:
    """The idiom of CuPy programs, under `umem.enable`, where that pool is umem's."""
    program = f"""
from umem.devices.cuda.pool_meter import PoolMeter, gpu_pools
umem.enable({mode!r})
x = cp.ones(8 << 20, "u1")
def figures():
    with PoolMeter() as meter:
        y = cp.ones(4 << 20, "u1")
        del y
        pools = gpu_pools()
        figures = pools.in_use(), pools.reserved(), meter.held().peak, pools.spare()
    return [each >> 20 for each in figures], gpu_pools().is_vram
before = figures()
cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
print(figures() == before, before[0][:3])
umem.disable()
print(gpu_pools().is_vram)
"""
    assert lines(program, kernel_cache) == ["True [8, 12, 12]", "True"]
