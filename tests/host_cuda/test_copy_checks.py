"""Copies, fills, events and fresh memory: what CUDA refuses, and what it does not promise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from software_programs import START, needs_software_gpu, run

from umem._common.specs import gpu_spec
from umem.host_cuda.copy_checks import is_variable
from umem.host_cuda.runtime import FRESH_BYTES, HostRuntime
from umem.host_cuda.strictness import hint

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
HOST_TO_HOST, TO_DEVICE, TO_HOST, ON_DEVICE, DEFAULT, NO_DIRECTION = range(6)


class StatusError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"ERROR_{status}")
        self.status = status


def opened(**flags: bool) -> HostRuntime:
    """A runtime without CuPy."""
    runtime = HostRuntime(gpu_spec("t4"))
    runtime.error_type = StatusError
    for name, value in flags.items():
        setattr(runtime, name, value)
    return runtime


def refused(call: Callable[..., Any], *given: Any) -> int:
    """The status of a refusal, whose message ends with the option that turns it off."""
    with pytest.raises(StatusError) as caught:
        call(*given)
    assert str(caught.value).endswith(hint())
    return caught.value.status


def test_a_fill_stays_in_its_allocation_and_on_the_device() -> None:
    runtime = opened()
    place = runtime.malloc(1024)
    host = ctypes.create_string_buffer(64)
    for fill in (runtime.memset, lambda *given: runtime.memsetAsync(*given, 0)):
        fill(place, 1, 1024)
        fill(place + 1000, 2, 24)
        fill(0, 1, 0)
        assert refused(fill, place, 3, 1025) == refused(fill, place + 1000, 3, 25) == 1
        assert refused(fill, ctypes.addressof(host), 3, 64) == refused(fill, 0, 3, 1) == 1
        assert ctypes.string_at(place, 1024) == b"\1" * 1000 + b"\2" * 24
    runtime.memset(runtime.mallocManaged(8), 1, 8)
    runtime.memset(runtime.hostAlloc(8, 0), 1, 8)


def test_a_copy_stays_in_its_allocations() -> None:
    runtime = opened()
    one, other = runtime.malloc(64), runtime.malloc(32)
    host = ctypes.create_string_buffer(4096)
    where = ctypes.addressof(host)
    runtime.memset(one, 7, 64)
    for copy in (runtime.memcpy, lambda *given: runtime.memcpyAsync(*given, 0)):
        copy(where, one, 64, TO_HOST)
        copy(other, one + 32, 32, DEFAULT)
        assert refused(copy, where, one, 65, TO_HOST) == 1
        assert refused(copy, other, one, 33, ON_DEVICE) == 1
        assert refused(copy, other, where, 33, TO_DEVICE) == 1
        assert refused(copy, 0, one, 4, TO_HOST) == refused(copy, one, 0, 4, TO_DEVICE) == 1
        assert refused(copy, where, one, 4, NO_DIRECTION) == 21
        copy(0, 0, 0, TO_DEVICE)


def test_a_copy_of_rows_stays_in_its_allocations() -> None:
    runtime = opened()
    place, pinned = runtime.malloc(4 * 100), runtime.hostAlloc(4 * 50, 0)
    for copy in (runtime.memcpy2D, lambda *given: runtime.memcpy2DAsync(*given, 0)):
        copy(place, 100, pinned, 50, 50, 4, TO_DEVICE)
        copy(place + 50, 100, pinned, 50, 50, 4, TO_DEVICE)  # the last row is not a whole pitch
        copy(place, 0, pinned, 0, 0, 4, TO_DEVICE)
        assert refused(copy, place, 100, pinned, 50, 50, 5, TO_DEVICE) == 1
        assert refused(copy, place + 51, 100, pinned, 50, 50, 4, TO_DEVICE) == 1
        assert refused(copy, place, 100, pinned, 49, 50, 4, TO_DEVICE) == 12
        assert refused(copy, place, 49, pinned, 50, 50, 4, TO_DEVICE) == 12


def test_a_direction_that_does_not_fit_is_refused_in_checked_mode() -> None:
    runtime, free = opened(is_checked=True), opened()
    host = ctypes.create_string_buffer(64)
    where, pinned = ctypes.addressof(host), runtime.hostAlloc(64, 0)
    device, managed = runtime.malloc(64), runtime.mallocManaged(64)
    variable = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_Py_NoneStruct"))
    assert is_variable(variable) and not is_variable(where) and not is_variable(device)
    for dst, src, kind in (
        (device, where, TO_HOST), (device, where, ON_DEVICE), (where, device, TO_DEVICE),
        (where, device, HOST_TO_HOST), (where, device, ON_DEVICE), (where, managed, ON_DEVICE),
        (device, device, TO_HOST), (device, device, TO_DEVICE), (where, pinned, TO_DEVICE),
    ):  # fmt: skip
        assert refused(runtime.memcpy, dst, src, 4, kind) == 1
    for dst, src, kind in (
        (device, where, TO_DEVICE), (device, where, DEFAULT), (where, device, TO_HOST),
        (device, pinned, ON_DEVICE), (managed, where, TO_DEVICE), (managed, where, HOST_TO_HOST),
        (pinned, device, TO_HOST), (pinned, where, HOST_TO_HOST), (device, managed, ON_DEVICE),
        (device, variable, ON_DEVICE), (device, variable, TO_DEVICE),
    ):  # fmt: skip
        runtime.memcpy(dst, src, 4, kind)
    place = free.malloc(4)
    free.memcpy(place, where, 4, TO_HOST)  # undefined in CUDA, done without checked mode


def test_not_strict_accepts_all_of_it() -> None:
    runtime = opened(is_strict=False, is_checked=True)
    memory = ctypes.create_string_buffer(64)
    where = ctypes.addressof(memory)
    runtime.memset(where, 7, 64)
    runtime.memcpy(where, where + 32, 4, ON_DEVICE)
    event = runtime.eventCreateWithFlags(2)
    runtime.eventRecord(event, 0)
    assert runtime.eventElapsedTime(event, event) == 0
    runtime.streamBeginCapture(runtime.streamCreateWithFlags(NON_BLOCKING), GLOBAL)
    assert runtime.eventQuery(event) == 0


def test_no_time_is_taken_of_events_without_timing_or_record() -> None:
    runtime = opened()
    timed, untimed, never = (runtime.eventCreateWithFlags(flags) for flags in (0, 2, 0))
    for event in (timed, untimed):
        runtime.eventRecord(event, 0)
    assert runtime.eventElapsedTime(timed, timed) == 0
    assert refused(runtime.eventElapsedTime, timed, untimed) == 400
    assert refused(runtime.eventElapsedTime, untimed, timed) == 400
    with pytest.raises(StatusError, match="400"):
        runtime.eventElapsedTime(timed, never)
    runtime.eventDestroy(untimed)


@pytest.mark.parametrize("name", ["eventQuery", "eventSynchronize"])
@pytest.mark.parametrize(
    ("mode", "here", "elsewhere"),
    [(GLOBAL, 900, 900), (THREAD_LOCAL, 900, None), (RELAXED, None, None)],
)
def test_an_event_asked_for_in_a_capture_ends_it_unless_it_is_relaxed(
    name: str, mode: int, here: int | None, elsewhere: int | None
) -> None:
    runtime = opened()
    stream, event = runtime.streamCreateWithFlags(NON_BLOCKING), runtime.eventCreate()
    runtime.eventRecord(event, 0)
    call = getattr(runtime, name)
    found: list[int | None] = []

    def ask() -> None:
        try:
            call(event)
            found.append(None)
        except StatusError as error:
            found.append(error.status)

    def end() -> int | None:
        try:
            runtime.streamEndCapture(stream)
        except StatusError as error:
            return error.status
        return None

    for wanted, is_thread in ((here, False), (elsewhere, True)):
        runtime.streamBeginCapture(stream, mode)
        if is_thread:
            thread = Thread(target=ask)
            thread.start()
            thread.join()
        else:
            ask()
        assert found.pop() == wanted
        assert runtime.streamIsCapturing(stream) == (2 if wanted else 1)
        assert end() == (901 if wanted else None)
    assert call(event) in (0, None)  # after it nothing is refused


# -- fresh memory --------------------------------------------------------------------------------


def test_what_the_driver_gives_is_no_zeros() -> None:
    runtime = opened()
    large = FRESH_BYTES + 4096
    for place in (runtime.malloc(large), runtime.mallocAsync(large, 0)):
        assert ctypes.string_at(place, 4096) == b"\xff" * 4096
        assert ctypes.string_at(place + FRESH_BYTES - 1, 2) == b"\xff\0"
    runtime.is_checked = True
    place = runtime.malloc(large)
    assert ctypes.string_at(place + FRESH_BYTES, 4096) == b"\xff" * 4096
    for place in (runtime.mallocManaged(64), runtime.hostAlloc(64, 0)):
        assert ctypes.string_at(place, 64) == bytes(64)


@needs_software_gpu
class TestCupy:
    @pytest.mark.parametrize("more", ["", ", checked=True", ", checked=True, stream_seed=2"])
    def test_an_empty_array_holds_nan_once_or_each_time(
        self, kernel_cache: Path, more: str
    ) -> None:
        program = """
