"""`umem.on_out_of_memory`: callbacks that free memory when CuPy's runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from software_programs import START, lines, needs_software_gpu

import umem
from umem.errors import DeviceError, DeviceNotFoundError

CACHE = """
OutOfMemory = cp.cuda.memory.OutOfMemoryError
plain = cp.cuda.get_allocator()
cache = []
def fill(count=12):
    cache.clear()
    cache[:] = [cp.empty(4 << 20, "u1") for _ in range(count)]
def evict(nbytes):
    return bool(cache) and bool(cache.pop().nbytes)
def outcome(nbytes):
    try:
        cp.empty(nbytes, "u1")
        return "fits"
    except OutOfMemory as error:
        return type(error).__name__
fill()
"""


@needs_software_gpu
def test_as_much_is_freed_as_the_allocation_needs(kernel_cache: Path) -> None:
    program = """
print(outcome(40 << 20), len(cache))
with umem.on_out_of_memory(evict) as asked:
    print(outcome(40 << 20), len(cache), asked.count)
    print(outcome(80 << 20), len(cache), asked.count)
    print(outcome(8 << 20), asked.count)
fill()
print(outcome(40 << 20), len(cache), cp.cuda.get_allocator() == plain)
asked.close()
"""
    assert lines(program, kernel_cache, start=START + CACHE) == [
        "OutOfMemoryError 12", "fits 6 6", "OutOfMemoryError 0 13", "fits 13",
        "OutOfMemoryError 12 True",
    ]  # fmt: skip


@needs_software_gpu
@pytest.mark.parametrize("first", ["callback", "mode"])
def test_every_mode_asks_whichever_came_first(first: str, kernel_cache: Path) -> None:
    program = f"""
import threading
first = {first!r}
def begin():
    return umem.on_out_of_memory(evict)
asked = begin() if first == "callback" else None
umem.enable("managed", limit="48MiB")
asked = asked or begin()
fill()
print(outcome(40 << 20), len(cache))
cache.clear()
umem.disable()
for mode in (umem.unmanaged, lambda: umem.managed(limit="48MiB"), lambda: umem.unmanaged("40MiB")):
    with mode():
        fill(8)
        print(outcome(36 << 20), len(cache))
        cache.clear()
    cp.get_default_memory_pool().free_all_blocks()
fill()
found = []
thread = threading.Thread(target=lambda: found.append(outcome(40 << 20)))
thread.start()
thread.join()
print(*found, len(cache))
with umem.hybrid():
    fill()
    print(outcome(40 << 20), len(cache), "spilled")
    cache.clear()
asked.close()
print(cp.cuda.get_allocator() == plain)
"""
    found = lines(program, kernel_cache, start=START + CACHE)
    assert found[0].startswith("fits") and found[1:] == [
        "fits 7", "fits 3", "fits 1", "fits 6", "fits 12 spilled", "True",
    ]  # fmt: skip


@needs_software_gpu
@pytest.mark.parametrize(
    "allocator",
    [
        "cp.cuda.MemoryPool().malloc", "cp.cuda.MemoryAsyncPool().malloc", "cp.cuda.malloc_async",
        "cp.cuda.memory._malloc", "rmm_like",
    ],
)  # fmt: skip
def test_any_allocator_that_runs_out_asks(allocator: str, kernel_cache: Path) -> None:
    program = f"""
import warnings
warnings.simplefilter("ignore", FutureWarning)  # CuPy 13 says that malloc_async is experimental
def rmm_like(nbytes):
    try:
        return cp.cuda.memory._malloc(nbytes)
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError("std::bad_alloc") from error
cache.clear()
cp.get_default_memory_pool().free_all_blocks()
set_before = {allocator}
cp.cuda.set_allocator(set_before)
fill()
with umem.on_out_of_memory(evict) as asked:
    print(outcome(40 << 20), len(cache), asked.count > 0)
    cache.clear()
    try:
        cp.empty(80 << 20, "u1")
    except (MemoryError, cp.cuda.runtime.CUDARuntimeError) as error:
        print("raised")
    asked.count = 0
    def wrong(nbytes):
        cp.cuda.runtime.memAdvise(0, 1, 99, 0)
    with cp.cuda.using_allocator(umem.devices.cuda.retrying.Retrying(wrong).malloc):
        try:
            cp.empty(3)
        except cp.cuda.runtime.CUDARuntimeError:
            print(asked.count)
