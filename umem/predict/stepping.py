"""Steady-state steps on a virtual GPU: the mean of the later steps of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from umem.devices.base import Mode, Policy
from umem.devices.cost import StepCost
from umem.devices.specs import COSTS, GpuSpec, extremes
from umem.devices.virtual import VirtualGPU
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.trace.trace import Event, Mark, Trace


@dataclass(frozen=True)
class SteadyStep:
    """A step on a GPU, simulated: its cost, or the reason why it does not fit.

    Times and moved bytes are the mean of the second half of the steps, the middle one included;
    peaks are over all steps.
    """

    cost: StepCost
    reason: str | None = None

    @property
    def fits(self) -> bool:
        """Return True if the replay reached the end of the trace."""
        return self.reason is None


def steady_step(trace: Trace, gpu: GpuSpec, mode: Mode, *, prefetch: bool = False) -> SteadyStep:
    """Replay a trace of several steps; the host waits for the GPU after each of them.

    A step's time is a mean, because where blocks move, steps alternate: the next one misses the
    blocks that one evicts. A step that does not fit, or a GPU that lacks the mode, raises nothing:
    see ``reason``.

    Args:
        trace: two steps or more, each ended by its mark.
        gpu: the GPU.
        mode, prefetch: as in `umem.replay`.
    """
    if (reason := VirtualGPU(gpu).why_not(mode)) is not None:
        return SteadyStep(StepCost(), reason)
    try:
        ran = _ends(trace, gpu, Policy(mode, None, prefetch))
    except OutOfMemoryError as error:
        return SteadyStep(StepCost(), str(error))
    count = max(1, -(-len(ran) // 2))
    (first, start), (last, end) = ran[-1 - count], ran[-1]
    seconds, low, high = [(to - since) / count for since, to in zip(first, last, strict=True)]
    cost = StepCost(
        peak_bytes=end.peak_bytes,
        resident_peak_bytes=end.resident_peak_bytes,
        reserved_peak_bytes=end.reserved_peak_bytes,
        migrated_in_bytes=_mean(start.migrated_in_bytes, end.migrated_in_bytes, count),
        migrated_out_bytes=_mean(start.migrated_out_bytes, end.migrated_out_bytes, count),
        remote_bytes=_mean(start.remote_bytes, end.remote_bytes, count),
        sent_bytes=_mean(start.sent_bytes, end.sent_bytes, count),
        fetched_bytes=_mean(start.fetched_bytes, end.fetched_bytes, count),
        host_bytes=_host_bytes(end, mode, gpu),
    )
    return SteadyStep(replace(cost, seconds=seconds, seconds_low=low, seconds_high=high))


def _mean(start: int | None, end: int | None, count: int) -> int:
    return round(((end or 0) - (start or 0)) / count)


class _StepEnd(NamedTuple):
    """The seconds of each clock at the end of a step, and the figures counted so far."""

    seconds: list[float]
    so_far: StepCost


def _ends(trace: Trace, gpu: GpuSpec, policy: Policy) -> list[_StepEnd]:
    """Replay a trace through the pool of a virtual GPU; return the end of each step.

    There are three clocks: by the costs as they are, and at the quick and slow ends of each.
    """
    clocks = [Clock(gpu, costs) for costs in (COSTS, *extremes(COSTS))]
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
    """Yield the slice of each step's events, the step's mark included."""
    start = 0
    for index, event in enumerate(events):
        if type(event) is Mark and event.label == "step":
            yield slice(start, index + 1)
            start = index + 1


def _host_bytes(ran: StepCost, mode: Mode, gpu: GpuSpec) -> int:
    """Return the bytes in host memory.

    In hybrid memory those reserved beyond the resident peak; in managed memory, once blocks have
    migrated out, those reserved beyond VRAM; otherwise 0.
    """
    reserved = ran.reserved_peak_bytes or 0
    if mode == "hybrid":
        return max(0, reserved - (ran.resident_peak_bytes or 0))
    if mode == "managed" and ran.migrated_out_bytes:
        return max(0, reserved - gpu.usable_bytes)
    return 0
