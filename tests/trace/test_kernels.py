"""The kernels of an operation: pieces of a workspace, parts under a cap, and files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import umem
from umem.devices.virtual import VirtualGPU
from umem.errors import TraceError
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Free, Kernels, Mark, Op
from umem.units import MIB

NAME = "Convolution2DFunction"
COLUMNS = 4 * MIB


def convolution(kernels: Kernels | None, workspace: int = 9 * MIB) -> Op:
    x, y = Access(0, 0, MIB), Access(1, 0, MIB)
    return Op(
        NAME, "forward", (x,), (y,), 10**6, 6 * MIB, workspace_bytes=workspace, kernels=kernels
    )


def step(kernels: Kernels | None, *more: Event, workspace: int = 9 * MIB) -> Trace:
    events: list[Event] = [
        Alloc(0, MIB, "input", "x"),
        Alloc(1, MIB, "activation", "y"),
        *more,
        convolution(kernels, workspace),
        Mark("step"),
    ]
    return Trace(events, "cupy")


def figures(trace: Trace) -> umem.devices.cost.StepCost:
    return umem.replay(trace, "t4", "unmanaged").figures


def test_a_workspace_consists_of_its_largest_array_and_the_rest() -> None:
    assert Kernels(1, 0, COLUMNS).pieces(9 * MIB) == [MIB, COLUMNS, COLUMNS]
    assert Kernels(1, 0, COLUMNS).pieces(8 * MIB) == [COLUMNS, COLUMNS]
    assert Kernels(1, 0, COLUMNS).pieces(MIB) == [MIB]
    assert Kernels().pieces(9 * MIB) == [9 * MIB]
    assert Kernels(1, 0, 1).pieces(9 * MIB) == [9 * MIB]  # more arrays than any operation makes


def test_the_arrays_of_a_workspace_find_room_in_the_gaps_of_the_pool() -> None:
    gaps = [Alloc(2, COLUMNS, "array", "a"), Alloc(3, 512, "array", "b"), Free(2)]
    one, two = (
        figures(step(kernels, *gaps, workspace=2 * COLUMNS))
        for kernels in (None, Kernels(3, 0, COLUMNS))
    )
    assert one.peak_bytes == two.peak_bytes == 10 * MIB + 512
    assert one.reserved_peak_bytes == 14 * MIB + 512
    assert two.reserved_peak_bytes == 10 * MIB + 512


def test_a_workspace_that_does_not_fit_leaves_none_of_its_arrays() -> None:
    gpu = VirtualGPU("t4", vram_bytes=16 * MIB)
    events = step(Kernels(3, 0, COLUMNS), workspace=17 * MIB).events
    with pytest.raises(umem.OutOfMemoryError, match="workspace"):
        for event in events:
            gpu.on_event(event)
    gpu.on_event(convolution(Kernels(3, 0, COLUMNS)))
    assert gpu.figures.peak_bytes == 11 * MIB


def test_launches_and_copies_take_time() -> None:
    launch, rate = umem._common.specs.COSTS.launch, 0.8 * 320e9
    plain, known = figures(step(None)), figures(step(Kernels(5, 64 * MIB)))
    assert known.seconds is not None and plain.seconds is not None
    assert known.compute_seconds - plain.compute_seconds == pytest.approx(64 * MIB / rate)
    assert known.seconds - plain.seconds == pytest.approx(4 * launch + 64 * MIB / rate)
    assert figures(step(Kernels(0))).seconds == pytest.approx(plain.seconds - launch)


def test_a_host_that_gets_numbers_waits_for_them() -> None:
    work = Op("f", "array", (), (Access(1, 0, MIB),), 10**12)
    after = Op("g", "array", (), (Access(1, 0, MIB),), 10**6)
    get = Op("get", "array", (Access(1, 0, 4),), ())
    free, waits = (
        figures(step(None, work, *[after] * 9)), figures(step(None, work, get, *[after] * 9))
    )  # fmt: skip
    assert free.seconds is not None and waits.seconds is not None
    assert waits.seconds - free.seconds > 8 * umem._common.specs.COSTS.launch


def test_a_file_has_kernels_and_an_older_one_a_number_more(tmp_path: Path) -> None:
    known = step(Kernels(3, 5 * MIB, COLUMNS))
    path = known.save(tmp_path / "known")
    assert Trace.load(path).events == known.events
    with gzip.open(path, "rt") as file:
        older = file.read().replace(f"[3,{5 * MIB},{COLUMNS}]", f"[3,{5 * MIB},{COLUMNS},23]")
    with gzip.open(path, "wt") as file:
        file.write(older)
    assert ",23]" in older and Trace.load(path).events == known.events


@pytest.mark.parametrize("wrong", [[-1, 0, 0], [1.5, 0, 0], [1, "2", 0], [1, 0, 1 << 64]])
def test_kernels_that_are_no_counts_are_refused(tmp_path: Path, wrong: list[object]) -> None:
    path = step(Kernels(3)).save(tmp_path / "x")
    with gzip.open(path, "rt") as file:
        text = file.read().replace("[3,0,0]", json.dumps(wrong))
    with gzip.open(path, "wt") as file:
        file.write(text)
    with pytest.raises(TraceError):
        Trace.load(path)
