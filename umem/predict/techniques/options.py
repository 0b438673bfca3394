"""A technique tried on a step: whether it makes it fit, and what it costs; all simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, StateError
from umem.predict.stepping import SettledStep
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared, Technique
from umem.units import format_bytes

HOST_BOUND = 0.9
"""The share of a step's time from which on the host's work is said to limit it."""


@dataclass(frozen=True)
class Option:
    """A technique, and how a settled step would do under it; simulated.

    Attributes:
        name: the technique.
        exact: whether training gives the same bits.
        line: the code that turns it on; None: nothing is to be done.
        fits: whether the step runs. The figures are None where it does not, but for
            ``peak_bytes`` where the step under the technique is known.
        reason: why it does not fit, or has nothing to offer.
        seconds: of one step; ``seconds_low`` and ``seconds_high`` with the model's cost constants
            at the ends of their ranges.
        peak_bytes: the most that tensors and workspace hold at once.
        resident_peak_bytes: the most VRAM in use.
        moved_bytes: what moves over the bus in a step, both ways, reads in place included.
        host_bytes: the host memory that it needs for what has no room in VRAM. Whether the host
            has as much, nobody asks.
        host_seconds: what the host needs to issue the ``op_count`` operations of a step.
    """

    name: str
    exact: bool
    line: str | None
    fits: bool
    reason: str | None = None
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    moved_bytes: int | None = None
    host_bytes: int | None = None
    host_seconds: float | None = None
    op_count: int | None = None
    simulated: Literal[True] = True

    @property
    def is_host_bound(self) -> bool:
        """Whether the step takes about as long as the host needs to issue it."""
        if self.seconds is None or self.host_seconds is None:
            return False
        return self.host_seconds > HOST_BOUND * self.seconds

    def to_json(self) -> dict[str, Any]:
        """For a JSON file; what the model says is under names that say so."""
        return {
            "name": self.name,
            "exact": self.exact,
            "line": self.line,
            "simulated_fits": self.fits,
            "reason": self.reason,
            "simulated_seconds": self.seconds,
            "simulated_seconds_low": self.seconds_low,
            "simulated_seconds_high": self.seconds_high,
            "simulated_peak_bytes": self.peak_bytes,
            "simulated_resident_peak_bytes": self.resident_peak_bytes,
            "simulated_moved_bytes": self.moved_bytes,
            "simulated_host_bytes": self.host_bytes,
            "simulated_host_seconds": self.host_seconds,
            "simulated_op_count": self.op_count,
        }


class Plain(NamedTuple):
    """What fits plain memory: the technique that made it, and its time."""

    name: str
    seconds: float


def tried(technique: Technique, subject: Subject, gpu: GpuSpec, plain: dict[int, Plain]) -> Option:
    """A technique on a step and a GPU.

    ``plain`` gets what fits plain memory, by its trace; what does no better is not worth a line.
    """
    try:
        prepared = technique.prepare(subject, gpu)
    except (BudgetError, GraphError, StateError) as error:  # it has nothing to offer
        return Option(technique.name, technique.exact, None, False, str(error))
    step = subject.replays.step(
        prepared.trace, gpu, prepared.mode, prefetch=prepared.prefetch, hintless=prepared.hintless
    )
    option = Option(technique.name, technique.exact, prepared.line, step.fits)
    if not step.fits:
        peak = subject.replays.peak_bytes(prepared.trace)
        reason = _why_not(str(step.reason), prepared, peak, gpu)
        return replace(option, reason=reason, peak_bytes=peak)
    same = plain.get(id(prepared.without_hints))
    if prepared.mode == "unmanaged":
        plain.setdefault(id(prepared.trace), Plain(technique.name, step.seconds))
    return replace(
        option,
        reason=None if same is None else _why_idle(prepared, step, same, gpu),
        seconds=step.seconds,
        seconds_low=step.seconds_low,
        seconds_high=step.seconds_high,
        peak_bytes=step.peak_bytes,
        resident_peak_bytes=step.resident_peak_bytes,
        moved_bytes=step.moved_bytes,
        host_bytes=step.host_bytes,
        host_seconds=step.host_seconds,
        op_count=step.op_count,
    )


def _why_idle(prepared: Prepared, step: SettledStep, same: Plain, gpu: GpuSpec) -> str | None:
    """Why a technique does no better than another with the same step in plain memory."""
    if not step.moved_bytes:
        if prepared.mode == "unmanaged":
            return f"its plan is that of {same.name!r}"
        return f"it moves nothing: {same.name!r} does the same"
    if step.seconds < same.seconds:
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
