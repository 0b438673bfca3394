"""What halving each size of a step would save, as results that say themselves; all simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from umem.as_json import named
from umem.trace.axes import StepSize, size_text
from umem.units import format_apart, format_bytes, format_seconds


@dataclass(frozen=True)
class Halved:
    """A step with one of its sizes halved, on a GPU; simulated.

    Attributes:
        axis: what is halved.
        size: how large it is now; None where nobody said. Precision is in bits.
        half: the half, of odd sizes the larger one.
        peak_bytes: the most that tensors and workspace hold then.
        saved_bytes: how much less that is; ``saved_share`` of the peak now.
        fits: whether the step fits VRAM.
        seconds: the step's time; with VRAM enough where it does not fit.
        costs: what it is for the model.
        line: the code that turns it on, where it is no other model.
        accumulated_peak_bytes: of the batch, the peak of a step in two micro-batches, which has
            the gradient of the whole batch; ``accumulated_fits``, ``accumulated_seconds``.
        missing: why there are no figures, and what to record; None where there are.
    """

    axis: str
    size: int | None
    half: int | None
    costs: str
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    saved_share: float | None = None
    fits: bool | None = None
    seconds: float | None = None
    line: str | None = None
    accumulated_peak_bytes: int | None = None
    accumulated_fits: bool | None = None
    accumulated_seconds: float | None = None
    missing: str | None = None
    simulated: Literal[True] = True

    def __str__(self) -> str:
        """What it means, in a line."""
        if self.missing is not None:
            return f"{self.axis}: {self.missing}"
        said = f"{self.axis}: {self.costs}"
        return said if self.line is None else f"{said}; {self.line}{self._accumulated()}"

    def _accumulated(self) -> str:
        if self.accumulated_peak_bytes is None or self.accumulated_seconds is None:
            return ""
        peak, seconds = self.accumulated_peak_bytes, self.accumulated_seconds
        fits = "" if self.accumulated_fits else ", does not fit"
        return (
            " has the gradient of the whole batch, up to rounding: peak "
            f"{format_bytes(peak)}{fits}, {format_seconds(seconds)} a step"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file; what the model says is under names that say so."""
        return named(self, ("axis", "size", "half", "costs", "line", "missing", *_ROW), _ROW)


_ROW = (
    "peak_bytes", "saved_bytes", "saved_share", "fits", "seconds",
    "accumulated_peak_bytes", "accumulated_fits", "accumulated_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class HalvedSizes:
    """What halving each size of a step would save on a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: what is usable of its VRAM.
        size: what the step was taken to; None where nobody said at what size it was recorded.
        peak_bytes: the step's peak as it is; ``fits`` and ``seconds`` likewise.
        rows: one an axis, those without figures too.
        caveat: what the trace does not know, so that the real step needs more; or None.
    """

    gpu: str
    title: str
    vram_bytes: int
    size: StepSize | None
    peak_bytes: int
    fits: bool
    seconds: float
    rows: tuple[Halved, ...]
    caveat: str | None = None
    simulated: Literal[True] = True

    @property
    def helps(self) -> bool:
        """Tell whether the step fits, as it is or with something halved."""
        return self.fits or any(row.fits for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        vram, peak = format_bytes(self.vram_bytes), format_bytes(self.peak_bytes)
        if not self.fits and self.peak_bytes > self.vram_bytes:
            peak, vram = format_apart(self.peak_bytes, self.vram_bytes)
        at = "" if self.size is None else f" at {size_text(self.size)}"
        fits = "it fits" if self.fits else "it does not fit"
        yield f"{self.title}, {vram} of VRAM; all figures are simulated."
        yield f"Now{at}: peak {peak}, {fits}; {format_seconds(self.seconds)} a step."
        yield ""
        yield (
            f"{'halved':<10}  {'now':>7}  {'then':>7}  {'peak then':>10}  {'saved':>10}  "
            f"{'':>4}  {'fits':<4}  {'a step':>8}"
        )
        yield from map(_row_text, self.rows)
        yield ""
        yield from map(str, self.rows)
        if self.caveat is not None:
            yield f"\n{self.caveat}"

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        names = ("simulated", "gpu", "title", "vram_bytes", "size", "caveat", *_STEP, "rows")
        return named(self, names, _STEP)


_STEP = ("peak_bytes", "fits", "seconds")


def _row_text(row: Halved) -> str:
    sizes = ["" if n is None else f"{n:,}" for n in (row.size, row.half)]
    start = f"{row.axis:<10}  {sizes[0]:>7}  {sizes[1]:>7}  "
    if row.peak_bytes is None or row.saved_bytes is None or row.seconds is None:
        return f"{start}{'unknown':>10}"
    return (
        f"{start}{format_bytes(row.peak_bytes):>10}  {format_bytes(row.saved_bytes):>10}  "
        f"{row.saved_share or 0:>4.0%}  {'yes' if row.fits else 'no':<4}  "
        f"{format_seconds(row.seconds):>8}"
    )
