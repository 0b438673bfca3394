"""The choice of a technique that makes a step fit a GPU; all figures are simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any, Literal

from umem.as_json import named
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.devices.virtual import VirtualGPU
from umem.memory.limits import Size
from umem.predict.techniques.options import Option, Plain, tried
from umem.predict.techniques.recomputation import Schedule, schedule_of
from umem.predict.techniques.registry import TECHNIQUES
from umem.predict.techniques.step_variants import StepVariants
from umem.predict.techniques.technique import Technique
from umem.trace.axes import StepSize
from umem.trace.trace import Checker, Trace, check_trace
from umem.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Choice", "Option", "Search", "choose", "choose_each"]


@dataclass(frozen=True)
class Choice:
    """The techniques for a step on a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: its usable VRAM.
        size: the size that the step was scaled to; None where the recorded size is unknown.
        options: the techniques with which the step fits, the shortest step first.
        dropped: the techniques with which the step does not fit or that change nothing, each with
            its reason.
        caveat: the memory that the trace leaves out, so that the real step needs more; or None.
        cap_advice: the peak under `umem.chainer.workspace`, in words; None where it saves little.
    """

    gpu: str
    title: str
    vram_bytes: int
    size: StepSize | None
    options: tuple[Option, ...]
    dropped: tuple[Option, ...]
    caveat: str | None = None
    cap_advice: str | None = None
    simulated: Literal[True] = True

    @property
    def best(self) -> Option | None:
        """Return the option with the shortest step; None where nothing fits."""
        return self.options[0] if self.options else None

    @property
    def nearest(self) -> Option | None:
        """Return the option of the smallest known peak where nothing fits; None where one fits."""
        known = [option for option in self.dropped if option.peak_bytes is not None]
        if self.options:
            return None
        return min(known, key=lambda option: option.peak_bytes or 0, default=None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield a line for each technique with which the step fits, the shortest step first."""
        yield f"{self.title}, {format_bytes(self.vram_bytes)} of VRAM; all figures are simulated."
        if not self.options:
            nearest = self.nearest
            closest = (
                "" if nearest is None else f" Closest comes {nearest.name!r}: {nearest.reason}"
            )
            yield f"Nothing makes the step fit.{closest}"
        width = max((len(option.name) for option in self.options), default=0)
        for one in self.options:
            assert one.seconds is not None and one.peak_bytes is not None  # it fits
            peak = format_bytes(one.peak_bytes)
            yield f"{one.name:<{width}}  peak {peak}, a step {format_seconds(one.seconds)}"
        if self.caveat is not None:
            yield self.caveat

    def to_json(self) -> dict[str, Any]:
        """Return the choice for a JSON file."""
        return named(self, _JSON_FIELDS)


_JSON_FIELDS = (
    "simulated", "gpu", "title", "vram_bytes", "size", "caveat", "cap_advice", "options", "dropped",
)  # fmt: skip


