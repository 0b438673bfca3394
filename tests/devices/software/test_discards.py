"""The software GPU refuses what CUDA refuses of discards, and finds what CUDA leaves undefined."""

from __future__ import annotations

from pathlib import Path

import pytest
from project import ROOT
from software_programs import START, needs_compiler, needs_cupy, run

from umem.compat import find_package

pytestmark = [needs_cupy, needs_compiler]
needs_chainer = pytest.mark.skipif(find_package() is None, reason="needs Chainer")
HINTS = """
import ctypes
import umem.devices.cuda.ranges as ranges
from umem.devices.base import Span
from umem.errors import DeviceError
B = 2 << 20
"""
PLAIN = START.replace('"64MiB"', '"64MiB", model=False')
LATE = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "conformance")!r})
import umem
gpu = umem.software_gpu("t4", "48MiB", force=True, stream_seed=0)
import stream_programs

def differs(program, seeds):
    gpu.reseed(None)
    expected, other = program(), 0
    for seed in seeds:
        gpu.reseed(seed)
        other += program() != expected
    gpu.reseed(None)
    return other
"""


def test_discards_are_refused_where_cuda_refuses_them_and_change_nothing(
    kernel_cache: Path,
) -> None:
    program = """
hints = ranges.load(12)
managed = sorted((cp.cuda.malloc_managed(2 * B) for _ in range(2)), key=lambda m: m.ptr)
low, high = (memory.ptr for memory in managed)
arrays = [cp.ndarray((2 * B,), "u1", memory) for memory in managed]
for array in arrays:
    array[...] = 1
plain = cp.ones(B, "u1")
side = cp.cuda.Stream(non_blocking=True)

def tried(spans, stream):
    try:
        return hints.discard(spans, stream)
    except DeviceError as error:
        return str(error)

print(tried([Span(low, B)], 0))
print(tried([Span(low, B)], 1))
print(tried([Span(low, B), Span(plain.data.ptr, B)], side.ptr))
print(tried([Span(low, high + B - low)], side.ptr))
with side:
    side.begin_capture()
    print(tried([Span(low, B)], side.ptr))
    try:
        side.end_capture()
    except cp.cuda.runtime.CUDARuntimeError as error:
        print(error.status)
print([int((array != 1).sum()) for array in (*arrays, plain)])
print(tried([Span(low, B)], 2), tried([Span(high, B), Span(low + B, B)], side.ptr))
print([int((array != 1).sum()) for array in (*arrays, plain)])
"""
    refused = "the driver refused to discard {} ranges: CUDA_ERROR_{}"
    assert run(program, kernel_cache, start=PLAIN + HINTS).splitlines() == [
        refused.format(1, "INVALID_VALUE"),
        refused.format(1, "INVALID_VALUE"),
        refused.format(2, "INVALID_VALUE"),
        refused.format(1, "INVALID_VALUE"),
        refused.format(1, "STREAM_CAPTURE_UNSUPPORTED"),
        "901",
        "[0, 0, 0]",
        f"{2 << 20} {4 << 20}",
        f"[{4 << 20}, {2 << 20}, 0]",
    ]


def test_batches_of_prefetches_are_refused_on_the_legacy_stream(kernel_cache: Path) -> None:
    program = """
hints = ranges.load(12)
memory = cp.cuda.malloc_managed(4 * B)
status, address, _ = hints.bindings.cuGetProcAddress(b"cuMemPrefetchBatchAsync", 13000, 0)
prefetch = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
    ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p,
)(int(address))
starts = (ctypes.c_uint64 * 3)(*(memory.ptr + place * B for place in (0, 1, 3)))
sizes, places = (ctypes.c_size_t * 3)(B, B, B), (ctypes.c_int * 4)(2, 0, 1, 0)
firsts = (ctypes.c_size_t * 2)(0, 2)
side = cp.cuda.Stream(non_blocking=True)
for stream in (0, 1, 2, side.ptr):
    print(prefetch(starts, sizes, 3, places, firsts, 2, 0, stream), end=" ")
print([hints.location([Span(start, B)]).last_prefetch for start in starts])
"""
    found = run(program, kernel_cache, start=PLAIN + HINTS)
    assert found == "1 1 0 0 ['cpu', 'cpu', 0]\n"


@pytest.mark.parametrize(("version", "discards"), [(13000, True), (12080, False)])
def test_whether_there_are_discards_is_the_drivers_to_say(
    kernel_cache: Path, version: int, discards: bool
) -> None:
    start = (
        f"""
