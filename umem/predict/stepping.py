"""What a step takes on virtual GPUs once it has settled: the mean of all but the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from umem.devices.base import Mode, Policy
from umem.devices.cost import StepCost
from umem.devices.specs import COSTS, GpuSpec, extremes
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.layout import Layout, Replayer
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.trace.trace import Event, Mark, Trace
from umem.units import BLOCK_BYTES

_RATES = (COSTS, *extremes(COSTS))
"""Each GPU has a clock at these costs: as they are, and at the quick and slow ends."""


@dataclass(frozen=True)
class SettledStep:
    """A step on a GPU, simulated: its cost, or the reason why it does not fit.

    Times and bytes that move are the mean of all steps but the first, peaks are of all of them.
    """

    cost: StepCost
    reason: str | None = None

    @property
    def fits(self) -> bool:
        """Tell whether the trace came to its end."""
        return self.reason is None


def settled_steps(
    trace: Trace,
    gpus: Sequence[GpuSpec],
    mode: Mode,
    *,
    prefetch: bool = False,
    layout: Layout | None = None,
) -> tuple[SettledStep, ...]:
    """Replay a trace once for several GPUs; the host waits for the GPU after each step.

    Where blocks are depends on VRAM and not on time, so that GPUs with the same VRAM have their
    clocks side by side. The mean, because where blocks move, steps take turns: what one evicts
    the next one misses.

    Args:
        trace: two steps or more, each ended by its mark; corrected for CuPy (`cupy_differences`).
        gpus: the GPUs, one at least, with the same VRAM; any where it has room for the layout.
        mode, prefetch: as in `umem.replay`; whether a GPU has the mode is not asked.
        layout: of the trace; with one, a replay that needs no pool has none.
    """
    clocks = [Clock(gpu, costs) for gpu in gpus for costs in _RATES]
    if layout is not None and (mode == "managed" or has_room(gpus[0], layout)):
        ran = _on_layout(trace, layout, gpus[0], clocks, Policy(mode, None, prefetch))
    else:
        try:
            ran = _on_model(trace, gpus[0], clocks, Policy(mode, None, prefetch))
        except OutOfMemoryError as error:
            said = [str(error).replace(gpus[0].title, gpu.title) for gpu in gpus]
            return tuple(SettledStep(StepCost(), text) for text in said)
    (first, start), (last, end) = ran[0], ran[-1]
    count = len(ran) - 1
    means = iter([(after - before) / count for before, after in zip(first, last, strict=True)])
    host_seconds, op_count = _issuing(trace, gpus[0], len(ran))
    cost = StepCost(
        peak_bytes=end.peak_bytes,
        resident_peak_bytes=end.resident_peak_bytes,
        reserved_peak_bytes=end.reserved_peak_bytes,
        migrated_in_bytes=_mean(start.migrated_in_bytes, end.migrated_in_bytes, count),
        migrated_out_bytes=_mean(start.migrated_out_bytes, end.migrated_out_bytes, count),
        remote_bytes=_mean(start.remote_bytes, end.remote_bytes, count),
        host_bytes=_host_bytes(end, mode, gpus[0]),
        host_seconds=host_seconds,
        op_count=op_count,
    )
    return tuple(
        SettledStep(replace(cost, seconds=seconds, seconds_low=low, seconds_high=high))
        for seconds, low, high in zip(means, means, means, strict=True)
    )


def _mean(start: int | None, end: int | None, count: int) -> int:
    return round(((end or 0) - (start or 0)) / count)


def has_room(gpu: GpuSpec, layout: Layout) -> bool:
    """Whether a GPU has VRAM for all of a layout, so that nothing has to move or give way."""
    return layout.block_count <= gpu.usable_bytes // BLOCK_BYTES


class _StepEnd(NamedTuple):
    """The seconds of each clock where a step ends, and what was counted up to there."""

    seconds: list[float]
    so_far: StepCost


def _on_layout(
    trace: Trace, layout: Layout, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy
) -> list[_StepEnd]:
    replayer = Replayer(
        gpu.usable_bytes,
        clocks,
        uses_host_times=trace.backend == "cupy",
        managed=policy.mode == "managed",
        prefetch=policy.prefetch,
    )
    ends = []
    for step in _steps(trace.events):
        replayer.follow(layout.laid[step], layout.block_count)
        replayer.synchronize()
        moves = replayer.moves
        so_far = StepCost(
            peak_bytes=layout.peak_bytes,
            resident_peak_bytes=replayer.resident_peak_count * BLOCK_BYTES,
            reserved_peak_bytes=layout.reserved_bytes,
            migrated_in_bytes=moves.migrated_in * BLOCK_BYTES,
            migrated_out_bytes=(moves.migrated_out + moves.prefetched_out) * BLOCK_BYTES,
        )
        ends.append(_StepEnd([clock.seconds for clock in clocks], so_far))
    return ends


def _on_model(
    trace: Trace, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy
) -> list[_StepEnd]:
    model = Model(gpu, COSTS, "caching", trace.backend, lambda: policy, clocks)
    ends = []
    try:
        for step in _steps(trace.events):
            model.follow(trace.events[step])
            model.synchronize()
            ends.append(_StepEnd([clock.seconds for clock in clocks], model.figures))
    finally:
        model.driver.residency.forget()
    return ends


def _steps(events: Sequence[Event]) -> Iterator[slice]:
    """Where the events of each step are, its mark the last of them."""
    start = 0
    for index, event in enumerate(events):
        if type(event) is Mark and event.label == "step":
            yield slice(start, index + 1)
            start = index + 1


def _issuing(trace: Trace, gpu: GpuSpec, step_count: int) -> tuple[float, int]:
    """The host's seconds for the operations of a step, and how many they are."""
    clock, count = Clock(gpu, COSTS), 0
    for op in trace.ops:
        clock.launch(op.host_seconds if trace.backend == "cupy" else None, op.phase)
        count += 1
    return clock.host_seconds / step_count, round(count / step_count)


def _host_bytes(ran: StepCost, mode: Mode, gpu: GpuSpec) -> int:
    """What was reserved beyond VRAM: hybrid memory's from the start, managed once some has left."""
    reserved = ran.reserved_peak_bytes or 0
    if mode == "hybrid":
        return max(0, reserved - (ran.resident_peak_bytes or 0))
    if mode == "managed" and ran.migrated_out_bytes:
        return max(0, reserved - gpu.usable_bytes)
    return 0
