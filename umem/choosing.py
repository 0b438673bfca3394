"""Which technique makes a step fit a GPU, and what it costs; everything said is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.errors import BudgetError, GraphError, StateError
from umem.limits import Size
from umem.stepping import settled_step
from umem.techniques.registry import TECHNIQUES
from umem.techniques.subject import Subject
from umem.techniques.technique import Prepared, Technique
from umem.trace import Trace, check_trace
from umem.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class Option:
    """A technique, and how a settled step would do under it; simulated.

    Attributes:
        name: the technique.
        exact: whether training gives the same bits.
        line: the code that turns it on; None: nothing is to be done.
        fits: whether the step runs. ``reason`` says why not; the figures are then None, but for
            ``peak_bytes`` where the step under the technique is known.
        seconds: of one step; ``seconds_low`` and ``seconds_high`` with the model's cost constants
            at the ends of their ranges.
        peak_bytes: the most that tensors and workspace hold at once.
        resident_peak_bytes: the most VRAM in use.
        moved_bytes: what moves over the bus in a step, both ways, reads in place included.
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
    simulated: Literal[True] = True

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
        }


@dataclass(frozen=True)
class Choice:
    """What can be done about a step on a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: what is usable of its VRAM.
        size: what the step was taken to, None where it is as it was recorded.
        options: what fits, the shortest step first.
        dropped: what does not, and what has nothing to offer, each with its reason.
        caveat: what the trace does not know, so that the real step needs more; or None.
    """

    gpu: str
    title: str
    vram_bytes: int
    size: int | None
    options: tuple[Option, ...]
    dropped: tuple[Option, ...]
    caveat: str | None = None
    simulated: Literal[True] = True

    @property
    def best(self) -> Option | None:
        """The shortest step; None where nothing fits."""
        return self.options[0] if self.options else None

    @property
    def nearest(self) -> Option | None:
        """Where nothing fits: what needs least."""
        known = [option for option in self.dropped if option.peak_bytes is not None]
        if self.options:
            return None
        return min(known, key=lambda option: option.peak_bytes or 0, default=None)

    def to_json(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "simulated": True,
            "gpu": self.gpu,
            "title": self.title,
            "vram_bytes": self.vram_bytes,
            "size": self.size,
            "caveat": self.caveat,
            "options": [option.to_json() for option in self.options],
            "dropped": [option.to_json() for option in self.dropped],
        }


def choose(
    trace: Trace, gpu: str | GpuSpec = "t4", size: int | None = None, *, vram: Size | None = None
) -> Choice:
    """Try every technique of the library on a step, and say which make it fit.

    Cost: some replays a technique, and up to a dozen plans of recomputation (bench/choose.py).

    Args:
        trace: one step or more; `umem.record_at` makes one that can be taken to any size.
        gpu: a name of the table, such as ``"v100-16gb"``.
        size: the size to choose for, such as a batch; None: as it was recorded.
        vram: usable VRAM instead of the table's figure, as an int or text.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`.
        ScalingError: ``size`` of a trace that cannot be scaled, see `Trace.at`.
        TraceError: the trace is none, or has no operation.

    >>> import umem
    >>> step = [umem.trace.Alloc(0, 4096, "input", "x", True),
    ...         umem.trace.Op("f", "forward", (umem.trace.Access(0, 0, 4096),), ())]
    >>> umem.choose(umem.Trace(step), "v100-16gb").best.name
    'nothing'
    """
    check_trace(trace)
    spec = gpu_spec(gpu)
    if vram is not None:
        spec = spec.with_vram(parse_bytes(vram, "vram"))
    return _choose(_subject(trace, size), spec, size)


def choose_each(
    trace: Trace, gpus: Iterable[str | GpuSpec] | None = None, size: int | None = None
) -> tuple[Choice, ...]:
    """`choose` for each of some GPUs, all of the table unless told otherwise.

    The GPU with the shortest step comes first, those that cannot run the step last.

    Raises:
        UnknownGpuError, SizeError, ScalingError, TraceError: see `choose`.
    """
    check_trace(trace)
    specs = [gpu_spec(gpu) for gpu in (GPUS if gpus is None else gpus)]
    subject = _subject(trace, size)
    found = [_choose(subject, spec, size) for spec in specs]
    return tuple(sorted(found, key=lambda choice: _as_shown(choice.best)))


def _subject(trace: Trace, size: int | None) -> Subject:
    return Subject(trace if size is None else trace.at(size))


def _choose(subject: Subject, gpu: GpuSpec, size: int | None) -> Choice:
    tried = [_try(technique, subject, gpu) for technique in TECHNIQUES]
    fit = sorted((option for option in tried if option.fits), key=_as_shown)
    return Choice(
        gpu=gpu.name,
        title=gpu.title,
        vram_bytes=gpu.usable_bytes,
        size=size,
        options=tuple(fit),
        dropped=tuple(option for option in tried if not option.fits),
        caveat=subject.caveat,
    )


def _as_shown(option: Option | None) -> float:
    """A step's time to three digits: below that, what is less to do goes first."""
    return inf if option is None or option.seconds is None else float(f"{option.seconds:.2e}")


def _try(technique: Technique, subject: Subject, gpu: GpuSpec) -> Option:
    try:
        prepared = technique.prepare(subject, gpu)
    except (BudgetError, GraphError, StateError) as error:  # it has nothing to offer
        return Option(technique.name, technique.exact, None, False, str(error))
    step = settled_step(prepared.trace, gpu, prepared.mode, prefetch=prepared.prefetch)
    option = Option(technique.name, technique.exact, prepared.line, step.fits)
    if not step.fits:
        peak = prepared.trace.peak_bytes
        reason = _why_not(str(step.reason), prepared, peak, gpu)
        return replace(option, reason=reason, peak_bytes=peak)
    return replace(
        option,
        seconds=step.seconds,
        seconds_low=step.seconds_low,
        seconds_high=step.seconds_high,
        peak_bytes=step.peak_bytes,
        resident_peak_bytes=step.resident_peak_bytes,
        moved_bytes=step.moved_bytes,
    )


def _why_not(reason: str, prepared: Prepared, peak_bytes: int, gpu: GpuSpec) -> str:
    vram = format_bytes(gpu.usable_bytes)
    if prepared.mode != "unmanaged":
        return reason
    if peak_bytes > gpu.usable_bytes:
        return f"it needs {format_bytes(peak_bytes)}, and {vram} of VRAM are usable"
    return (
        f"its tensors need {format_bytes(peak_bytes)} of {vram} of VRAM, and the pool's free "
        f"pieces are too small: {reason.partition(';')[0]}"
    )
