"""Replays at any size, and the band around their seconds, which comes from the stated ranges."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import umem
from umem.devices.specs import COSTS, RANGES, Costs, extremes
from umem.errors import SizeError, TraceError, UnknownGpuError
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Free, Op
from umem.units import BLOCK_BYTES as BLOCK

US = 1e-6


@pytest.mark.thorough
@given(traces(max_bytes=3 * BLOCK).filter(len), st.sampled_from(("unmanaged", "managed", "hybrid")))
@settings(deadline=None, max_examples=60)
def test_the_seconds_lie_in_the_band(trace: Trace, mode: Any) -> None:
    found = umem.replay(trace, "t4", mode, 4 * BLOCK)
    assert 0 <= found.seconds_low <= found.seconds <= found.seconds_high


@given(traces(max_bytes=3 * BLOCK).filter(len))
@settings(deadline=None, max_examples=30)
def test_an_end_of_the_band_is_a_replay_with_the_costs_of_that_end(trace: Trace) -> None:
    """Prefetches that run beside the operations included: each clock waits for its own."""
    found = umem.replay(trace, "t4", vram=4 * BLOCK)
    low, high = (umem.replay(trace, "t4", vram=4 * BLOCK, costs=c) for c in extremes(COSTS))
    assert found.seconds_low == low.seconds
    assert found.seconds_high == high.seconds
    assert low.figures.migrated_in_bytes == found.figures.migrated_in_bytes


def ops(phase: str, count: int) -> Trace:
    return Trace([Op("f", phase, (), ()) for _ in range(count)])


@pytest.mark.parametrize(
    ("phase", "low", "middle", "high"),
    [
        ("array", 5, 10, 10),
        ("forward", 18, 27, 42),
        ("backward", 21, 31, 50),
        ("update", 12, 19, 21),
    ],
)
def test_an_operation_costs_the_host_a_launch_and_chainers_python(
    phase: str, low: float, middle: float, high: float
) -> None:
    found = umem.replay(ops(phase, 100), "v100-16gb")
    for seconds, us in (
        (found.seconds_low, low),
        (found.seconds, middle),
        (found.seconds_high, high),
    ):
        assert seconds == pytest.approx(100 * us * US)


def test_times_measured_on_cupy_have_no_band() -> None:
    op = Op("f", "forward", (), (), host_seconds=1e-6)
    found = umem.replay(Trace([op] * 10, "cupy"), "v100-16gb")
    assert found.seconds_low == found.seconds == found.seconds_high == pytest.approx(1e-5)


def test_every_default_lies_in_its_range_and_costs_outside_stay_in_the_band() -> None:
    names = {field.name for field in fields(Costs)}
    assert set(RANGES) <= names
    for name, ends in RANGES.items():
        assert min(ends) <= getattr(COSTS, name) <= max(ends), name
    slow, fast = replace(COSTS, launch=1.0), replace(COSTS, memory_efficiency=1.0)
    assert [costs.launch for costs in extremes(slow)] == [5e-6, 1.0]
    assert [costs.memory_efficiency for costs in extremes(fast)] == [1.0, 0.6]


def test_a_step_that_computes_and_one_that_faults_have_bands_of_their_own() -> None:
    compute = umem.replay(Trace([Op("f", "array", (), (), 10**12)]), "v100-16gb")
    assert compute.seconds_high / compute.seconds_low == pytest.approx(2.0, rel=0.01)  # 0.8 / 0.4
    events: list[Event] = [Alloc(n, 2 * BLOCK, "array", f"a{n}") for n in range(4)]
    events += [Op("f", "array", (Access(n % 4, 0, 2 * BLOCK),), ()) for n in range(400)]
    faults = umem.replay(Trace(events), "v100-16gb", vram=4 * BLOCK)
    copies = 2 * BLOCK / 12e9
    expected = (copies + 300 * US) / (copies + 137 * US)
    assert faults.seconds_high / faults.seconds_low == pytest.approx(expected, rel=0.02)


# -- sizes -------------------------------------------------------------------------------------


def at_two_sizes(nbytes: int) -> Trace:
    """A step of one tensor with so many bytes for each of its samples."""

    def step(size: int) -> Trace:
        tensor = Alloc(0, nbytes * size, "activation", "f")
        return Trace([tensor, Op("f", "forward", (), (Access(0, 0, nbytes * size),))])

    return Trace.join([step(4), step(8)], (4, 8))


def test_a_replay_at_a_size_is_the_replay_of_the_trace_at_that_size() -> None:
    trace = at_two_sizes(BLOCK)
    found = umem.replay(trace, "t4", vram=8 * BLOCK, size=32)
    assert found.size == 32
    assert replace(found, size=None) == umem.replay(trace.at(32), "t4", vram=8 * BLOCK)
    assert found.peak_bytes == 32 * BLOCK
    assert found.resident_peak_bytes == 8 * BLOCK
    assert found.factor == 4
    assert umem.replay(trace, "t4").peak_bytes == 8 * BLOCK  # as recorded, at the largest size


@pytest.mark.parametrize("mode", ["managed", "hybrid"])
def test_a_size_that_no_host_has_room_for_is_a_result_that_says_so(mode: Any) -> None:
    found = umem.replay(at_two_sizes(1 << 20), "t4", mode, size=10**9)
    assert not found.fits
    assert found.reason is not None
    assert "needs 953.7 TiB for 'f' activation" in found.reason
    assert "no host has more than 8.0 TiB (simulated T4)" in found.reason
    assert "managed()" not in found.reason
    assert found.needed_bytes == 10**9 << 20
    assert found.factor == found.needed_bytes / found.vram_bytes
    assert found.peak_bytes == 0
    assert found.because == "'f' outputs are 100% of the peak"


def test_a_size_of_a_terabyte_is_replayed() -> None:
    found = umem.replay(at_two_sizes(1000), "t4", size=10**9)
    assert found.fits
    assert found.peak_bytes == 10**12


@pytest.mark.parametrize("size", [0, -4, True, 2.5, "8"])
def test_what_is_no_size_is_refused_before_anything_is_replayed(size: Any) -> None:
    with pytest.raises(SizeError, match="whole number of at least 1"):
        umem.replay(at_two_sizes(10), "t4", size=size)


def test_a_gpu_that_does_not_exist_is_refused_with_a_size_too() -> None:
    with pytest.raises(UnknownGpuError, match="did you mean t4"):
        umem.replay(at_two_sizes(10), "tt4", size=8)


def test_a_trace_that_does_not_hold_together_says_so_even_where_it_does_not_fit() -> None:
    events: list[Event] = [Alloc(0, 1 << 40, "array", "a"), Free(5)]
    for mode in ("managed", "unmanaged"):
        with pytest.raises(TraceError, match="tensor 5 is freed, and is not alive"):
            umem.replay(Trace(events), "t4", mode)