class Search:
    """A search that tries each technique on each of some GPUs, and yields results as found.

    Plans are made once for all GPUs, and a replay serves all with the same VRAM.

    Args:
        trace, size: see `choose`.
        gpus: the GPUs, each once.

    Raises:
        ScalingError, SizeError, TraceError: see `choose`.
    """

    def __init__(self, trace: Trace, gpus: Sequence[GpuSpec], size: StepSize | None = None) -> None:
        check_trace(trace)
        self.gpus = tuple(dict.fromkeys(gpus))
        for gpu in self.gpus:
            VirtualGPU(gpu)  # refuses VRAM of less than a block
        checker = Checker()
        for event in trace.events:
            checker.check(event)
        self.size = trace.sizes[-1] if size is None and trace.sizes else size
        self._subject = StepVariants(trace, self.gpus, self.size)
        self._found: dict[GpuSpec, dict[str, Option]] = {gpu: {} for gpu in self.gpus}
        self._plain: dict[GpuSpec, dict[int, Plain]] = {gpu: {} for gpu in self.gpus}

    def found(self) -> Iterator[tuple[GpuSpec, Option]]:
        """Try every technique on every GPU, and yield each result: first the step as it is.

        Then come the GPUs by falling VRAM: a replay that has room there serves the others too.
        """
        gpus = sorted(self.gpus, key=lambda gpu: -gpu.usable_bytes)
        first, *others = TECHNIQUES
        with _rare_collections():
            for gpu in gpus:
                yield gpu, self._try(first, gpu)
            for _, same in groupby(gpus, lambda gpu: gpu.usable_bytes):
                together = tuple(same)
                for technique in others:
                    for gpu in together:
                        yield gpu, self._try(technique, gpu)
                self._subject.forget()

    def is_done(self, gpu: GpuSpec) -> bool:
        """Return True if every technique was tried on a GPU."""
        return len(self._found[gpu]) == len(TECHNIQUES)

    def tried(self, gpu: GpuSpec) -> list[Option]:
        """Return the options that were tried on a GPU so far, in the order of the techniques."""
        return list(self._found[gpu].values())

    def choice(self, gpu: GpuSpec) -> Choice:
        """Return the choice for a GPU from the options tried so far."""
        tried = self.tried(gpu)
        fit = sorted((option for option in tried if option.reason is None), key=_as_shown)
        return Choice(
            gpu=gpu.name,
            title=gpu.title,
            vram_bytes=gpu.usable_bytes,
            size=self.size,
            options=tuple(fit),
            dropped=tuple(option for option in tried if option.reason is not None),
            caveat=self._subject.caveat,
            cap_advice=self._subject.cap_advice,
        )

    def choices(self) -> tuple[Choice, ...]:
        """Return the choices of the GPUs that are done, by step time; last where nothing fits."""
        done = [self.choice(gpu) for gpu in self.gpus if self.is_done(gpu)]
        return tuple(sorted(done, key=lambda choice: _as_shown(choice.best)))

    def schedule(self, gpu: GpuSpec, names: Sequence[str]) -> Schedule:
        """Return the calls to keep and to recompute so that the step fits; see `schedule_of`."""
        return schedule_of(self._subject, gpu, names)

    def _try(self, technique: Technique, gpu: GpuSpec) -> Option:
        option = tried(technique, self._subject, gpu, self._plain[gpu])
        self._found[gpu][technique.name] = option
        return option


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Raise the garbage collector's threshold: a trace has a million tuples, none in a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def gpu_asked_for(gpu: str | GpuSpec, vram: Size | None) -> GpuSpec:
    """Return a GPU of the table, with the given usable VRAM if any.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`.
    """
    spec = gpu_spec(gpu)
    return spec if vram is None else spec.with_vram(parse_bytes(vram, "vram"))


def choose(
    trace: Trace,
    gpu: str | GpuSpec = "t4",
    size: StepSize | None = None,
    *,
    vram: Size | None = None,
) -> Choice:
    """Try every technique of the library on a step; return those with which it fits a GPU.

    The others are returned as `Choice.dropped`, each with its reason.

    Cost: some replays a technique, and up to a dozen plans of recomputation.

    Args:
        trace: one step or more; `umem.record_at` makes one that can be scaled to any size.
        gpu: a name of the table, such as ``"v100-16gb"``.
        size: the size to choose for, such as a batch, or one number an axis,
            ``{"batch": 64, "length": 512}``; None: as it was recorded, the largest of several.
        vram: usable VRAM instead of the table's figure, as an int or text.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`.
        ScalingError: ``size`` of a trace that cannot be scaled, see `Trace.at`.
        TraceError: ``trace`` is no trace, or has no operation.

    >>> import umem
    >>> step = [umem.trace.Alloc(0, 4096, "input", "x", True),
    ...         umem.trace.Op("f", "forward", (umem.trace.Access(0, 0, 4096),), ())]
    >>> umem.choose(umem.Trace(step), "v100-16gb").best.name
    'nothing'
    """
    check_trace(trace)
    spec = gpu_asked_for(gpu, vram)
    search = Search(trace, [spec], size)
    for _ in search.found():
        pass
    return search.choice(spec)


def choose_each(
    trace: Trace, gpus: Iterable[str | GpuSpec] | None = None, size: StepSize | None = None
) -> tuple[Choice, ...]:
    """Return `choose` for each of some GPUs; for all of the table if ``gpus`` is None.

    The GPU with the shortest step comes first, those that cannot run the step last.

    Raises:
        UnknownGpuError, SizeError, ScalingError, TraceError: see `choose`.
    """
    check_trace(trace)
    search = Search(trace, [gpu_spec(gpu) for gpu in (GPUS if gpus is None else gpus)], size)
    for _ in search.found():
        pass
    return search.choices()


def _as_shown(option: Option | None) -> float:
    """Return the sort key of an option: its step time to three digits, infinity without one.

    Options of equal keys stay in the order of `TECHNIQUES`, the least to do first.
    """
    return inf if option is None or option.seconds is None else float(f"{option.seconds:.2e}")
