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


@dataclass(frozen=True)
class Choice:
    """What can be done about a step on a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: what is usable of its VRAM.
        size: what the step was taken to, None where nobody said at what size it was recorded.
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
        size: the size to choose for, such as a batch; None: as it was recorded, the largest of
            several.
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
    size = _size(trace, size)
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
    size = _size(trace, size)
    subject = _subject(trace, size)
    found = [_choose(subject, spec, size) for spec in specs]
    return tuple(sorted(found, key=lambda choice: _as_shown(choice.best)))


def _size(trace: Trace, size: int | None) -> int | None:
    return trace.sizes[-1] if size is None and trace.sizes else size


def _subject(trace: Trace, size: int | None) -> Subject:
    return Subject(trace if size is None else trace.at(size))


def _choose(subject: Subject, gpu: GpuSpec, size: int | None) -> Choice:
    plain: dict[int, str] = {}
    tried = [_try(technique, subject, gpu, plain) for technique in TECHNIQUES]
    fit = sorted((option for option in tried if option.reason is None), key=_as_shown)
    return Choice(
        gpu=gpu.name,
        title=gpu.title,
        vram_bytes=gpu.usable_bytes,
        size=size,
        options=tuple(fit),
        dropped=tuple(option for option in tried if option.reason is not None),
        caveat=subject.caveat,
    )


def _as_shown(option: Option | None) -> float:
    """A step's time to three digits: below that, what is less to do goes first."""
    return inf if option is None or option.seconds is None else float(f"{option.seconds:.2e}")


def _try(technique: Technique, subject: Subject, gpu: GpuSpec, plain: dict[int, str]) -> Option:
    """``plain`` gets what fits plain memory, by its trace; the same again is not worth a line."""
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
    same = None if step.moved_bytes else plain.get(id(prepared.trace))
    if prepared.mode == "unmanaged":
        plain.setdefault(id(prepared.trace), technique.name)
    return replace(
        option,
        reason=None if same is None else _why_idle(prepared, same),
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


def _why_idle(prepared: Prepared, same: str) -> str:
    if prepared.mode == "unmanaged":
        return f"its plan is that of {same!r}"
    return f"it moves nothing: {same!r} does the same"


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
