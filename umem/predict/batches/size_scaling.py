"""Scaling of each size of a step by a factor: its peak and time, and the cost for the model.

All of it is simulated. Sizes along which a step was recorded are scaled by `Trace.at`. Sizes that
change which operations run, such as the depth, need a trace of the scaled step, recorded apart.
Half of the precision needs no recording of its own, because types follow from the step
(`umem.predict.techniques.half_widths`).

Does not model: whether the smaller model still learns the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any, NamedTuple

from umem.devices.specs import GpuSpec
from umem.devices.virtual import VirtualGPU
from umem.errors import ScalingError, SizeError, StateError, TraceError
from umem.memory.limits import Size
from umem.predict.batches.scaled_sizes import HALF, Scaled, ScaledSizes
from umem.predict.choosing import gpu_asked_for
from umem.predict.diet_places import PlainPool
from umem.predict.techniques.micro_batches import check_splits, line
from umem.predict.techniques.step_variants import StepVariants
from umem.printable import quoted
from umem.trace.align import kinds
from umem.trace.axes import StepSize, check_size, size_text
from umem.trace.trace import Trace, check_trace
from umem.units import format_apart

BATCH, PRECISION = "batch", "precision"
COSTS = {
    BATCH: "fewer samples a gradient",
    "length": "less is seen at once; what lies farther apart is not learnt",
    "width": "another model: weights between two layers shrink by its square",
    "depth": "another model: fewer layers",
    "embedding": "another model: less is said of each word",
    PRECISION: "the same model in 16 bits with float32 masters; results are near, not the same",
}
"""The axes that always have a row, and the cost for the model of less of each, in words."""
EXAMPLES = {BATCH: (4, 8), "length": (16, 32), "width": (64, 128), "embedding": (64, 128)}
APART = ("depth",)
"""Axes that change which operations run, so that the scaled step is recorded apart."""
AGREEMENT = 0.01
"""Peaks of one step from two traces may differ by at most this share."""
BITS = 32
HALF_PRECISION = "umem.chainer.half_precision(model, optimizer)"


def scale_each(
    traces: Trace | Sequence[Trace],
    factor: float,
    gpu: str | GpuSpec = "t4",
    size: StepSize | None = None,
    *,
    scaled: Mapping[str, Trace] | None = None,
    vram: Size | None = None,
) -> ScaledSizes:
    """Return the peak and time on a GPU of a step with each of its sizes scaled in turn.

    Simulated. Cost: two replays an axis at most, three for the batch.

    Args:
        traces: the step, as `umem.record_at` makes it; or several traces of it, each over other
            axes: a grid over all of them would be many recordings. The axes ``batch``,
            ``length``, ``width``, ``depth`` and ``embedding`` always have a row, others where they
            were recorded; a size without a name is the batch.
        factor: above 0 and not 1, such as 2, or 0.5, where ``precision`` has a row, too. Sizes
            are rounded up.
        gpu: a name of the table, such as ``"v100-16gb"``.
        size: the size before scaling: a batch, or one number an axis; axes that are not named
            are at the largest recorded.
        scaled: by axis, the same step with that axis scaled, recorded apart along the other axes:
            for axes that change which operations run, ``{"depth": trace}``.
        vram: usable VRAM instead of the table's figure, as an int or text.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`; a size along an axis that no trace has;
            another factor.
        ScalingError: traces of different steps or at different sizes, an axis that was recorded
            and is given as scaled too, a smaller step that needs more than the whole.
        TraceError: no trace, or one without operations.
    """
    if not 0 < factor < inf or factor == 1:
        raise SizeError(f"a factor is a number above 0 and not 1, such as 0.5; got {factor!r}")
    spec = gpu_asked_for(gpu, vram)
    VirtualGPU(spec)  # refuses VRAM of less than a block
    found = _Steps(_listed(traces), factor, {} if scaled is None else scaled, spec, size)
    whole = found.whole
    return ScaledSizes(
        factor=factor,
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
    """The peak and time of a step in the plain memory of a GPU, and whether it fits."""

    fits: bool
    peak_bytes: int
    seconds: float


class _Steps:
    """Traces of one step, at one size, and scaled along each axis."""

    def __init__(
        self,
        traces: list[Trace],
        factor: float,
        scaled: Mapping[str, Trace],
        spec: GpuSpec,
        size: StepSize | None,
    ) -> None:
        self._traces, self._factor, self._scaled = traces, factor, scaled
        self._spec, self._asked = spec, size
        self._check_axes()
        self._subjects = [StepVariants(trace, [spec], self._size(trace)) for trace in traces]
        self.caveat = self._subjects[0].caveat
        self.whole = self._judged(self._subjects[0])
        for trace, variants in zip(traces[1:], self._subjects[1:], strict=True):
            self._check_same(trace, self._judged(variants))

    @property
    def size(self) -> StepSize | None:
        """Return the sizes of the step along all axes; a number where no axis has a name."""
        sizes = [self._size(trace) for trace in self._traces]
        if not any(isinstance(size, Mapping) for size in sizes):
            return sizes[0]
        return self._now()

    def rows(self) -> Iterator[Scaled]:
        """Yield one row an axis; precision has one if it was recorded or the factor is a half."""
        now = self._now()
        for axis in dict.fromkeys((*COSTS, *now, *self._scaled)):
            if axis != PRECISION or axis in now or self._factor == HALF:
                yield self._row(axis, now.get(axis))

    def _now(self) -> dict[str, int]:
        """Return the size before scaling of each known axis."""
        found: dict[str, int] = {}
        for trace in self._traces:
            found |= _by_axis(self._size(trace))
        return found | {a: n for a, n in _by_axis(self._asked).items() if a in self._scaled}

    # -- traces that fit together ---------------------------------------------------------------

    def _check_axes(self) -> None:
        """Check that the axes of the size and of the traces fit together.

        Raises:
            SizeError: the size has an axis that no trace has.
            ScalingError: a scaled trace was recorded along other axes than the step.
            TraceError: a scaled trace is no trace.
        """
        axes = set().union(*map(_axes, self._traces))
        for axis in self._asked if isinstance(self._asked, Mapping) else ():
            if axis not in axes | self._scaled.keys():
                known = ", ".join(map(repr, sorted(axes))) or "no axis"
                raise SizeError(f"there is no axis {quoted(axis)}: recorded along {known}")
        for axis, trace in self._scaled.items():
            check_trace(trace)
            if axis in axes:
                raise ScalingError(
                    f"{quoted(axis)} was recorded as an axis and is given as scaled too: leave "
                    "one of them out"
                )
            needed = {a for a in (BATCH,) if all(a in _axes(t) for t in self._traces)}
            if not needed <= _axes(trace) <= axes or bool(axes) != bool(trace.sizes):
                raise ScalingError(
                    f"the step with {quoted(axis)} scaled was recorded along "
                    f"{_said(_axes(trace))}, and the whole along {_said(axes)}: record both "
                    "along the same axes"
                )

    def _size(self, trace: Trace) -> StepSize | None:
        """Return the size to scale a trace to: its own axes as asked for, else the largest."""
        largest = trace.sizes[-1] if trace.sizes else None
        if self._asked is None or (largest is None and isinstance(self._asked, Mapping)):
            return largest
        if not isinstance(self._asked, Mapping):
            return self._asked
        if isinstance(largest, Mapping):
            return {axis: self._asked.get(axis, value) for axis, value in largest.items()}
        return self._asked.get(BATCH, largest)

    def _check_same(self, trace: Trace, other: _Judged) -> None:
        """Raise ScalingError unless a trace has the first one's operations, and nearly its peak."""
        first = self._traces[0]
        along = f"{_said(_axes(first))} and that along {_said(_axes(trace))}"
        if kinds(first.events) != kinds(trace.events):
            raise ScalingError(
                f"the traces are of different models: the one along {along} do not do the same. "
                'What changes the operations goes in apart: scaled={"depth": trace}'
            )
        if abs(other.peak_bytes - self.whole.peak_bytes) > AGREEMENT * self.whole.peak_bytes:
            one, two = format_apart(self.whole.peak_bytes, other.peak_bytes)
            raise ScalingError(
                f"the traces do not meet: at the size asked for the one along {along} take {one} "
                f"and {two} (simulated). What one of them was not recorded along has to be as "
                "large in it as in the other: give size= where they meet, or record anew"
            )

    # -- rows ----------------------------------------------------------------------------------

    def _row(self, axis: str, now: int | None) -> Scaled:
        """Return the row of one axis, given its size before scaling; None: unknown.

        Without figures its ``missing`` says why; only a step given as ``scaled`` raises instead.

        Raises:
            ScalingError, SizeError, StateError: of a step that is given as ``scaled``.
        """
        then = None if now is None else ceil(now * self._factor)
        costs = COSTS.get(axis, f"another size of what the step calls {quoted(axis)}")
        row = Scaled(axis, self._factor, now, then, costs if self._factor < 1 else None)
        try:
            if axis in self._scaled:
                return self._filled(self._said_fixed(row), self._apart(axis))
            if axis == PRECISION and now is None:
                return self._in_half(row)
            if now is None or then is None:
                return replace(row, missing=f"not recorded; {self._how(axis)}")
            if now == then:
                return replace(row, missing=f"it is {now}, and stays so rounded up")
            return self._along(row, then)
        except (ScalingError, SizeError, StateError) as error:
            if axis in self._scaled:
                raise
            return replace(row, missing=str(error))

    def _along(self, row: Scaled, then: int) -> Scaled:
        """Return a row with the figures of an axis scaled by `Trace.at`.

        Raises:
            ScalingError: two traces that have the axis differ by more than `AGREEMENT`.
        """
        found = [
            (variants, self._judged(StepVariants(variants.recorded, [self._spec], size)))
            for trace, variants in zip(self._traces, self._subjects, strict=True)
            if row.axis in _axes(trace)
            for size in [_with(variants.size, row.axis, then)]
        ]
        peaks = [judged.peak_bytes for _, judged in found]
        if max(peaks) - min(peaks) > AGREEMENT * max(peaks):
            one, two = format_apart(min(peaks), max(peaks))
            raise ScalingError(f"two traces disagree on it: {one} and {two}")
        filled = self._filled(row, found[0][1])
        is_part = row.axis == BATCH and self._factor < 1
        return self._in_parts(filled, found[0][0], then) if is_part else filled

    def _in_parts(self, row: Scaled, variants: StepVariants, part: int) -> Scaled:
        """Add to a row the figures of the whole batch in micro-batches, if it can be split."""
        try:
            check_splits(variants.recorded)
        except StateError:
            return row
        both = self._judged(variants.changed(micro_batch=part))
        values = {f"accumulated_{name}": value for name, value in both._asdict().items()}
        return replace(row, line=line(part), **values)

    def _in_half(self, row: Scaled) -> Scaled:
        half = self._judged(self._subjects[0].changed(half=True))
        row = replace(row, size=BITS, then=BITS // 2, line=HALF_PRECISION)
        return self._filled(row, half)

    def _apart(self, axis: str) -> _Judged:
        """Return the peak and time of a step that was recorded with an axis scaled.

        Raises:
            ScalingError: a smaller step has a larger peak, or a larger step a smaller one.
        """
        trace = self._scaled[axis]
        judged = self._judged(StepVariants(trace, [self._spec], self._size(trace)))
        ratio = judged.peak_bytes / max(1, self.whole.peak_bytes)
        if ratio > 1 + AGREEMENT if self._factor < 1 else ratio < 1 - AGREEMENT:
            one, two = format_apart(judged.peak_bytes, self.whole.peak_bytes)
            raise ScalingError(
                f"the step with {quoted(axis)} scaled takes {one}, and the step itself {two} "
                "(simulated): are they swapped, or of different sizes?"
            )
        return judged

    def _said_fixed(self, row: Scaled) -> Scaled:
        """Add to a row's costs the axes that its trace was not recorded along, which stay fixed."""
        fixed = set().union(*map(_axes, self._traces)) - _axes(self._scaled[row.axis])
        if not fixed or row.costs is None:
            return row
        return replace(row, costs=f"{row.costs}; {_said(fixed)} as it was recorded")

    def _filled(self, row: Scaled, judged: _Judged) -> Scaled:
        """Return a row with the figures of the scaled step."""
        saved = self.whole.peak_bytes - judged.peak_bytes
        share = saved / max(1, self.whole.peak_bytes)
        seconds = judged.seconds / self.whole.seconds if self.whole.seconds else 1.0
        return replace(
            row,
            saved_bytes=saved,
            saved_share=share,
            peak_factor=1 - share,
            seconds_factor=seconds,
            **judged._asdict(),
        )

    def _how(self, axis: str) -> str:
        """Return a text that says how to record the traces that a row needs."""
        is_half = self._factor == HALF
        part = "half of it" if is_half else f"{self._factor:g} times it"
        if "exported" in self._traces[0].meta:
            option = f"--halved {axis}=HALF.onnx" if is_half else f'scaled={{"{axis}": trace}}'
            return f"export the model with {part}, and give it as {option}"
        if axis in APART:
            option = f"--halved {axis}=FILE, " if is_half else ""
            return (
                f"record the step with {part}, along the same axes, and give it as "
                f'{option}scaled={{"{axis}": trace}}'
            )
        sizes = {BATCH: EXAMPLES[BATCH], axis: EXAMPLES[axis]}
        others = {a: n for a, n in self._now().items() if a != BATCH}
        at = f", at {size_text(others)}" if others else ""
        return f"umem.record_at(step, sizes={str(sizes).replace(chr(39), chr(34))}){at}"

    def _judged(self, variants: StepVariants) -> _Judged:
        place = PlainPool(self._spec, variants)
        return _Judged(*place.judged(variants, variants.prepared(""))[:3])


def _axes(trace: Trace) -> set[str]:
    """Return the axes of a trace; a size without a name is the batch."""
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
