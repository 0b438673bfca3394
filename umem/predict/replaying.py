"""Replays of a trace on a virtual GPU: times, peaks and moves, without arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from umem._common.specs import COSTS, GpuSpec, extremes, gpu_spec
from umem.devices import ADVICE, Mode, Policy, Sample, StepCost
from umem.devices.virtual import Clock, VirtualGPU
from umem.errors import HintError, OutOfMemoryError, TraceError
from umem.memory import Size, checked_request
from umem.trace import Access, Alloc, Event, Hint, Trace, check_trace
from umem.trace.analysis import missing, what_fails, why_peak
from umem.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True, repr=False)
class Replay:
    """The result of replaying a trace on a GPU; all of it simulated.

    ``fits`` is False if an allocation failed; ``reason`` is then the error's message, and
    ``figures`` and ``timeline`` end at the failure. ``seconds_low`` and ``seconds_high`` are
    ``seconds`` with every cost constant at the fast and at the slow end of its range
    (`umem._common.specs.RANGES`). ``needed_bytes`` is the peak of the whole trace, even if it does
    not fit; ``because`` names the tensors that hold most of it, or is None if the peak is 0.
    ``caveat`` warns if the trace was recorded on NumPy or leaves out memory; otherwise None.
    """

    gpu: str
    vram_bytes: int
    mode: Mode
    prefetch: bool
    fits: bool
    reason: str | None
    figures: StepCost
    timeline: tuple[Sample, ...]
    seconds_low: float
    seconds_high: float
    needed_bytes: int
    because: str | None
    caveat: str | None = None
    simulated: Literal[True] = True

    def __repr__(self) -> str:
        count = len(self.step_seconds)
        steps = f" for {count} steps" if count > 1 else ""
        found = f"{format_seconds(self.seconds)}{steps}" if self.fits else "does not fit"
        needed = f"needs {format_bytes(self.needed_bytes)} of {format_bytes(self.vram_bytes)}"
        return f"<Replay on {self.gpu}, {self.mode}: {found}, {needed}; simulated>"

    @property
    def seconds(self) -> float:
        """Return the simulated seconds of the whole trace; `step_seconds` has them by step."""
        return self.figures.seconds or 0.0

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that tensors and workspace held at once."""
        return self.figures.peak_bytes or 0

    @property
    def resident_peak_bytes(self) -> int:
        """Return the most bytes of VRAM in use, in whole blocks."""
        return self.figures.resident_peak_bytes or 0

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Return the simulated seconds of each step that ends in the trace."""
        return self.figures.step_seconds

    @property
    def migrated_bytes(self) -> int:
        """Return the bytes of the blocks that moved, in both directions."""
        return self.figures.migrated_bytes or 0

    @property
    def factor(self) -> float:
        """Return the oversubscription factor: needed bytes divided by VRAM."""
        return self.needed_bytes / self.vram_bytes


def replay(
    trace: Trace,
    gpu: str | GpuSpec,
    mode: Mode = "managed",
    vram: Size | None = None,
    *,
    prefetch: bool = False,
    limit: Size | None = None,
    spill: Literal["host", "migrate"] = "host",
    advice: Mapping[str, str] | None = None,
) -> Replay:
    """Replay a trace on the model of a GPU.

    Args:
        trace: a trace of one step or more.
        gpu: a GPU's name in the table, such as ``"v100-16gb"``.
        mode: the memory mode of all allocations.
        vram: usable VRAM instead of the table's figure, as an int or text.
        prefetch: move memory to the GPU when it is allocated.
        limit: the most bytes, as an int or text such as ``"24GiB"``.
        spill: as in `umem.hybrid`.
        advice: advice for tensors when they are allocated, by a pattern of their labels:
            ``{"SparseMatMul.matrix*": "read_mostly"}``.

    A trace that does not fit raises no error: `Replay.fits` is False. The trace is replayed once,
    as it was recorded. A loop of the step has gaps in its pool, and may need a little more. A trace
    from NumPy is replayed with NumPy's bytes; CuPy's indexes, workspace and casts may differ.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`.
        StateError: unknown mode or spill. HintError: unknown advice.
        TraceError: ``trace`` is not a trace, has no event, or uses a tensor that is not allocated
            (only if its events were written by hand).
    """
    check_trace(trace)
    checked_request(mode, None, prefetch, spill)
    for name in (advice or {}).values():
        if name not in ADVICE:
            raise HintError(f"advice must be one of {', '.join(ADVICE)}; got {name!r}")
    spec = gpu_spec(gpu)
    if not trace.events:
        raise TraceError("the trace is empty: there is no event to replay")
    device = VirtualGPU(
        spec,
        vram_bytes=None if vram is None else parse_bytes(vram, "vram"),
        backend=trace.backend,
        clocks=ranged_clocks(spec),
    )
    limit_bytes = None if limit is None else parse_bytes(limit, "limit")
    policy = Policy(mode, limit_bytes, prefetch, spill)
    try:
        reason = replay_on(device, policy, [_advised(trace.events, advice or {})])
        needed_bytes, because = trace.peak_bytes, why_peak(trace)
    except KeyError as error:  # it uses a tensor that is not allocated
        why = what_fails(trace)
        raise TraceError(f"the trace does not hold together: {why}") from error
    quick, slow = device.model.clocks[1:]
    return Replay(
        gpu=device.name,
        vram_bytes=device.vram_bytes,
        mode=mode,
        prefetch=prefetch,
        fits=reason is None,
        reason=reason,
        figures=device.figures,
        timeline=tuple(device.timeline),
        seconds_low=quick.seconds,
        seconds_high=slow.seconds,
        needed_bytes=needed_bytes,
        because=because,
        caveat=" ".join(filter(None, (_of_numpy(trace), missing(trace)))) or None,
    )


def _of_numpy(trace: Trace) -> str | None:
    """Return a sentence if a trace was recorded on NumPy; None otherwise."""
    if trace.backend != "numpy":
        return None
    return "The trace was recorded on NumPy, with NumPy's bytes; CuPy's may differ."


def ranged_clocks(gpu: GpuSpec) -> list[Clock]:
    """Return a GPU's clock at its own costs, at the fastest and at the slowest ones."""
    return [Clock(gpu, costs) for costs in (COSTS, *extremes(COSTS))]


def replay_on(
    device: VirtualGPU,
    policy: Policy,
    rounds: Iterable[Iterable[Event]],
    after_round: Callable[[], None] | None = None,
    *,
    timeline: bool = True,
) -> str | None:
    """Replay events on the model of a GPU that nothing else uses.

    Args:
        device: the model; its figures and clocks are the result.
        policy: the allocation policy.
        rounds: the events, in parts.
        after_round: called after each part.
        timeline: keep a sample after each event; False is quicker.

    Returns:
        The reason if the GPU lacks the mode or memory runs out; otherwise None.
    """
    reason = device.why_not(policy.mode)
    if reason is not None:
        return reason
    device.install(policy, everywhere=True)
    try:
        for events in rounds:
            if timeline:
                for event in events:
                    device.on_event(event)
            else:
                device.model.follow(events)
            if after_round is not None:
                after_round()
    except OutOfMemoryError as error:
        return str(error)
    finally:
        device.model.driver.residency.forget()
    return None


def _advised(events: Iterable[Event], advice: Mapping[str, str]) -> Iterator[Event]:
    """Yield the events, and after each allocation the hints for its label."""
    for event in events:
        yield event
        if isinstance(event, Alloc):
            for pattern, name in advice.items():
                if fnmatchcase(event.label, pattern):
                    yield Hint(name, (Access(event.tensor, 0, event.nbytes),), 0)
