"""Simulated time against formulas worked out by hand, from the costs that are documented.

The GPU here has round numbers: 10 TFLOP/s, 1 TB/s, 20 GB/s in and 10 GB/s out.
"""

from __future__ import annotations

import dataclasses

import pytest

import umem
from umem._common.specs import COSTS, GPUS, GpuSpec, gpu_spec
from umem.devices.virtual.clock import BlockMoves, Clock
from umem.errors import DeviceError

US = 1e-6
BLOCK = 2 * 1024 * 1024
BLOCK_IN = BLOCK / 20e9
BLOCK_OUT = BLOCK / 10e9
SPEC = GpuSpec("toy", "Toy", 1 << 30, 1 << 30, 1e12, 10e12, None, 20e9, 10e9, "made up", "made up")
NOTHING = BlockMoves()


@pytest.fixture
def clock() -> Clock:
    return Clock(SPEC, COSTS)


def seconds(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def run(
    clock: Clock,
    *,
    flops: int = 0,
    traffic: int = 0,
    remote: float = 0.0,
    moves: BlockMoves = NOTHING,
    pattern: str = "stream",
    ready: float = 0.0,
) -> None:
    clock.run(flops, traffic, remote, moves, pattern, ready)


# -- one operation -------------------------------------------------------------------------------


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_traffic(clock: Clock) -> None:
    run(clock, flops=6_000_000_000, traffic=1000)  # 6e9 / (0.6 * 10e12) = 1 ms
    assert clock.device_seconds == seconds(1e-3)
    run(clock, flops=1000, traffic=1_600_000_000)  # 1.6e9 / (0.8 * 1e12) = 2 ms
    assert clock.device_seconds == seconds(3e-3)
    assert clock.compute_seconds == seconds(3e-3) and clock.stall_seconds == 0


@pytest.mark.parametrize(
    ("pattern", "out", "fault"),
    [
        ("stream", 0, 200 * US),
        ("stream", 5, 200 * US),
        ("strided", 0, 20 * US),
        ("strided", 5, 20 * US),
        ("random", 0, 200 * US),
        ("random", 5, 300 * US),
    ],
)
def test_a_fault_costs_the_copy_and_the_hosts_work(
    clock: Clock, pattern: str, out: int, fault: float
) -> None:
    run(clock, moves=BlockMoves(hit=9, migrated_in=7, migrated_out=out), pattern=pattern)
    assert clock.device_seconds == seconds(7 * (BLOCK_IN + fault) + out * BLOCK_OUT)
    assert clock.stall_seconds == clock.device_seconds


def test_a_first_touch_costs_137_microseconds_and_copies_nothing(clock: Clock) -> None:
    run(clock, moves=BlockMoves(populated=3))
    assert clock.device_seconds == seconds(3 * 137 * US)


def test_evicting_is_free_without_a_copy(clock: Clock) -> None:
    run(clock, moves=BlockMoves(dropped=5, released=3, discarded=2, hit=100))
    assert clock.device_seconds == 0


def test_misses_come_on_top_of_the_arithmetic(clock: Clock) -> None:
    run(clock, flops=6_000_000_000, moves=BlockMoves(migrated_in=10))
    assert clock.device_seconds == seconds(1e-3 + 10 * (BLOCK_IN + 200 * US))


# -- moving on purpose ---------------------------------------------------------------------------


def test_prefetches_cost_the_copy_and_a_little_more(clock: Clock) -> None:
    done = clock.move(BlockMoves(migrated_in=4, populated=3, migrated_out=2, prefetched_out=1))
    expected = 4 * (BLOCK_IN + 10 * US) + 3 * 15 * US + 2 * BLOCK_OUT + 1 * (BLOCK_OUT + 10 * US)
    assert done == clock.seconds == seconds(expected)


def test_a_prefetch_on_its_own_stream_hides_behind_arithmetic(clock: Clock) -> None:
    ready = clock.move(BlockMoves(migrated_in=5), overlap=True)
    run(clock, flops=60_000_000_000)  # 10 ms, and the prefetch takes less
    run(clock, flops=6_000_000_000, ready=ready)
    assert ready == seconds(5 * (BLOCK_IN + 10 * US))
    assert clock.seconds == seconds(11e-3)
    assert clock.stall_seconds == 0


def test_an_operation_waits_for_the_prefetch_that_it_needs(clock: Clock) -> None:
    ready = clock.move(BlockMoves(migrated_in=100), overlap=True)
    run(clock, flops=6_000_000_000)  # 1 ms beside it
    run(clock, flops=6_000_000_000, ready=ready)
    assert clock.seconds == seconds(100 * (BLOCK_IN + 10 * US) + 1e-3)


def test_a_prefetch_without_a_stream_is_in_order_with_operations(clock: Clock) -> None:
    run(clock, flops=6_000_000_000)
    clock.move(BlockMoves(migrated_in=100))
    run(clock, flops=6_000_000_000)
    assert clock.seconds == seconds(2e-3 + 100 * (BLOCK_IN + 10 * US))


def test_the_link_carries_one_thing_at_a_time(clock: Clock) -> None:
    first = clock.move(BlockMoves(migrated_in=10), overlap=True)
    second = clock.move(BlockMoves(prefetched_out=10), overlap=True)
    assert second - first == seconds(10 * (BLOCK_OUT + 10 * US))
    run(clock, moves=BlockMoves(migrated_in=1))  # a fault waits for the link
    assert clock.seconds == seconds(second + BLOCK_IN + 200 * US)


def test_a_fault_holds_the_link(clock: Clock) -> None:
    run(clock, moves=BlockMoves(migrated_in=10))
    done = clock.move(BlockMoves(migrated_in=1), overlap=True)
    assert done == seconds(10 * (BLOCK_IN + 200 * US) + BLOCK_IN + 10 * US)


# -- reading over the bus ------------------------------------------------------------------------


def test_reading_over_the_bus_reaches_nine_tenths_of_it(clock: Clock) -> None:
    assert clock.remote_seconds(18e9, 0, "stream") == seconds(1.0)
    assert clock.remote_seconds(0, 9e9, "stream") == seconds(1.0)
    assert clock.remote_seconds(18e9, 9e9, "strided") == seconds(2.0)


def test_scattered_reads_make_60_million_accesses_a_second_on_pcie_5() -> None:
    fast = Clock(gpu_spec("rtx-5090"), COSTS)
    line_bytes = 128
    assert fast.remote_seconds(60e6 * line_bytes, 0, "random") == seconds(1.0)


def test_an_operation_on_the_bus_keeps_the_link(clock: Clock) -> None:
    run(clock, remote=5e-3)
    assert clock.move(BlockMoves(), 20_000_000, overlap=True) == seconds(6e-3)


# -- the host ------------------------------------------------------------------------------------


def test_a_step_of_many_small_operations_is_bound_by_the_host(clock: Clock) -> None:
    for _ in range(2400):  # the LSTM of the documentation: 24 ms of launching
        clock.launch(None)
        run(clock, flops=600_000)  # 0.1 us
    assert clock.seconds == seconds(2400 * 10 * US + 0.1 * US)
    assert clock.compute_seconds == seconds(2400 * 0.1 * US)


def test_a_step_of_large_operations_is_bound_by_the_gpu(clock: Clock) -> None:
    for _ in range(10):
        clock.launch(None)
        run(clock, flops=6_000_000_000)
    assert clock.seconds == seconds(10e-3 + 10 * US)


def test_measured_host_time_counts_where_it_is_less_than_a_launch(clock: Clock) -> None:
    """More may be a wait for the GPU that recorded it."""
    for host_seconds in (2 * US, 5e-3):
        clock.launch(host_seconds)
    assert clock.host_seconds == seconds(12 * US)


# -- published figures that need no more than the clock ------------------------------------------


def test_p100_streams_by_fault_and_by_prefetch_as_measured() -> None:
    blocks = 4000
    fault, prefetch = Clock(gpu_spec("p100-16gb"), COSTS), Clock(gpu_spec("p100-16gb"), COSTS)
    run(fault, moves=BlockMoves(migrated_in=blocks))
    prefetch.move(BlockMoves(migrated_in=blocks))
    assert blocks * BLOCK / fault.seconds == pytest.approx(5.4e9, rel=0.10)
    assert blocks * BLOCK / prefetch.seconds == pytest.approx(10.9e9, rel=0.02)


# -- the table of GPUs ---------------------------------------------------------------------------


def test_every_gpu_says_where_its_figures_are_from() -> None:
    for name in sorted(GPUS):
        spec = gpu_spec(name)
        assert spec.name == name and spec.title
        assert len(spec.source) > 8 and len(spec.link_source) > 8
        assert spec.total_bytes is not None
        assert 0.9 * spec.vram_bytes <= spec.total_bytes < spec.vram_bytes
        assert 30 << 20 <= spec.total_bytes - spec.usable_bytes <= 600 << 20
        assert 8 << 30 <= spec.vram_bytes <= 256 << 30
        assert 1e11 < spec.memory_bandwidth < 1e13
        assert 1e12 < spec.fp32_rate < 2e14
        assert spec.fp16_rate is None or spec.fp16_rate > spec.fp32_rate
        if spec.host_in_bandwidth is not None and spec.host_out_bandwidth is not None:
            assert 1e10 < spec.host_out_bandwidth <= spec.host_in_bandwidth < spec.memory_bandwidth
        else:
            assert spec.host_in_bandwidth is spec.host_out_bandwidth is None
        assert spec.chip is not None
        assert (6, 0) <= spec.chip[:2] <= (12, 9) and 10 <= spec.chip[2] <= 200
        assert spec.nvlink_bandwidth is None or 4e10 < spec.nvlink_bandwidth < 1e12


def test_the_software_gpu_refuses_a_gpu_whose_capability_nobody_has_said() -> None:
    """CuPy compiles for it, and libraries choose by it: none is made up."""
    unknown = dataclasses.replace(
        gpu_spec("rtx-4090"), name="rtx-4070", title="RTX 4070", chip=None
    )
    with pytest.raises(DeviceError, match=r"RTX 4070: .* compute capability .* unknown: give"):
        umem.software_gpu(unknown)


@pytest.mark.parametrize(
    ("name", "vram_gib", "memory_gb", "fp32_tera", "link_gb"),
    [
        ("p100-16gb", 16, 732, 9.3, 11.4),
        ("v100-32gb", 32, 900, 15.7, 12),
        ("t4", 16, 320, 8.1, 12),
        ("rtx-3090", 24, 936, 35.6, 25),
        ("rtx-5090", 32, 1792, 105, 55),
        ("a100-80gb", 80, 2039, 19.5, 25),
        ("h100-sxm", 80, 3352, 67, 55),
        ("h200", 141, 4800, 67, 55),
        ("gh200-96gb", 96, 4000, 67, 375),
        ("b200", 180, 8000, 75, 55),
    ],
)
def test_figures_of_the_table(
    name: str, vram_gib: int, memory_gb: float, fp32_tera: float, link_gb: float
) -> None:
    spec = gpu_spec(name)
    found = spec.memory_bandwidth, spec.fp32_rate, spec.host_in_bandwidth
    assert found == pytest.approx((memory_gb * 1e9, fp32_tera * 1e12, link_gb * 1e9))
    assert spec.vram_bytes == vram_gib << 30


def test_a_gpu_has_what_its_driver_reports_less_a_context() -> None:
    t4 = gpu_spec("t4")
    assert t4.total_bytes is not None
    assert t4.total_bytes == pytest.approx(14.56 * 2**30, abs=2 << 20)
    assert t4.total_bytes - t4.usable_bytes == 40 * (3 << 20)
    given = t4.with_vram(1 << 30)
    assert (given.vram_bytes, given.usable_bytes, given.total_bytes) == (1 << 30, 1 << 30, None)


@pytest.mark.parametrize("name", ["V100-16GB", "v100_16gb", " v100 16gb ", "v100-16"])
def test_names_are_read_generously(name: str) -> None:
    assert gpu_spec(name).name == "v100-16gb"
