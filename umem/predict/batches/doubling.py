"""What it costs to double each size of a step; everything said is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from umem.as_json import named
from umem.devices.specs import GpuSpec
from umem.memory.limits import Size
from umem.predict.choosing import gpu_asked_for
from umem.predict.replaying import Replay, replay
from umem.trace.axes import StepSize
from umem.trace.trace import Trace, check_trace
from umem.units import format_bytes

ROOM = 4
"""VRAM, in steps' peaks, in which the time of a step is found that does not fit."""


@dataclass(frozen=True)
class Doubled:
    """A step with one of its sizes doubled, on a GPU; simulated.

    Attributes:
        axis: the name of the size that is doubled; None where it has none.
        size: the sizes then.
        fits: whether the step fits VRAM.
        peak_bytes: the most that tensors and workspace hold.
        seconds: the step's time; with VRAM enough where it does not fit.
        peak_factor: the peak over that of the step as it was; ``seconds_factor`` likewise.
    """

    axis: str | None
    size: StepSize
    fits: bool
    peak_bytes: int
    seconds: float
    peak_factor: float
    seconds_factor: float
    simulated: Literal[True] = True

    def __str__(self) -> str:
        what = "the size" if self.axis is None else self.axis
        return (
            f"{what} doubled: peak {format_bytes(self.peak_bytes)}, {self.peak_factor:.1f} times "
            f"as much; time {self.seconds_factor:.1f} times as long"
            f"{'' if self.fits else '; does not fit'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file; what the model says is under names that say so."""
        return named(self, ("axis", "size", *_FIGURES), _FIGURES)


_FIGURES = ("fits", "peak_bytes", "seconds", "peak_factor", "seconds_factor")


def double_each(
    trace: Trace,
    gpu: str | GpuSpec = "t4",
    size: StepSize | None = None,
    *,
    vram: Size | None = None,
) -> tuple[Doubled, ...]:
    """Say what doubling each size of a step would do to its peak and its time on a GPU; simulated.

    Cost: two replays a size at most.

    Args:
        trace: of several sizes, as `umem.record_at` makes one.
        gpu: a name of the table, such as ``"v100-16gb"``.
        size: from where, such as a batch, or one number an axis; None: the largest recorded.
        vram: usable VRAM instead of the table's figure, as an int or text.

    Raises:
        UnknownGpuError: see `umem.virtual_gpu`. ScalingError, SizeError: see `Trace.at`.
    """
    check_trace(trace)
    if not trace.sizes:
        trace.at(1)  # raises, and says how to record at several sizes
    spec = gpu_asked_for(gpu, vram)
    start: StepSize = trace.sizes[-1] if size is None else size
    before = _roomy(trace, spec, start)
    return tuple(_doubled(trace, spec, axis, larger, before) for axis, larger in _doublings(start))


def _doublings(size: StepSize) -> Iterator[tuple[str | None, StepSize]]:
    if not isinstance(size, Mapping):
        yield None, 2 * size
        return
    for axis, value in size.items():
        yield axis, {**size, axis: 2 * value}


def _doubled(
    trace: Trace, spec: GpuSpec, axis: str | None, size: StepSize, before: Replay
) -> Doubled:
    found = replay(trace, spec, "unmanaged", size=size)
    timed = found if found.fits else _roomy(trace, spec, size)
    return Doubled(
        axis=axis,
        size=size,
        fits=found.fits,
        peak_bytes=timed.needed_bytes,
        seconds=timed.seconds,
        peak_factor=timed.needed_bytes / max(1, before.needed_bytes),
        seconds_factor=timed.seconds / before.seconds if before.seconds else 1.0,
    )


def _roomy(trace: Trace, spec: GpuSpec, size: StepSize) -> Replay:
    """A replay with VRAM enough, for its time."""
    room = max(spec.usable_bytes, ROOM * trace.at(size).peak_bytes)
    return replay(trace, spec.with_vram(room), "unmanaged", size=size)
