"""Memory is given back when nothing uses it any more, and nothing is disturbed by that."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import START, lines, needs_compiler, needs_cupy

pytestmark = [needs_compiler, needs_cupy]
TWO_GPUS = """
import umem
gpu = umem.software_gpu("t4", "256MiB", devices=2, force=True)
import cupy as cp
MIB = 1 << 20
"""
TRIED = """
def tried(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.mark.parametrize("way", ["gpu_pools().give_back", "open_cuda().pools.give_back_everything"])
def test_memory_that_queued_work_reads_is_not_freed(kernel_cache: Path, way: str) -> None:
    """By each way of giving back, of umem's pools and of one of the program's own."""
    program = f"""
from umem.devices.cuda import open_cuda
from umem.devices.cuda.pool_meter import gpu_pools
own = cp.cuda.MemoryPool(cp.cuda.malloc_managed)
for name, block in (("umem's", umem.managed), ("own", lambda: cp.cuda.using_allocator(own.malloc))):
    wrong = []
    for seed in range(10):
        gpu.reseed(seed)
        with block():
            x = cp.full(1 << 20, 3, "i4")
            cp.cuda.Device().synchronize()
            y = x * 2
            del x
            {way}()
            if int((y != 6).sum()):
                wrong.append(seed)
            del y
    gpu.reseed(None)
    print(name, wrong)
"""
    late = START.replace("force=True", "force=True, stream_seed=0")
    assert lines(program, kernel_cache, start=late) == ["umem's []", "own []"]


def test_plain_memory_is_freed_without_a_wait(kernel_cache: Path) -> None:
    """A free of cudaMalloc's memory waits by itself."""
    program = """
from umem.devices.cuda import open_cuda
def waits(mode):
    with mode:
        cp.ones(4 << 20, "u1")
        before = gpu.calls.wait_count
        open_cuda().pools.give_back_everything()
        return gpu.calls.wait_count - before
print(waits(umem.unmanaged("8MiB")), waits(umem.unmanaged()), waits(umem.managed()))
"""
    assert lines(program, kernel_cache) == ["0 0 1"]


def test_after_disable_and_after_a_limit_all_vram_is_free(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda import open_cuda
pools = open_cuda().pools
def free():
    cp.get_default_memory_pool().free_all_blocks()
    return cp.cuda.Device().mem_info[0] >> 20
for mode, limit in (("hybrid", None), ("hybrid", "60MiB"), ("unmanaged", "60MiB")):
    umem.enable(mode, limit=limit)
    cp.ones(20 << 20, "u1")
    keep = cp.ones(80 << 20, "u1") if mode == "hybrid" else None
    del keep
    umem.disable()
    with umem.enable(mode, limit=limit):
        cp.ones(20 << 20, "u1")
    print(free(), sum(pools.ledger.reserved().values()), end=" ")
    if limit:
        with getattr(umem, mode)(limit=limit):
            cp.ones(20 << 20, "u1")
        print(free())
"""
    assert lines("import cupy as cp\n" + program, kernel_cache) == ["64 0 64 0 64", "64 0 64"]


def test_what_a_block_of_hybrid_has_cached_can_be_had(kernel_cache: Path) -> None:
    """It stays for the next block, and is given back when CuPy's own pool needs it."""
    program = """
with umem.hybrid():
    outlives = [cp.ones(10 << 20, "u1") for _ in range(2)]
    cp.ones(8 << 20, "u1")
print(cp.cuda.Device().mem_info[0] >> 20)
del outlives
print(cp.ones(60 << 20, "u1").nbytes >> 20)
"""
    assert lines(program, kernel_cache) == ["36", "60"]


def test_a_collection_inside_of_a_pool_asks_no_pool(kernel_cache: Path) -> None:
    """CuPy 14's pool holds a lock there that its thread cannot take twice."""
    program = """
import faulthandler, gc
from umem.devices.cuda import open_cuda
faulthandler.dump_traceback_later(30, exit=True)
pools = open_cuda().pools
with umem.hybrid():
    x = [cp.ones(1 << 20, "u1") for _ in range(50)]
print(pools._after_collection in gc.callbacks)
gc.collect()
gc.freeze()
gc.collect()
del x[1:]
gc.set_threshold(1, 1, 1)
for turn in range(60):
    with umem.hybrid():
        z = [cp.ones(1 << 20, "u1") for _ in range(45)]
    del z
    pools.release_plain()
gc.set_threshold(700, 10, 10)
print("done")
"""
    assert lines(program, kernel_cache) == ["True", "done"]


def test_callbacks_of_the_collector_are_all_called_and_may_raise(kernel_cache: Path) -> None:
    program = """
import gc, sys
errors = []
sys.unraisablehook = lambda found: errors.append(str(found.exc_value))
def raises(phase, info):
    raise ValueError(phase)
with umem.hybrid():
    x = cp.ones(40 << 20, "u1")
seen = []
gc.callbacks.append(raises)
gc.callbacks.append(lambda phase, info: seen.append(phase))
del x
for _ in range(2):
    gc.collect()
print(*seen)
print(*errors)
del gc.callbacks[-2:]
print(cp.cuda.Device().mem_info[0] >> 20)
with umem.hybrid():
    pass
print(gc.callbacks)
"""
    found = lines(program, kernel_cache)
    assert found == ["start stop start stop", "start stop start stop", "64", "[]"]


CAPTURES = (
    TRIED
    + """
import threading
from umem.devices.cuda import open_cuda
def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(tried(function)))
    thread.start()
    thread.join()
    return found[0]
side = cp.cuda.Stream(non_blocking=True)
with side:
    a = cp.ones(4, "f4")
    b = a + 1
    side.synchronize()
def captured(meanwhile, mode=cp.cuda.runtime.streamCaptureModeRelaxed):
    with side:
        side.begin_capture(mode)
        found = in_thread(meanwhile)
        print(found, tried(lambda: type(a + 1).__name__), tried(lambda: bool(side.end_capture())))
"""
)


def test_a_thread_without_vram_spills_and_leaves_a_capture_alone(kernel_cache: Path) -> None:
    program = """
umem.enable("hybrid")
keep = [cp.ones(8 << 20, "u1") for _ in range(6)]
cp.ones(8 << 20, "u1")
captured(lambda: keep.append(cp.ones(24 << 20, "u1")) or umem.location(keep[-1]).managed)
"""
    [found] = lines(CAPTURES + program, kernel_cache)
    assert found == "True ndarray True"


def test_nothing_is_given_back_while_another_thread_captures(kernel_cache: Path) -> None:
    """By each way to free, and a host view says why it cannot wait."""
    program = """
pools = open_cuda().pools
with umem.managed():
    kept = cp.ones(4 << 20, "u1")
    cp.ones(8 << 20, "u1")
with umem.unmanaged("8MiB"):
    cp.ones(8 << 20, "u1")
def reserved():
    pools.give_back_everything()
    return sum(pools.ledger.reserved().values()) >> 20
captured(reserved)
print(reserved())
captured(lambda: umem.as_numpy(kept))
def limited():
    with umem.managed(limit="8MiB"):
        cp.ones(4 << 20, "u1")
        return cp.ones(6 << 20, "u1")
captured(limited)
"""
    first, then, view, limited = lines(CAPTURES + program, kernel_cache)
    assert first == "12 ndarray True" and then == "4"
    assert view.startswith("DeviceError: a host view waits for the GPU, which would end")
    assert limited.startswith("LimitError")
    assert view.endswith(" ndarray True") and limited.endswith(" ndarray True")


def test_two_captures_in_two_threads(kernel_cache: Path) -> None:
    """Until the last one has ended nothing is given back."""
    program = """
pools = open_cuda().pools
with umem.managed():
    cp.ones(8 << 20, "u1")
def reserved():
    pools.give_back_everything()
    return pools.ledger.reserved()["managed"] >> 20
begun, may_end = threading.Event(), threading.Event()
def other():
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        begun.set()
        may_end.wait()
        stream.end_capture()
thread = threading.Thread(target=other, daemon=True)
thread.start()
begun.wait()
with side:
    side.begin_capture()
    print(reserved())
    side.end_capture()
print(reserved())
may_end.set()
thread.join()
print(reserved())
gone = cp.cuda.Stream(non_blocking=True)
gone.begin_capture()
gone.end_capture()
del gone
print(reserved())
"""
    assert lines(CAPTURES + program, kernel_cache) == ["8", "8", "0", "0"]


def test_entering_a_block_asks_the_driver_for_nothing_and_frees_nothing(kernel_cache: Path) -> None:
    program = """
MIB = 1 << 20
def loop(mode):
    for turn in range(12):
        plain = [cp.ones(MIB, "u1") for _ in range(8)]
        del plain
        with mode():
            z = cp.ones(MIB, "u1")
def counts():
    return [gpu.calls.allocation_count, gpu.calls.free_count, gpu.calls.wait_count]
with umem.managed():
    big = cp.ones(80 * MIB, "u1")
for mode in (umem.unmanaged, umem.managed):
    loop(mode)
    before = counts()
    loop(mode)
    print([now - then for now, then in zip(counts(), before)])
asked = []
def count(name):
    function = getattr(cp.cuda.runtime, name)
    setattr(cp.cuda.runtime, name, lambda *args: asked.append(name) or function(*args))
for name in dir(cp.cuda.runtime):
    if callable(getattr(cp.cuda.runtime, name)) and name[0].islower() and name != "getDevice":
        count(name)
for mode in (umem.managed, umem.hybrid, umem.unmanaged, lambda: umem.managed(limit="1GiB")):
    with mode():
        print(asked)
    asked.clear()
"""
    assert lines(program, kernel_cache) == ["[0, 0, 0]", "[0, 0, 0]", "[]", "[]", "[]", "[]"]


def test_managed_memory_of_another_gpu_counts_and_is_given_back(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda import open_cuda
pools = open_cuda(0).pools
for gpu in (0, 1):
    with umem.managed(limit="32MiB"), cp.cuda.Device(gpu):
        x = cp.zeros(20 * MIB, "u1")
        print(pools.used_bytes("managed") // MIB, end=" ")
        del x
        y = cp.zeros(24 * MIB, "u1")
        print(tried(lambda: cp.zeros(10 * MIB, "u1"))[:14], end=" ")
        del y
    pools.give_back_everything()
    print(open_cuda(0).usage().managed_bytes, cp.cuda.Device().id)
with umem.managed(), cp.cuda.Device(1):
    x = cp.zeros(20 * MIB, "u1")
print(tried(lambda: umem.managed(limit="8MiB").__enter__())[:26])
"""
    assert lines(TRIED + program, kernel_cache, start=TWO_GPUS) == [
        "20 LimitError: ne 0 0", "20 LimitError: ne 0 0", "SizeError: a limit of 8.0 ",
    ]  # fmt: skip


def test_a_gpu_that_is_lost_keeps_no_other_one_from_giving_back(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda import open_cuda
from umem.devices.cuda.driver import Driver
current = Driver.current
def lost(driver, ordinal=None):
    if (driver.ordinal if ordinal is None else ordinal) == 1:
        raise cp.cuda.runtime.CUDARuntimeError(46)  # cudaErrorDevicesUnavailable
    return current(driver, ordinal)
pools = open_cuda(0).pools
def use():
    for gpu in (0, 1):
        with cp.cuda.Device(gpu):
            cp.zeros(20 * MIB, "u1")
def reserved():
    return sum(pools.ledger.reserved().values()) // MIB
with umem.managed():
    use()
umem.enable("hybrid")
use()
Driver.current = lost
print(reserved(), end=" ")
umem.disable()
print(reserved(), end=" ")
pools.give_back_everything()
print(reserved(), pools.used_bytes("managed"), cp.cuda.Device().id)
with umem.managed(limit="24MiB"):
    print(tried(lambda: cp.zeros(4 * MIB, "u1").nbytes))
Driver.current = current
pools.give_back_everything()
print(reserved())
"""
    found = lines(TRIED + program, kernel_cache, start=TWO_GPUS)
    assert found == ["60 20 20 0 0", "4194304", "0"]