import umem.host_cuda.libcuda as libcuda
libcuda.DRIVER_VERSION = {version}
"""
        + PLAIN
    )
    program = """
import cuda.bindings
hints = ranges.load(12)
cuda.bindings.__version__ = "13.5.0"
print(hints.discards)
"""
    assert run(program, kernel_cache, start=start + HINTS) == f"{discards}\n"


@needs_chainer
def test_lookahead_discards_by_the_drivers_own_call_on_a_stream_that_cuda_takes(
    kernel_cache: Path,
) -> None:
    program = """
import warnings
from umem.host_cuda.libcuda import HostHints
warnings.simplefilter("ignore")
streams, batch = set(), HostHints.batch

def told(self, given, places, stream):
    status = batch(self, given, places, stream)
    assert not status and not places
    streams.add(gpu._runtime.streamGetFlags(stream))
    return status

HostHints.batch = told
gpu.reseed(None)
stream_programs.lookahead()
print(streams)
"""
    assert run(program, kernel_cache, start=LATE) == "{1}\n", "non-blocking streams"


@needs_chainer
def test_a_discard_is_ordered_with_prefetches_and_one_that_is_not_is_found(
    kernel_cache: Path,
) -> None:
    program = """
print(differs(stream_programs.moved_and_discarded, range(30)))
print(differs(stream_programs.discarded_beside_a_move, range(30)) > 5)
"""
    assert run(program, kernel_cache, start=LATE) == "0\nTrue\n"


@needs_chainer
def test_memory_goes_back_after_its_uses_and_a_free_without_a_wait_is_found(
    kernel_cache: Path,
) -> None:
    program = """
print(differs(stream_programs.given_back, range(6)))
print(differs(stream_programs.freed_without_a_wait, range(6)) > 1)
"""
    assert run(program, kernel_cache, start=LATE) == "0\nTrue\n"


def test_what_the_driver_was_asked_is_counted(kernel_cache: Path) -> None:
    program = """
gpu.restart()
arrays = [cp.empty(1 << 20, "u1") for _ in range(3)]
del arrays
print(gpu.calls)
cp.get_default_memory_pool().free_all_blocks()
cp.cuda.Device().synchronize()
cp.cuda.Stream.null.synchronize()
cp.cuda.Event().synchronize()
print(gpu.calls)
gpu.restart()
print(gpu.calls.free_count)
"""
    assert run(program, kernel_cache).splitlines() == [
        "DriverCalls(allocation_count=3, free_count=0, wait_count=0)",
        "DriverCalls(allocation_count=3, free_count=3, wait_count=3)",
        "0",
    ]


def test_memory_of_lookahead_is_given_back_and_serves_a_limit(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda import open_cuda
from umem._common.scopes import Scope
device = open_cuda()
with umem.managed():
    scope = Scope("places")
    device.repeat_places(scope)
    kept = [cp.empty(4 << 20, "u1") for _ in range(4)]
    scope.close()
    print(device.usage().managed_bytes >> 20, device.pools.used_bytes("managed") >> 20)
    del kept[1:]
    with umem.managed(limit="12MiB"):
        other = cp.empty(8 << 20, "u1")
    print(device.usage().managed_bytes >> 20)
    del kept, other
    waits = gpu.calls.wait_count
    device.pools.give_back("managed")
    print(device.usage().managed_bytes, gpu.calls.wait_count > waits)
"""
    assert run(program, kernel_cache).splitlines() == ["16 16", "12", "0 True"]


def test_free_ranges_do_not_reach_over_two_allocations(kernel_cache: Path) -> None:
    program = """
from umem.devices.cuda import open_cuda
from umem.devices.cuda.arena import Arena
from umem.units import BLOCK_BYTES as B

class Memory:
    size = 2 * B

class Pointer:
    mem, device_id = Memory(), 0

    def __init__(self, ptr):
        self.ptr = ptr

places = iter(range(100, 200, 2))
arena = Arena(open_cuda().driver, lambda nbytes: Pointer(next(places) * B), None)
arena.open()
held = [arena.malloc(2 * B) for _ in range(2)]
del held
print([(span.address // B, span.nbytes // B) for span in arena.free_spans(range(100, 104))])
"""
    assert run(program, kernel_cache, start=PLAIN) == "[(100, 2), (102, 2)]\n"
