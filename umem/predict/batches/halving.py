"""What halving each size of a step would save, and what that costs in the model; simulated.

Sizes along which a step was recorded are halved by `Trace.at`. What changes which operations there
are, such as the depth, is recorded apart: a trace of the step with half of it. Precision needs no
recording of its own, because types follow from the step (`umem.predict.techniques.half_widths`).

Does not model: whether the smaller model still learns the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from umem.devices.specs import GpuSpec
from umem.devices.virtual import VirtualGPU
from umem.errors import ScalingError, SizeError, StateError, TraceError
from umem.memory.limits import Size
from umem.predict.batches.halved_sizes import Halved, HalvedSizes
from umem.predict.choosing import gpu_asked_for
from umem.predict.diet_places import PlainPool
from umem.predict.techniques.micro_batches import check_splits, line
from umem.predict.techniques.subject import Subject
from umem.printable import quoted
from umem.trace.align import kinds
from umem.trace.axes import StepSize, check_size, size_text
from umem.trace.trace import Trace, check_trace
from umem.units import format_apart

BATCH, PRECISION = "batch", "precision"
COSTS = {
    BATCH: "fewer samples a gradient",
    "length": "half as much is seen at once; what lies farther apart is not learnt",
    "width": "another model: weights between two layers are a quarter",
    "depth": "another model: half of the layers",
    "embedding": "another model: half of what is said of each word",
    PRECISION: "the same model in 16 bits with float32 masters; results are near, not the same",
}
"""The axes that are always spoken of, and what half of each is for the model."""
EXAMPLES = {BATCH: (4, 8), "length": (16, 32), "width": (64, 128), "embedding": (64, 128)}
APART = ("depth",)
"""Axes along which operations come and go, so that half is recorded apart."""
AGREEMENT = 0.01
"""How far peaks of one step from two traces may be apart, as a share."""
BITS = 32
HALF_PRECISION = "umem.chainer.half_precision(model, optimizer)"


def halve_each(
    traces: Trace | Sequence[Trace],
    gpu: str | GpuSpec = "t4",
    size: StepSize | None = None,
    *,
    halved: Mapping[str, Trace] | None = None,
    vram: Size | None = None,
) -> HalvedSizes:
    """Say what half of each size of a step would save on a GPU, and what it is for the model.

    Simulated. Cost: two replays an axis at most, three for the batch.

    Args:
        traces: the step, as `umem.record_at` makes it; or several traces of it, each over other
            axes: a grid over all of them would be many recordings. The axes ``batch``,
            ``length``, ``width``, ``depth``, ``embedding`` and ``precision`` are spoken of
            always, others where they were recorded; a size without a name is the batch.
        gpu: a name of the table, such as ``"v100-16gb"``.
        size: what the step is taken to: a batch, or one number an axis; axes that are not named
            are at the largest recorded.
        halved: by axis, the same step with half of it, recorded apart along the same axes: for
            what changes which operations there are, ``{"depth": trace}``.
        vram: usable VRAM instead of the table's figure, as an int or text.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`; a size along an axis that no trace has.
        ScalingError: traces of different steps or at different sizes, an axis that was recorded
            and is given as halved too, a halved step that needs more than the whole.
        TraceError: no trace, or one without operations.
    """
    spec = gpu_asked_for(gpu, vram)
    VirtualGPU(spec)  # refuses VRAM of less than a block
    found = _Steps(_listed(traces), {} if halved is None else halved, spec, size)
    whole = found.whole
    return HalvedSizes(
        gpu=spec.name,
        title=spec.title,
        vram_bytes=spec.usable_bytes,
        size=found.size,
        peak_bytes=whole.peak_bytes,
        fits=whole.fits,
        seconds=whole.seconds,
        rows=tuple(found.rows()),
        caveat=found.caveat,
    )


def _listed(traces: object) -> list[Trace]:
    found: list[Any] = list(traces) if isinstance(traces, (list, tuple)) else [traces]
    if not found:
        raise TraceError("a trace is needed, such as umem.record_at makes one; got none")
    for trace in found:
        check_trace(trace)
    return found


class _Judged(NamedTuple):
    """What a step takes in the plain memory of a GPU."""

    fits: bool
    peak_bytes: int
    seconds: float


class _Steps:
    """Traces of one step, taken to one size, and to half of it along each axis."""

    def __init__(
        self, traces: list[Trace], halved: Mapping[str, Trace], spec: GpuSpec, size: StepSize | None
    ) -> None:
        self._traces, self._halved, self._spec, self._asked = traces, halved, spec, size
        self._check_axes()
        self._subjects = [Subject(trace, [spec], self._size(trace)) for trace in traces]
        self.caveat = self._subjects[0].caveat
        self.whole = self._judged(self._subjects[0])
        for trace, subject in zip(traces[1:], self._subjects[1:], strict=True):
            self._check_same(trace, self._judged(subject))

    @property
    def size(self) -> StepSize | None:
        """What the step is taken to along all axes; a number where no axis has a name."""
        sizes = [self._size(trace) for trace in self._traces]
        if not any(isinstance(size, Mapping) for size in sizes):
            return sizes[0]
        return self._now()

    def rows(self) -> Iterator[Halved]:
        """A row an axis."""
        now = self._now()
        for axis in dict.fromkeys((*COSTS, *now, *self._halved)):
            yield self._row(axis, now.get(axis))

    def _now(self) -> dict[str, int]:
        """How large each axis is that anything is known of."""
        found: dict[str, int] = {}
        for trace in self._traces:
            found |= _by_axis(self._size(trace))
        return found | {a: n for a, n in _by_axis(self._asked).items() if a in self._halved}

    # -- what goes together --------------------------------------------------------------------

    def _check_axes(self) -> None:
        axes = set().union(*map(_axes, self._traces))
        for axis in self._asked if isinstance(self._asked, Mapping) else ():
            if axis not in axes | self._halved.keys():
                known = ", ".join(map(repr, sorted(axes))) or "no axis"
                raise SizeError(f"there is no axis {quoted(axis)}: recorded along {known}")
        for axis, trace in self._halved.items():
            check_trace(trace)
            if axis in axes:
                raise ScalingError(
                    f"{quoted(axis)} was recorded as an axis and is given as halved too: leave "
                    "one of them out"
                )
            needed = {a for a in (BATCH,) if all(a in _axes(t) for t in self._traces)}
            if not needed <= _axes(trace) <= axes or bool(axes) != bool(trace.sizes):
                raise ScalingError(
                    f"the step with half of {quoted(axis)} was recorded along "
                    f"{_said(_axes(trace))}, and the whole along {_said(axes)}: record both "
                    "along the same axes"
                )

    def _size(self, trace: Trace) -> StepSize | None:
        """What a trace is taken to: of what was asked the axes that it has."""
        largest = trace.sizes[-1] if trace.sizes else None
        if self._asked is None or (largest is None and isinstance(self._asked, Mapping)):
            return largest
        if not isinstance(self._asked, Mapping):
            return self._asked
        if isinstance(largest, Mapping):
            return {axis: self._asked.get(axis, value) for axis, value in largest.items()}
        return self._asked.get(BATCH, largest)

    def _check_same(self, trace: Trace, other: _Judged) -> None:
        """See that another trace is one of the same step, at the same size."""
        first = self._traces[0]
        along = f"{_said(_axes(first))} and that along {_said(_axes(trace))}"
        if kinds(first.events) != kinds(trace.events):
            raise ScalingError(
                f"the traces are of different models: the one along {along} do not do the same. "
                'Half of what changes the operations goes in apart: halved={"depth": trace}'
            )
        if abs(other.peak_bytes - self.whole.peak_bytes) > AGREEMENT * self.whole.peak_bytes:
            one, two = format_apart(self.whole.peak_bytes, other.peak_bytes)
            raise ScalingError(
                f"the traces do not meet: at the size asked for the one along {along} take {one} "
                f"and {two} (simulated). What one of them was not recorded along has to be as "
                "large in it as in the other: give size= where they meet, or record anew"
            )

    # -- rows ----------------------------------------------------------------------------------

    def _row(self, axis: str, now: int | None) -> Halved:
        half = None if now is None else -(-now // 2)
        costs = COSTS.get(axis, f"another size of what the step calls {quoted(axis)}")
        row = Halved(axis, now, half, costs)
        try:
            if axis in self._halved:
                return self._filled(self._said_fixed(row), self._apart(axis))
            if axis == PRECISION and now is None:
                return self._in_half(row)
            if now is None or half is None:
                return replace(row, missing=f"not recorded; {self._how(axis)}")
            if now == 1:
                return replace(row, missing="it is 1, and has no half")
            return self._along(row, half)
        except (ScalingError, SizeError, StateError) as error:
            if axis in self._halved:
                raise
            return replace(row, missing=str(error))

    def _along(self, row: Halved, half: int) -> Halved:
        """Half of an axis, by each trace that has it; they have to agree."""
        found = [
            (subject, self._judged(Subject(subject.recorded, [self._spec], size)))
            for trace, subject in zip(self._traces, self._subjects, strict=True)
            if row.axis in _axes(trace)
            for size in [_with(subject.size, row.axis, half)]
        ]
        peaks = [judged.peak_bytes for _, judged in found]
        if max(peaks) - min(peaks) > AGREEMENT * max(peaks):
            one, two = format_apart(min(peaks), max(peaks))
            raise ScalingError(f"two traces disagree on half of it: {one} and {two}")
        filled = self._filled(row, found[0][1])
        return self._in_two(filled, found[0][0], half) if row.axis == BATCH else filled

    def _in_two(self, row: Halved, subject: Subject, half: int) -> Halved:
        """The whole batch in two micro-batches, where it can be split."""
        try:
            check_splits(subject.recorded)
        except StateError:
            return row
        both = self._judged(subject.changed(micro_batch=half))
        values = {f"accumulated_{name}": value for name, value in both._asdict().items()}
        return replace(row, line=line(half), **values)

    def _in_half(self, row: Halved) -> Halved:
        half = self._judged(self._subjects[0].changed(half=True))
        row = replace(row, size=BITS, half=BITS // 2, line=HALF_PRECISION)
        return self._filled(row, half)

    def _apart(self, axis: str) -> _Judged:
        trace = self._halved[axis]
        judged = self._judged(Subject(trace, [self._spec], self._size(trace)))
        if judged.peak_bytes > (1 + AGREEMENT) * self.whole.peak_bytes:
            one, two = format_apart(judged.peak_bytes, self.whole.peak_bytes)
            raise ScalingError(
                f"the step with half of {quoted(axis)} takes {one}, and the whole {two} "
                "(simulated): are they swapped, or of different sizes?"
            )
        return judged

    def _said_fixed(self, row: Halved) -> Halved:
        """Say what nobody can check: how large half of it was recorded along other axes."""
        fixed = set().union(*map(_axes, self._traces)) - _axes(self._halved[row.axis])
        if not fixed:
            return row
        return replace(row, costs=f"{row.costs}; {_said(fixed)} as it was recorded")

    def _filled(self, row: Halved, judged: _Judged) -> Halved:
        saved = self.whole.peak_bytes - judged.peak_bytes
        share = saved / max(1, self.whole.peak_bytes)
        return replace(row, saved_bytes=saved, saved_share=share, **judged._asdict())

    def _how(self, axis: str) -> str:
        """How to record what a row needs."""
        if "exported" in self._traces[0].meta:
            return f"export the model with half of it, and give it as --halved {axis}=HALF.onnx"
        if axis in APART:
            return (
                "record the step with half of it, along the same axes, and give it as "
                f'--halved {axis}=FILE, halved={{"{axis}": trace}}'
            )
        sizes = {BATCH: EXAMPLES[BATCH], axis: EXAMPLES[axis]}
        others = {a: n for a, n in self._now().items() if a != BATCH}
        at = f", at {size_text(others)}" if others else ""
        return f"umem.record_at(step, sizes={str(sizes).replace(chr(39), chr(34))}){at}"

    def _judged(self, subject: Subject) -> _Judged:
        place = PlainPool(self._spec, subject)
        return _Judged(*place.judged(subject, subject.prepared(""))[:3])


def _axes(trace: Trace) -> set[str]:
    """The axes of a trace; a size without a name is the batch."""
    return set(trace.axes) or ({BATCH} if trace.sizes else set())


def _said(axes: Iterable[str]) -> str:
    return " and ".join(map(repr, sorted(axes))) or "no axis"


def _by_axis(size: StepSize | None) -> dict[str, int]:
    if size is None:
        return {}
    if isinstance(size, Mapping):
        return {**size}
    check_size(size)
    return {BATCH: size}


def _with(size: StepSize | None, axis: str, value: int) -> StepSize:
    return {**size, axis: value} if isinstance(size, Mapping) else value
