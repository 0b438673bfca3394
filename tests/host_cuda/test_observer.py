"""The observer of CUDA on host memory: what it is told and asked, and what holds without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from software_programs import needs_software_gpu, run

from umem._common.specs import gpu_spec
from umem.host_cuda import (
    DEVICE,
    HOST,
    MANAGED,
    Allocation,
    DeviceCopy,
    HostRuntime,
    Launch,
    Observer,
)
from umem.host_cuda.memory_sources import PlainSource
from umem.units import MIB

SPEC = gpu_spec("t4").with_vram(64 * MIB)


class Status(Exception):
    """Stands for CuPy's error."""

    def __init__(self, status: int) -> None:
        self.status = status


class Told(Observer):
    """Notes what it is told; streams are done after a second each."""

    follows_work = True

    def __init__(self) -> None:
        super().__init__(SPEC, 2)
        self.notes: list[Any] = []

    def seconds_of(self, stream: int, device: int) -> float:
        return 1.0 + device

    def allocated(self, memory: Allocation) -> None:
        self.notes.append(("allocated", memory.number, memory.nbytes, memory.kind, memory.device))

    def freed(self, memory: Allocation) -> None:
        super().freed(memory)
        self.notes.append(("freed", memory.number))

    def launched(self, launch: Launch) -> None:
        ranges = [[each[1:] for each in side] for side in (launch.reads, launch.writes)]
        self.notes.append((launch.name, launch.device, launch.stream, *ranges))

    def copied(self, copy: DeviceCopy) -> None:
        sides = [None if each is None else each[1:] for each in (copy.read, copy.write)]
        self.notes.append(("copied", copy.device, copy.stream, *sides, copy.is_pinned))

    def prefetched(self, ranges: Any, device: int | None, *, overlap: bool) -> None:
        self.notes.append(("prefetched", [each[1:] for each in ranges], device, overlap))

    def advised(self, ranges: Any, advice: str, device: int | None, *, unset: bool) -> None:
        self.notes.append((advice, [each[1:] for each in ranges], device, unset))

    def host_waited_until(self, device: int, seconds: float) -> None:
        self.notes.append(("waited", device, seconds))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def runtime(told: Told) -> HostRuntime:
    made = HostRuntime(SPEC, 2, told)
    made.error_type = Status
    return made


def test_allocations_copies_and_fills(runtime: HostRuntime, told: Told) -> None:
    runtime.setDevice(1)
    array, pinned = runtime.malloc(4096), runtime.hostAlloc(4096, 0)
    runtime.memcpyAsync(array + 16, pinned, 64, 1, 0)
    runtime.memcpy(array, array + 1024, 100, 3)
    runtime.memset(array, 0, 8)
    runtime.free(array)
    runtime.freeHost(pinned)
    assert told.notes == [
        ("allocated", 0, 4096, DEVICE, 1), ("allocated", 1, 4096, HOST, 1),
        ("copied", 1, 0, None, (16, 80), True), ("copied", 1, 0, (1024, 1124), (0, 100), False),
        ("memset", 1, None, [], [(0, 8)]), ("freed", 0), ("freed", 1),
    ]  # fmt: skip


def test_hints_and_waits(runtime: HostRuntime, told: Told) -> None:
    array = runtime.mallocManaged(4096)
    runtime.prefetch(array, 1024, 1, stream=5)
    runtime.prefetch(array, 1024, -1, stream=0)
    runtime.advise(array, 512, 3, -1)
    runtime.advise(array, 512, 6, 1)
    runtime.setDevice(1)
    event = runtime.eventCreate()
    runtime.eventRecord(event, 0)
    runtime.eventSynchronize(event)
    assert told.notes == [
        ("allocated", 0, 4096, MANAGED, 0),
        ("prefetched", [(0, 1024)], 1, True), ("prefetched", [(0, 1024)], None, False),
        ("preferred_location", [(0, 512)], None, False), ("accessed_by", [(0, 512)], 1, True),
        ("waited", 1, 2.0),
    ]  # fmt: skip


def test_what_it_forbids_is_not_allocated(runtime: HostRuntime, told: Told) -> None:
    held = runtime.malloc(40 * MIB)
    with pytest.raises(Status) as error:
        runtime.malloc(25 * MIB)
    assert error.value.status == 2  # cudaErrorMemoryAllocation
    runtime.mallocManaged(100 * MIB)  # is paged
    runtime.free(held)
    assert runtime.malloc(25 * MIB) and told.free_bytes(0) == 39 * MIB


def test_room_is_given_back_where_the_host_has_no_memory(runtime: HostRuntime) -> None:
    runtime.source = PlainSource(cap_bytes=0)
    with pytest.raises(Status):
        runtime.malloc(MIB)
    assert runtime.memGetInfo()[0] == 64 * MIB


@needs_software_gpu
def test_alone_it_has_vram_and_no_time_and_nothing_of_umem_follows(kernel_cache: Path) -> None:
    start = """
import sys
from umem.host_cuda import open_host_cuda
open_host_cuda("t4", "64MiB", force=True)
import cupy as cp
"""
    program = """
begin, end = cp.cuda.Event(), cp.cuda.Event()
begin.record()
x = cp.arange(1 << 20, dtype="f4")
print(float((x * 2).sum()))
end.record()
end.synchronize()
print(cp.cuda.get_elapsed_time(begin, end), cp.cuda.runtime.memGetInfo()[0] >> 20)
try:
    cp.empty(64 << 20, "u1")
except cp.cuda.memory.OutOfMemoryError as error:
    print("out of memory")
print([name for name in sys.modules if name.startswith(("umem.devices.v", "umem.devices.s"))])
"""
    lines = run(program, kernel_cache, start=start).splitlines()
    assert lines[0] == str(float(sum(range(0, 1 << 21, 2))))
    assert lines[1:] == ["0.0 55", "out of memory", "[]"]
