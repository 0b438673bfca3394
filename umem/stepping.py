"""What a step takes on a virtual GPU once it has settled: the mean of all but the first."""

from __future__ import annotations

from dataclasses import dataclass

from umem.devices.base import Mode, Policy
from umem.devices.specs import COSTS, GpuSpec, extremes
from umem.devices.virtual import VirtualGPU
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.figures import Figures
from umem.errors import OutOfMemoryError
from umem.trace import Mark, Trace


@dataclass(frozen=True)
class SettledStep:
    """A step on a GPU, simulated; where ``reason`` says why it does not fit, nothing else holds.

    ``seconds_low`` and ``seconds_high`` are as in `umem.replay`. ``moved_bytes`` are blocks both
    ways, and what is read and written over the bus in place. Peaks are of all steps.
    ``host_bytes`` is the most host memory that what has no room in VRAM takes. ``host_seconds``
    is what the host needs to issue a step's ``op_count`` operations: no GPU makes it shorter.
    """

    reason: str | None
    seconds: float = 0.0
    seconds_low: float = 0.0
    seconds_high: float = 0.0
    moved_bytes: int = 0
    peak_bytes: int = 0
    resident_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    host_bytes: int = 0
    host_seconds: float = 0.0
    op_count: int = 0

    @property
    def fits(self) -> bool:
        """Whether the trace came to its end."""
        return self.reason is None


def settled_step(trace: Trace, gpu: GpuSpec, mode: Mode, *, prefetch: bool = False) -> SettledStep:
    """Replay a trace; the host waits for the GPU after each step, as where a loss is looked at.

    The mean, because where blocks move, steps take turns: what one evicts the next one misses.

    Args:
        trace: two steps or more, each ended by its mark; corrected for CuPy (`umem.backends`).
        gpu: the GPU. mode, prefetch: as in `umem.replay`.
    """
    device = VirtualGPU(gpu, backend=trace.backend, further=extremes(COSTS))
    device.install(Policy(mode, None, prefetch), everywhere=True)
    try:
        return _followed(device, trace, gpu, mode)
    finally:
        device.model.driver.residency.forget()


def _followed(device: VirtualGPU, trace: Trace, gpu: GpuSpec, mode: Mode) -> SettledStep:
    ends: list[tuple[float, ...]] = []
    try:
        reason = device.why_not(mode)
        for event in () if reason else trace.events:
            device.on_event(event)
            if event == Mark("step"):
                device.synchronize()
                ends.append(_totals(device))
    except OutOfMemoryError as error:
        reason = str(error)
    if reason is not None:
        return SettledStep(reason)
    count = len(ends) - 1
    seconds, low, high, moved = (
        (last - first) / count for first, last in zip(ends[0], ends[-1], strict=True)
    )
    figures = device.figures
    host_seconds, op_count = _issuing(trace, gpu)
    return SettledStep(
        None,
        seconds=seconds,
        seconds_low=low,
        seconds_high=high,
        moved_bytes=round(moved),
        peak_bytes=figures.peak_bytes,
        resident_peak_bytes=figures.resident_peak_bytes,
        reserved_peak_bytes=figures.reserved_peak_bytes,
        host_bytes=_host_bytes(figures, mode, gpu),
        host_seconds=host_seconds,
        op_count=op_count,
    )


def _totals(device: VirtualGPU) -> tuple[float, ...]:
    """Seconds of the three clocks, and bytes that have moved."""
    figures = device.figures
    moved = figures.migrated_in_bytes + figures.migrated_out_bytes + figures.remote_bytes
    return (*(clock.seconds for clock in device.model.clocks), moved)


def _issuing(trace: Trace, gpu: GpuSpec) -> tuple[float, int]:
    """The host's seconds for the operations of a step, and how many they are."""
    clock, count = Clock(gpu, COSTS), 0
    for op in trace.ops:
        clock.launch(op.host_seconds if trace.backend == "cupy" else None, op.phase)
        count += 1
    return clock.host_seconds / trace.step_count, round(count / trace.step_count)


def _host_bytes(figures: Figures, mode: Mode, gpu: GpuSpec) -> int:
    """What was reserved beyond VRAM: hybrid memory's from the start, managed once some has left."""
    if mode == "hybrid":
        return max(0, figures.reserved_peak_bytes - figures.resident_peak_bytes)
    if mode == "managed" and figures.migrated_out_bytes:
        return max(0, figures.reserved_peak_bytes - gpu.usable_bytes)
    return 0
