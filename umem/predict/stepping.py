"""Steady-state steps on virtual GPUs: the mean of all steps but the first.

A replay is made once for every GPU that it serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from umem.devices.base import Mode, Policy
from umem.devices.cost import StepCost
from umem.devices.specs import COSTS, GpuSpec, extremes
from umem.devices.virtual import VirtualGPU
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.layout import Layout, Replayer, lay_out
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.trace.trace import Event, Mark, Trace
from umem.units import BLOCK_BYTES, format_bytes

_RATES = (COSTS, *extremes(COSTS))
"""The cost constants of each GPU's three clocks: as they are, at the quick and slow ends."""


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


def steady_steps(
    trace: Trace,
    gpus: Sequence[GpuSpec],
    mode: Mode,
    *,
    prefetch: bool = False,
    layout: Layout | None = None,
) -> tuple[SteadyStep, ...]:
    """Replay a trace once for several GPUs; the host waits for the GPU after each step.

    The places of blocks depend on VRAM and not on time, so that one replay runs the clocks of all
    GPUs with the same VRAM. A step's time is a mean, because where blocks move, steps alternate:
    the next one misses the blocks that one evicts.

    Args:
        trace: two steps or more, each ended by its mark; corrected for CuPy (`cupy_differences`).
        gpus: the GPUs, one at least, all with the same VRAM, or all with room for the layout.
        mode, prefetch: as in `umem.replay`; that a GPU supports the mode is not checked.
        layout: of the trace; used instead of a pool in managed memory, and where it has room.
    """
    clocks = [Clock(gpu, costs) for gpu in gpus for costs in _RATES]
    if layout is not None and (mode == "managed" or has_room(gpus[0], layout)):
        ran = _on_layout(trace, layout, gpus[0], clocks, Policy(mode, None, prefetch))
    else:
        try:
            ran = _on_model(trace, gpus[0], clocks, Policy(mode, None, prefetch))
        except OutOfMemoryError as error:
            said = [str(error).replace(gpus[0].title, gpu.title) for gpu in gpus]
            return tuple(SteadyStep(StepCost(), text) for text in said)
    count = max(1, -(-len(ran) // 2))
    (first, start), (last, end) = ran[-1 - count], ran[-1]
    means = iter([(after - before) / count for before, after in zip(first, last, strict=True)])
    host_seconds, op_count = _issuing(trace, gpus[0], len(ran))
    cost = StepCost(
        peak_bytes=end.peak_bytes,
        resident_peak_bytes=end.resident_peak_bytes,
        reserved_peak_bytes=end.reserved_peak_bytes,
        migrated_in_bytes=_mean(start.migrated_in_bytes, end.migrated_in_bytes, count),
        migrated_out_bytes=_mean(start.migrated_out_bytes, end.migrated_out_bytes, count),
        remote_bytes=_mean(start.remote_bytes, end.remote_bytes, count),
        sent_bytes=_mean(start.sent_bytes, end.sent_bytes, count),
        fetched_bytes=_mean(start.fetched_bytes, end.fetched_bytes, count),
        host_bytes=_host_bytes(end, mode, gpus[0]),
        host_seconds=host_seconds,
        op_count=op_count,
    )
    return tuple(
        SteadyStep(replace(cost, seconds=seconds, seconds_low=low, seconds_high=high))
        for seconds, low, high in zip(means, means, means, strict=True)
    )


def _mean(start: int | None, end: int | None, count: int) -> int:
    return round(((end or 0) - (start or 0)) / count)


def has_room(gpu: GpuSpec, layout: Layout) -> bool:
    """Return True if a GPU has VRAM for all of a layout, so that no block moves or is evicted."""
    return layout.block_count <= gpu.usable_bytes // BLOCK_BYTES


class _StepEnd(NamedTuple):
    """The seconds of each clock at the end of a step, and the figures counted so far."""

    seconds: list[float]
    so_far: StepCost


def _on_layout(
    trace: Trace, layout: Layout, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy
) -> list[_StepEnd]:
    """Replay a trace whose arrays have fixed addresses, without a memory pool.

    Returns for the end of each step the seconds on every clock, and the costs, both counted from
    the start of the replay.

    Args:
        clocks: models of time, each for the whole replay.
    """
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
            sent_bytes=replayer.copies.sent_bytes,
            fetched_bytes=replayer.copies.fetched_bytes,
        )
        ends.append(_StepEnd([clock.seconds for clock in clocks], so_far))
    return ends


def _on_model(
    trace: Trace, gpu: GpuSpec, clocks: Sequence[Clock], policy: Policy
) -> list[_StepEnd]:
    """Replay a trace through the pool of a virtual GPU; return the end of each step."""
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


def _issuing(trace: Trace, gpu: GpuSpec, step_count: int) -> tuple[float, int]:
    """Return the host's seconds to issue a step's operations, and their number; means of steps."""
    clock, count = Clock(gpu, COSTS), 0
    for op in trace.ops:
        clock.launch(op.host_seconds if trace.backend == "cupy" else None, op.phase)
        count += 1
    return clock.host_seconds / step_count, round(count / step_count)


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


# -- each replay once -----------------------------------------------------------------------------

_Key = tuple[int, Mode, bool]


class Replays:
    """A cache of steady-state steps on some GPUs; one replay serves all with the same VRAM.

    One replay also serves all GPUs whose VRAM has room for all that a trace reserves. Steps and
    their traces are kept until `forget`. Not thread-safe.

    Args:
        gpus: the GPUs that share replays; others are replayed on their own.
    """

    def __init__(self, gpus: Iterable[GpuSpec] = ()) -> None:
        self._gpus = tuple(dict.fromkeys(gpus))
        self._steps: dict[_Key, dict[GpuSpec, SteadyStep]] = {}
        self._traces: dict[int, Trace] = {}  # kept, so that no other gets its number
        self._peaks: dict[int, int] = {}
        self._layouts: dict[int, Layout | None] = {}

    def step(self, trace: Trace, gpu: GpuSpec, mode: Mode, *, prefetch: bool = False) -> SteadyStep:
        """Return the steady step of a trace on a GPU; see `umem.predict.stepping.steady_steps`.

        A step that does not fit, or a GPU that lacks the mode, raises nothing: see ``reason``.
        """
        key = id(trace), mode, prefetch
        self._traces[id(trace)] = trace
        steps = self._steps.setdefault(key, {})
        if gpu not in steps:
            reason = self._why_not(trace, gpu, mode)
            if reason is None:
                steps.update(self._replayed(trace, gpu, mode, prefetch))
            else:
                steps[gpu] = SteadyStep(StepCost(), reason)
        return steps[gpu]

    def layout(self, trace: Trace) -> Layout | None:
        """Return the layout of a trace in memory that is never full; None: see `lay_out`."""
        self._traces[id(trace)] = trace
        if id(trace) not in self._layouts:
            self._layouts[id(trace)] = lay_out(trace.events)
        return self._layouts[id(trace)]

    def lay(self, trace: Trace, layout: Layout) -> None:
        """Set the layout of a trace, which may have hints that the trace itself cannot express."""
        self._traces[id(trace)], self._layouts[id(trace)] = trace, layout

    def peak_bytes(self, trace: Trace) -> int:
        """Return the most bytes of a trace that are alive at once, workspace included."""
        self._traces[id(trace)] = trace
        if id(trace) not in self._peaks:
            self._peaks[id(trace)] = trace.peak_bytes
        return self._peaks[id(trace)]

    def forget(self, kept: Iterable[Trace]) -> None:
        """Drop all traces but these, with their steps, peaks and layouts."""
        self._traces = {id(trace): trace for trace in kept}
        self._steps = {key: steps for key, steps in self._steps.items() if key[0] in self._traces}
        self._peaks = {n: peak for n, peak in self._peaks.items() if n in self._traces}
        self._layouts = {n: found for n, found in self._layouts.items() if n in self._traces}

    def _why_not(self, trace: Trace, gpu: GpuSpec, mode: Mode) -> str | None:
        """Return the reason why a step does not fit, if no replay is needed to tell; else None."""
        if mode != "unmanaged":
            return VirtualGPU(gpu).why_not(mode)
        peak = self.peak_bytes(trace)
        if peak > gpu.usable_bytes:
            vram = format_bytes(gpu.usable_bytes)
            return f"it needs {format_bytes(peak)}, and {vram} of VRAM are usable"
        return None

    def _replayed(
        self, trace: Trace, gpu: GpuSpec, mode: Mode, prefetch: bool
    ) -> dict[GpuSpec, SteadyStep]:
        """Replay a trace once; return the steps of all GPUs that this replay serves."""
        layout = self.layout(trace)
        if layout is not None and has_room(gpu, layout):
            gpus = [other for other in self._gpus if has_room(other, layout)]
        else:
            gpus = [other for other in self._gpus if _room(other) == _room(gpu)]
        if mode != "unmanaged":
            gpus = [other for other in gpus if other.host_in_bandwidth is not None]
        gpus = gpus if gpu in gpus else [gpu]
        steps = steady_steps(trace, gpus, mode, prefetch=prefetch, layout=layout)
        return dict(zip(gpus, steps, strict=True))


def _room(gpu: GpuSpec) -> int:
    """Return the number of whole blocks in a GPU's usable VRAM."""
    return gpu.usable_bytes // BLOCK_BYTES
