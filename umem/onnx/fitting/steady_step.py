"""The cost of an exported model's step, repeated as in training, on a virtual GPU (simulated)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from umem._common.specs import GpuSpec
from umem.devices import Mode, Policy, StepCost
from umem.devices.virtual import VirtualGPU
from umem.predict import ranged_clocks, replay_on
from umem.trace import Alloc, Event, Free, Mark, Op, Trace, allocations, renumbered, used_bytes

STEPS = 3
"""Steps of a replay: the first one finds no gradients, and if blocks move, later ones alternate. A
choice: two alternating steps after the first."""
STEP = Mark("step")
_LASTING = ("parameter", "state", "input")
"""Kinds of tensors that stay from step to step."""


@dataclass(frozen=True)
class SteadyStep:
    """A step on a GPU, simulated: its cost, and the reason if it does not fit.

    Times and moved bytes are means of all steps but the first; peaks are over all steps. For a step
    that does not fit, only the peak is known.
    """

    cost: StepCost
    reason: str | None = None


def steady_step(trace: Trace, gpu: GpuSpec, mode: Mode, *, prefetch: bool = False) -> SteadyStep:
    """Replay a step `STEPS` times; the host waits for the GPU after each.

    A step's time is a mean, because steps alternate if blocks move: each misses the blocks that the
    one before evicted. A step that does not fit, or a GPU that lacks the mode, raises no error: see
    ``reason``.

    Args:
        trace: the trace of one step.
        gpu: the GPU.
        mode, prefetch: as in `umem.replay`.
    """
    steps = list(repeated(trace))
    device = VirtualGPU(gpu, backend=trace.backend, clocks=ranged_clocks(gpu))
    ends: list[tuple[StepCost, list[float]]] = []

    def end_step() -> None:
        device.model.synchronize()
        ends.append((device.model.figures, [clock.seconds for clock in device.model.clocks]))

    reason = replay_on(device, Policy(mode, None, prefetch), steps, end_step, timeline=False)
    if reason is not None:
        return SteadyStep(StepCost(peak_bytes=max(used_bytes(chain(*steps)))), reason)
    (start, since), (end, until) = ends[0], ends[-1]
    seconds, low, high = [(b - a) / (STEPS - 1) for a, b in zip(since, until, strict=True)]
    return SteadyStep(
        StepCost(
            seconds=seconds,
            seconds_low=low,
            seconds_high=high,
            peak_bytes=end.peak_bytes,
            resident_peak_bytes=end.resident_peak_bytes,
            migrated_in_bytes=_mean(start.migrated_in_bytes, end.migrated_in_bytes),
            migrated_out_bytes=_mean(start.migrated_out_bytes, end.migrated_out_bytes),
            remote_bytes=_mean(start.remote_bytes, end.remote_bytes),
            sent_bytes=_mean(start.sent_bytes, end.sent_bytes),
            fetched_bytes=_mean(start.fetched_bytes, end.fetched_bytes),
            host_bytes=_host_bytes(end, mode, gpu),
        )
    )


def _mean(start: int | None, end: int | None) -> int:
    return round(((end or 0) - (start or 0)) / (STEPS - 1))


def _host_bytes(ran: StepCost, mode: Mode, gpu: GpuSpec) -> int:
    """Return the bytes in host memory.

    In hybrid memory these are the bytes reserved beyond the resident peak; in managed memory, once
    blocks have moved out, the bytes reserved beyond VRAM; otherwise 0.
    """
    reserved = ran.reserved_peak_bytes or 0
    if mode == "hybrid":
        return max(0, reserved - (ran.resident_peak_bytes or 0))
    if mode == "managed" and ran.migrated_out_bytes:
        return max(0, reserved - gpu.usable_bytes)
    return 0


def repeated(trace: Trace) -> Iterator[list[Event]]:
    """Yield the events of a step `STEPS` times, each ended by the mark ``"step"``.

    Parameters, states and inputs stay. A step's other remaining tensors, such as gradients, are
    freed before the next backward, as in Chainer's ``optimizer.update(loss)``; without a backward,
    at the end of the next step.
    """
    step = [*trace.events] if trace.events[-1:] == [STEP] else [*trace.events, STEP]
    allocs = allocations(step)
    freed = {event.tensor for event in step if isinstance(event, Free)}
    stays = {t for t, alloc in allocs.items() if t not in freed and alloc.kind in _LASTING}
    left = [tensor for tensor in allocs if tensor not in freed and tensor not in stays]
    turn = 1 + max(i for i, e in enumerate(step) if isinstance(e, Op) and e.phase == "forward")
    stride, before = 1 + max(allocs), list[Event]()
    for number in range(STEPS):
        now = {t: t if t in stays else t + number * stride for t in allocs}
        forward, backward = (
            [
                renumbered(event, now)
                for event in part
                if not (number and isinstance(event, Alloc) and event.tensor in stays)
            ]
            for part in (step[:turn], step[turn:])
        )
        yield [*forward, *before, *backward]
        before = [Free(now[tensor]) for tensor in left]