print(cp.cuda.get_allocator() == set_before)
"""
    assert lines(program, kernel_cache, start=START + CACHE) == [
        "fits 6 True",
        "raised",
        "0",
        "True",
    ]


@needs_software_gpu
def test_callbacks_that_fail_allocate_or_free_nothing(kernel_cache: Path) -> None:
    program = """
def say(nbytes):
    raise KeyError("not there")
with umem.on_out_of_memory(say):
    try:
        cp.empty(40 << 20, "u1")
    except KeyError as error:
        print(error, type(error.__context__).__name__)
    print(len(cp.empty(3)))
with umem.on_out_of_memory(lambda nbytes: True) as liar:
    print(outcome(40 << 20), liar.count)
with umem.on_out_of_memory(lambda nbytes: cp.empty(40 << 20, "u1")) as greedy:
    print(outcome(40 << 20), greedy.count)
with umem.on_out_of_memory(lambda nbytes: False) as idle, umem.on_out_of_memory(evict) as useful:
    print(outcome(40 << 20), idle.count == useful.count == 6)
    idle.close()
    fill()
    print(outcome(40 << 20), idle.count, useful.count)
"""
    assert lines(program, kernel_cache, start=START + CACHE) == [
        "'not there' OutOfMemoryError", "3", "OutOfMemoryError 16", "OutOfMemoryError 1",
        "fits True", "fits 6 12",
    ]  # fmt: skip


@needs_software_gpu
def test_a_budget_is_measured_and_kept_beside_a_callback(kernel_cache: Path) -> None:
    program = """
import umem.chainer
import chainer
from chainer import functions as F, links as L
cache.clear()
layers = chainer.Sequential(*[L.Linear(64, 64) for _ in range(8)]).to_gpu()
optimizer = chainer.optimizers.SGD().setup(layers)
x = cp.ones((1024, 64), "f4")
with umem.on_out_of_memory(evict), umem.chainer.Recompute("min") as memory:
    for _ in range(4):
        optimizer.update(lambda: F.mean(F.tanh(layers(x)) ** 2))
print(memory.planned_count > 0, memory.measured_bytes > 0)
"""
    assert lines(program, kernel_cache, start=START + CACHE) == ["True True"]


@pytest.mark.parametrize("callback", [None, 3, "free"])
def test_what_cannot_be_called_is_refused(callback: Any) -> None:
    with pytest.raises(TypeError, match="on_out_of_memory"):
        umem.on_out_of_memory(callback)


def test_without_a_gpu_of_cupy_it_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError):
        umem.on_out_of_memory(bool)
    with umem.virtual_gpu("t4"), pytest.raises(DeviceError, match="virtual"):
        umem.on_out_of_memory(bool)


@needs_software_gpu
def test_arrays_of_the_callers_are_free_when_they_have_returned(kernel_cache: Path) -> None:
    """No error, and so no traceback with its frames, is in a circle of references."""
    program = """
import gc
pool = cp.get_default_memory_pool()
cache = [cp.empty(30 << 20, "u1")]
def step(nbytes):
    work = cp.empty(20 << 20, "u1")
    try:
        return cp.empty(nbytes, "u1").nbytes >> 20
    except cp.cuda.memory.OutOfMemoryError:
        return None
gc.disable()
with umem.on_out_of_memory(lambda nbytes: bool(cache) and not cache.clear()):
    print(step(30 << 20), pool.used_bytes())
    print(step(60 << 20), pool.used_bytes())
"""
    assert lines(program, kernel_cache) == ["30 0", "None 0"]


@needs_software_gpu
def test_cupys_own_free_blocks_go_first_and_a_handle_is_used_once(kernel_cache: Path) -> None:
    program = """
own, theirs = cp.get_default_memory_pool(), cp.cuda.MemoryPool()
del_me = own.malloc(40 << 20)
del del_me
cp.cuda.set_allocator(theirs.malloc)
asked = []
with umem.on_out_of_memory(asked.append) as handle:
    print(cp.empty(50 << 20, "u1").nbytes >> 20, asked)
try:
    handle.__enter__()
except umem.UmemError as error:
    print(error)
"""
    assert lines(program, kernel_cache) == [
        "50 []", "this callback is closed: call umem.on_out_of_memory again"
    ]  # fmt: skip
