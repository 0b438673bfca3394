"""Results of scaling each size of a step, as text and JSON; all simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from umem.as_json import named
from umem.trace.axes import StepSize, size_text
from umem.units import format_apart, format_bytes, format_seconds

HALF = 0.5


@dataclass(frozen=True)
class Scaled:
    """A step with one of its sizes scaled, on a GPU; simulated.

    Attributes:
        axis: the size that is scaled, by ``factor``.
        size: the size before; None where unknown. Precision is in bits.
        then: the scaled size, rounded up.
        peak_bytes: the most bytes of tensors and workspace of the scaled step.
        saved_bytes: the peak before less the scaled peak, below 0 where it grows; ``saved_share``
            is over the peak before.
        peak_factor: the scaled peak over the peak before; ``seconds_factor`` likewise.
        fits: whether the scaled step fits VRAM.
        seconds: the scaled step's time; with VRAM enough where it does not fit.
        costs: the cost for the model, in words; None where the size grows.
        line: the code that turns it on, where the model stays the same.
        accumulated_peak_bytes: for a smaller batch, the peak of the whole batch in micro-batches
            of that size; ``accumulated_fits`` and ``accumulated_seconds`` likewise.
        missing: why there are no figures, and which step to record; None where there are.
    """

    axis: str
    factor: float
    size: int | None
    then: int | None
    costs: str | None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    saved_share: float | None = None
    fits: bool | None = None
    seconds: float | None = None
    peak_factor: float | None = None
    seconds_factor: float | None = None
    line: str | None = None
    accumulated_peak_bytes: int | None = None
    accumulated_fits: bool | None = None
    accumulated_seconds: float | None = None
    missing: str | None = None
    simulated: Literal[True] = True

    def __str__(self) -> str:
        """Return the row as a sentence: its cost for the model, or figures of a larger size."""
        if self.missing is not None:
            return f"{self.axis}: {self.missing}"
        if self.costs is None:
            peak, fits = format_bytes(self.peak_bytes or 0), "" if self.fits else "; does not fit"
            return (
                f"{self.axis} {_participle(self.factor)}: peak {peak}, "
                f"{self.peak_factor:.1f} times as much; time {self.seconds_factor:.1f} times as "
                f"long{fits}"
            )
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
        """Return a dict for a JSON file; simulated figures are under names that say so."""
        found = named(
            self, ("axis", "factor", "size", "then", "costs", "line", "missing", *_ROW), _ROW
        )
        return found | {"half": self.then} if self.factor == HALF else found


_ROW = (
    "peak_bytes", "saved_bytes", "saved_share", "fits", "seconds", "peak_factor", "seconds_factor",
    "accumulated_peak_bytes", "accumulated_fits", "accumulated_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class ScaledSizes:
    """A step with each of its sizes scaled in turn, on a GPU; simulated.

    Attributes:
        factor: the factor of each size.
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: its usable VRAM.
        size: the size before scaling; None where the recorded size is unknown.
        peak_bytes: the step's peak before scaling; ``fits`` and ``seconds`` likewise.
        rows: one an axis, those without figures too.
        caveat: the memory that the trace leaves out, so that the real step needs more; or None.
    """

    factor: float
    gpu: str
    title: str
    vram_bytes: int
    size: StepSize | None
    peak_bytes: int
    fits: bool
    seconds: float
    rows: tuple[Scaled, ...]
    caveat: str | None = None
    simulated: Literal[True] = True

    @property
    def helps(self) -> bool:
        """Return True if the step fits, as it is or with one size scaled."""
        return self.fits or any(row.fits for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        vram, peak = format_bytes(self.vram_bytes), format_bytes(self.peak_bytes)
        if not self.fits and self.peak_bytes > self.vram_bytes:
            peak, vram = format_apart(self.peak_bytes, self.vram_bytes)
        at = "" if self.size is None else f" at {size_text(self.size)}"
        fits = "it fits" if self.fits else "it does not fit"
        yield f"{self.title}, {vram} of VRAM; all figures are simulated."
        yield f"Now{at}: peak {peak}, {fits}; {format_seconds(self.seconds)} a step."
        yield ""
        if self.factor < 1:
            yield from self._table()
            yield ""
        yield from map(str, self.rows)
        if self.caveat is not None:
            yield f"\n{self.caveat}"

    def _table(self) -> Iterator[str]:
        yield (
            f"{_participle(self.factor):<10}  {'now':>7}  {'then':>7}  {'peak then':>10}  "
            f"{'saved':>10}  {'':>4}  {'fits':<4}  {'a step':>8}"
        )
        yield from map(_row_text, self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file."""
        names = (
            "simulated",
            "factor",
            "gpu",
            "title",
            "vram_bytes",
            "size",
            "caveat",
            *_STEP,
            "rows",
        )
        return named(self, names, _STEP)


_STEP = ("peak_bytes", "fits", "seconds")


def _participle(factor: float) -> str:
    return {HALF: "halved", 2: "doubled"}.get(factor, f"times {factor:g}")


def _row_text(row: Scaled) -> str:
    """Return a row of the table."""
    sizes = ["" if n is None else f"{n:,}" for n in (row.size, row.then)]
    start = f"{row.axis:<10}  {sizes[0]:>7}  {sizes[1]:>7}  "
    if row.peak_bytes is None or row.saved_bytes is None or row.seconds is None:
        return f"{start}{'unknown':>10}"
    return (
        f"{start}{format_bytes(row.peak_bytes):>10}  {format_bytes(row.saved_bytes):>10}  "
        f"{row.saved_share or 0:>4.0%}  {'yes' if row.fits else 'no':<4}  "
        f"{format_seconds(row.seconds):>8}"
    )
