"""What a step takes on virtual GPUs once it has settled: the mean of all but the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from umem.devices.base import Mode, Policy
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
            return tuple(map(SettledStep, said))
    first, last, count = ran.ends[0], ran.ends[-1], len(ran.ends) - 1
    means = iter([(end - start) / count for start, end in zip(first, last, strict=True)])
    host_seconds, op_count = _issuing(trace, gpus[0], len(ran.ends))
    step = SettledStep(
        None,
        moved_bytes=round((ran.moved[-1] - ran.moved[0]) / count),
        peak_bytes=ran.peak_bytes,
        resident_peak_bytes=ran.resident_peak_bytes,
        reserved_peak_bytes=ran.reserved_peak_bytes,
        host_bytes=_host_bytes(ran, mode, gpus[0]),
        host_seconds=host_seconds,
        op_count=op_count,
    )
    return tuple(
        replace(step, seconds=seconds, seconds_low=low, seconds_high=high)
        for seconds, low, high in zip(means, means, means, strict=True)
    )


def has_room(gpu: GpuSpec, layout: Layout) -> bool:
    """Whether a GPU has VRAM for all of a layout, so that nothing has to move or give way."""
    return layout.block_count <= gpu.usable_bytes // BLOCK_BYTES


class _Ran(NamedTuple):
    """What a replay came to: seconds of each clock, and bytes moved so far, by step; peaks."""

    ends: list[list[float]]
    moved: list[int]
    evicted_bytes: int
    peak_bytes: int
    resident_peak_bytes: int
    reserved_peak_bytes: int


def _on_layout(
    trace: Trace, layout: Layout, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy
) -> _Ran:
    replayer = Replayer(
        gpu.usable_bytes,
        clocks,
        uses_host_times=trace.backend == "cupy",
        managed=policy.mode == "managed",
        prefetch=policy.prefetch,
    )
    ends, moved = [], []
    for step in _steps(trace.events):
        replayer.follow(layout.laid[step], layout.block_count)
        replayer.synchronize()
        ends.append([clock.seconds for clock in clocks])
        moves = replayer.moves
        moved.append(moves.migrated_in + moves.migrated_out + moves.prefetched_out)
    return _Ran(
        ends,
        [count * BLOCK_BYTES for count in moved],
        (moves.migrated_out + moves.prefetched_out) * BLOCK_BYTES,
        layout.peak_bytes,
        replayer.resident_peak_count * BLOCK_BYTES,
        layout.reserved_bytes,
    )


def _on_model(trace: Trace, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy) -> _Ran:
    model = Model(gpu, COSTS, "caching", trace.backend, lambda: policy, clocks)
    try:
        return _followed(model, trace, clocks)
    finally:
        model.driver.residency.forget()


def _followed(model: Model, trace: Trace, clocks: Sequence[Clock]) -> _Ran:
    ends, moved = [], []
    for step in _steps(trace.events):
        model.follow(trace.events[step])
        model.synchronize()
        ends.append([clock.seconds for clock in clocks])
        figures = model.figures
        migrated = figures.migrated_in_bytes + figures.migrated_out_bytes
        moved.append(migrated + figures.remote_bytes)
    return _Ran(
        ends,
        moved,
        figures.migrated_out_bytes,
        figures.peak_bytes,
        figures.resident_peak_bytes,
        figures.reserved_peak_bytes,
    )


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


def _host_bytes(ran: _Ran, mode: Mode, gpu: GpuSpec) -> int:
    """What was reserved beyond VRAM: hybrid memory's from the start, managed once some has left."""
    if mode == "hybrid":
        return max(0, ran.reserved_peak_bytes - ran.resident_peak_bytes)
    if mode == "managed" and ran.evicted_bytes:
        return max(0, ran.reserved_peak_bytes - gpu.usable_bytes)
    return 0
