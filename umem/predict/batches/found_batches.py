"""The batches that fit a GPU, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from umem.as_json import named
from umem.trace.axes import StepSize, size_text, without_batch
from umem.units import format_bytes, format_seconds


@dataclass(frozen=True)
class BatchStep:
    """A steady-state step with a batch that fits; simulated.

    Attributes:
        batch: the number of samples.
        peak_bytes: the most bytes of tensors and workspace; ``reserved_bytes`` the most that the
            pool reserves.
        seconds: the time of a step.
    """

    batch: int
    peak_bytes: int
    reserved_bytes: int
    seconds: float

    @property
    def seconds_per_sample(self) -> float:
        """Return the time of a step over its samples."""
        return self.seconds / self.batch

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file; simulated figures are under names that say so."""
        return named(self, ("batch", *_FIGURES), _FIGURES)


_FIGURES = ("peak_bytes", "reserved_bytes", "seconds", "seconds_per_sample")


@dataclass(frozen=True)
class FoundBatch:
    """The batches with which a step fits a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: the VRAM that the step may use.
        size: the step's sizes with the largest batch.
        largest: the step with the largest batch that fits. ``next_batch`` does not fit, for
            ``next_reason``; both are None where the maximum fits.
        quickest: the smallest batch found whose time a sample is at most 2% above the least.
        replay_count: the replays that found the largest; ``all_replay_count`` with all others.
        caveat: the memory that the trace leaves out, so that the real step needs more; or None.
        confirmed: whether a step of the largest batch ran on the device of this machine; None
            where none was tried. ``confirmation`` says where, or why not.
    """

    gpu: str
    title: str
    vram_bytes: int
    size: StepSize
    largest: BatchStep
    next_batch: int | None
    next_reason: str | None
    quickest: BatchStep
    replay_count: int
    all_replay_count: int
    caveat: str | None = None
    confirmed: bool | None = None
    confirmation: str | None = None
    simulated: Literal[True] = True

    @property
    def batch(self) -> int:
        """Return the largest batch that fits."""
        return self.largest.batch

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        others = without_batch(self.size)
        at = f", at {size_text(others)}" if others else ""
        vram = format_bytes(self.vram_bytes)
        yield f"{self.title}, {vram} of VRAM{at}; all figures are simulated."
        yield f"largest batch         {_said(self.largest)}"
        if self.next_batch is not None:
            yield f"  {self.next_batch:,} does not fit: {self.next_reason}"
        yield f"least time a sample   {_said(self.quickest)}"
        if self.caveat is not None:
            yield self.caveat
        if self.confirmation is not None:
            yield self.confirmation

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file."""
        return named(self, _JSON_FIELDS)


_JSON_FIELDS = (
    "simulated", "gpu", "title", "vram_bytes", "size", "largest", "next_batch", "next_reason",
    "quickest", "replay_count", "all_replay_count", "caveat", "confirmed", "confirmation",
)  # fmt: skip


def _said(step: BatchStep) -> str:
    each = _four_digits(step.seconds_per_sample)
    return (
        f"{step.batch:,}: {format_seconds(step.seconds)}, {each} a sample, peak "
        f"{format_bytes(step.peak_bytes)}"
    )


def _four_digits(seconds: float) -> str:
    """Format a time a sample, of which two batches differ by a few percent."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if 0 < seconds < 999.95 * factor:
            return f"{seconds / factor:#.4g} {unit}"
    return format_seconds(seconds)
