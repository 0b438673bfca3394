"""Techniques tried on a step: whether the step fits, and its cost; all simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from umem.as_json import named
from umem.devices.cost import StepCost
from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, StateError
from umem.predict.techniques.step_variants import (
    SLACK,
    Prepared,
    StepVariants,
    largest_array,
    with_slack,
)
from umem.predict.techniques.technique import Technique
from umem.units import format_bytes

HOST_BOUND = 0.9
"""A step is host-bound if the host's time is above this share of the step's."""

LEFT_FREE = f"{SLACK:.0%} of VRAM or half of the largest array stays free for the pool's gaps"

OF_CHAINER = (
    "no function of Chainer is in the trace, and it works on those; umem.lookahead moves the "
    "arrays of a loop over CuPy"
)


@dataclass(frozen=True)
class Option(StepCost):
    """A technique, and the cost of a steady-state step under it; simulated.

    Where the step does not fit, its figures are None, except ``peak_bytes`` where the technique
    could be applied. That the host has ``host_bytes`` is not checked.

    Attributes:
        name: the technique's name.
        exact: whether training gives the same bits.
        tolerance: the kind of difference in a word, where results are not the same bits.
        line: the code that turns the technique on; None if no code is needed.
        fits: whether the step fits.
        reason: why the step does not fit, or the technique gains nothing.
    """

    name: str
    exact: bool
    line: str | None
    fits: bool
    reason: str | None = None
    tolerance: str | None = None
    simulated: Literal[True] = True

    @property
    def is_host_bound(self) -> bool:
        """Return True if the host's time to issue the step is above `HOST_BOUND` of its time."""
        if self.seconds is None or self.host_seconds is None:
            return False
        return self.host_seconds > HOST_BOUND * self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file; simulated figures are under names that say so."""
        return named(
            self, ("name", "exact", "tolerance", "line", "fits", "reason", *_FIGURES), SIMULATED
        )


_FIGURES = (
    "seconds", "seconds_low", "seconds_high", "peak_bytes", "resident_peak_bytes", "moved_bytes",
    "host_bytes", "host_seconds", "op_count",
)  # fmt: skip
SIMULATED = frozenset(("fits", *_FIGURES))


class Plain(NamedTuple):
    """A step that fits plain memory: the first technique with its trace, and its time."""

    name: str
    seconds: float


def tried(
    technique: Technique, variants: StepVariants, gpu: GpuSpec, plain: dict[int, Plain]
) -> Option:
    """Try a technique on a step and a GPU; return its figures, or the reason against it.

    A reason that names VRAM says so where some of it has to stay free.

    Args:
        technique: the technique.
        variants: the step.
        gpu: the GPU.
        plain: the steps that fit this GPU's plain memory, by the id of their trace; a technique
            that does no better than one of the same trace gets a reason. Updated.
    """
    option = _tried(technique, variants, gpu, plain)
    if technique.leaves_slack and " of VRAM" in (option.reason or ""):
        return replace(option, reason=f"{option.reason}; {LEFT_FREE}")
    return option


def _tried(
    technique: Technique, variants: StepVariants, gpu: GpuSpec, plain: dict[int, Plain]
) -> Option:
    """Try a technique as `tried` does, with the VRAM that it may fill in its reasons."""
    try:
        prepared, gpu = _prepared(technique, variants, gpu)
    except (BudgetError, GraphError, StateError) as error:  # it has nothing to offer
        return Option(technique.name, technique.exact, None, False, str(error), technique.tolerance)
    if prepared.line is not None and "umem.chainer" in prepared.line and not variants.of_chainer:
        return Option(technique.name, technique.exact, None, False, OF_CHAINER, technique.tolerance)
    replayed = prepared.trace if prepared.pooled is None else prepared.pooled
    step = variants.replays.step(replayed, gpu, prepared.mode, prefetch=prepared.prefetch)
    if prepared.pooled is not None and step.fits:
        own_peak = variants.replays.peak_bytes(prepared.trace)
        step = replace(step, cost=replace(step.cost, peak_bytes=own_peak))
    cost = _with_all_passes(step.cost, variants, prepared, gpu) if step.fits else step.cost
    option = Option(
        technique.name,
        technique.exact,
        prepared.line,
        step.fits,
        tolerance=technique.tolerance,
        **vars(cost),
    )
    if not step.fits:
        peak = variants.replays.peak_bytes(prepared.trace)
        reason = _why_not(str(step.reason), prepared, peak, gpu)
        return replace(option, reason=reason, peak_bytes=peak)
    same = plain.get(id(prepared.without_hints))
    if prepared.mode == "unmanaged":
        plain.setdefault(id(prepared.trace), Plain(technique.name, step.cost.seconds or 0.0))
    if same is None:
        return option
    return replace(option, reason=_why_idle(prepared, step.cost, same, gpu))


def _prepared(
    technique: Technique, variants: StepVariants, gpu: GpuSpec
) -> tuple[Prepared, GpuSpec]:
    """Prepare a step under a technique; return it with the GPU on which it has to fit."""
    if not technique.leaves_slack:
        return technique.prepare(variants, gpu), gpu
    room = with_slack(gpu)
    prepared = technique.prepare(variants, room)
    less = with_slack(gpu, largest_array(prepared.trace))
    return (prepared, room) if less == room else (technique.prepare(variants, less), less)


def _with_all_passes(
    cost: StepCost, variants: StepVariants, prepared: Prepared, gpu: GpuSpec
) -> StepCost:
    """Return the cost of a step with the micro-batches that its trace leaves out."""
    if prepared.less is None:
        return cost
    less, more = variants.replays.step(prepared.less, gpu, prepared.mode).cost, prepared.more
    return replace(
        cost,
        seconds=_on(cost.seconds, less.seconds, more),
        seconds_low=_on(cost.seconds_low, less.seconds_low, more),
        seconds_high=_on(cost.seconds_high, less.seconds_high, more),
        host_seconds=_on(cost.host_seconds, less.host_seconds, more),
        op_count=round(_on(cost.op_count, less.op_count, more)),
    )


def _on(now: float | None, before: float | None, more: int) -> float:
    """Extrapolate a figure to ``more`` micro-batches, from ``now`` and one micro-batch less."""
    return (now or 0) + more * ((now or 0) - (before or 0))


def _why_idle(prepared: Prepared, step: StepCost, same: Plain, gpu: GpuSpec) -> str | None:
    """Return why a technique is no better than the same trace in plain memory; None if better."""
    if not step.moved_bytes:
        if prepared.mode == "unmanaged":
            return f"its plan is that of {same.name!r}"
        return f"it moves nothing: {same.name!r} does the same"
    if step.seconds is None or step.seconds < same.seconds:
        return None
    return (
        f"{same.name!r} fits and moves nothing, and this moves {format_bytes(step.moved_bytes)}: "
        "managed memory is never full, so that its pool keeps free pieces where a plain one gives "
        f"them back, {format_bytes(step.reserved_peak_bytes)} in all for "
        f"{format_bytes(gpu.usable_bytes)} of VRAM"
    )


def _why_not(reason: str, prepared: Prepared, peak_bytes: int, gpu: GpuSpec) -> str:
    if prepared.mode != "unmanaged" or peak_bytes > gpu.usable_bytes:
        return reason
    return (
        f"its tensors need {format_bytes(peak_bytes)} of {format_bytes(gpu.usable_bytes)} of VRAM, "
        f"and the pool's free pieces are too small: {reason.partition(';')[0]}"
    )