pool = cp.cuda.memory.MemoryPool()
found = []
with cp.cuda.using_allocator(pool.malloc), cp.cuda.Stream(non_blocking=True):
    for _ in range(2):
        x = cp.empty(1000, "f4")  # of another size than flags, among whose blocks a pool chooses
        found.append(bool(cp.isnan(x).all()))
        x.fill(3)
        del x
print(*found, bool(cp.isnan(cp.empty(3, "f8")).all()), int(cp.zeros(9).sum()))
with umem.managed():
    print(int(cp.empty(5, "f4").sum()))
"""
        start = START.replace("force=True", f"force=True{more}")
        assert run(program, kernel_cache, start=start) == f"True {bool(more)} True 0\n0\n"

    def test_a_dry_run_fills_nothing(self, kernel_cache: Path) -> None:
        program = "print(int(cp.empty(100, 'u1').sum()))"
        start = START.replace("force=True", "force=True, dry=True")
        assert run(program, kernel_cache, start=start) == "0\n"

    def test_what_programs_do_is_refused_no_more_than_on_a_card(self, kernel_cache: Path) -> None:
        program = r'''
module = cp.RawModule(code="""
__constant__ float held[4];
extern "C" __global__ void f(float* x) { x[threadIdx.x] = held[threadIdx.x]; }""")
held = cp.ndarray(4, "f4", module.get_global("held"))
held[...] = cp.arange(4, dtype="f4")  # by a kernel
held[1:].set(np.float32([7, 8, 9]))
held[:1].data.memset(0, 4)
x = cp.empty(4, "f4")
module.get_function("f")((1,), (4,), (x,))
print(x.tolist(), cp.asnumpy(held).tolist())
pinned = cp.cuda.alloc_pinned_memory(64)
a = np.frombuffer(pinned, "f4", 16)
a[...] = 5
y = cp.asarray(a)
y[:8].set(np.arange(8, dtype="f4"))
cp.copyto(y[8:], y[:8])
with umem.managed():
    z = cp.array(y)
    z.data.memset(0, 32)
print(y.get().sum(), z.sum(), cp.asfortranarray(cp.ones((3, 4)))[1:, 1:].get().sum())
image = cp.pad(cp.ones((5, 5)), 1)
print(image.sum(), cp.concatenate([y, y]).sum(), cp.cuda.get_elapsed_time(
    *[event for event in (cp.cuda.Event(), cp.cuda.Event()) if event.record() is None
      and event.synchronize() is None]) >= 0)
'''
        expected = "[0.0, 7.0, 8.0, 9.0] [0.0, 7.0, 8.0, 9.0]\n56.0 28.0 6.0\n25.0 112.0 True\n"
        for more in ("", ", checked=True", ", stream_seed=1"):
            start = START.replace("force=True", f"force=True{more}")
            assert run(program, kernel_cache, start=start) == expected
