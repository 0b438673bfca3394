"""Steps side by side: modes as a table and as a picture, a step before and after a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich import box
from rich.table import Table

from umem.predict import ModeRow
from umem.reports.pictures.drawing import INK, QUIET, finish, new_figure
from umem.units import MIB, format_bytes, format_seconds

PLAIN, SLOW, FITS, OVER, VRAM = "#2b9c8e", "#3f74bd", "#9fbbe0", "#e28c22", "#b3261e"
OUT = "out of memory"
BOX = {"facecolor": "white", "alpha": 0.9, "linewidth": 0, "pad": 1.5}


def draw_modes(
    rows: Sequence[ModeRow],
    vram_bytes: int,
    title: str,
    file: Path | IO[bytes],
    plain_seconds: float | None = None,
) -> None:
    """Write a PNG: a bar for each mode's step time, and one step's memory below.

    Args:
        plain_seconds: the time of a step with enough VRAM, drawn as the bar to compare with.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    bars = _bars(rows, plain_seconds)
    figure = new_figure(9, 4.2 + 0.34 * len(bars))
    times, memory = figure.subplots(2, 1, height_ratios=[0.5 + 0.34 * len(bars), 2.7])
    _draw_times(times, bars, plain_seconds)
    _draw_memory(memory, _step(rows), vram_bytes)
    for panel in (times, memory):
        panel.tick_params(labelsize=9, colors=INK)
    finish(figure, title, file)


# -- how slow --------------------------------------------------------------------------------


class _Bar(NamedTuple):
    name: str
    seconds: float | None
    """None if the step did not finish."""


def _bars(rows: Sequence[ModeRow], plain_seconds: float | None) -> list[_Bar]:
    plain = [] if plain_seconds is None else [_Bar("with all of its VRAM", plain_seconds)]
    return plain + [_Bar(row.title, row.seconds if row.fits else None) for row in rows]


def _draw_times(panel: Any, bars: Sequence[_Bar], plain_seconds: float | None) -> None:
    """Draw the bars of step times."""
    longest = max((bar.seconds or 0 for bar in bars), default=0) or 1.0
    unit, factor = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    for place, bar in enumerate(bars):
        seconds = bar.seconds or 0.0
        is_plain = plain_seconds is not None and place == 0
        panel.barh(place, seconds * factor, color=PLAIN if is_plain else SLOW, height=0.68)
        panel.annotate(
            _length(bar, None if is_plain else plain_seconds),
            (seconds * factor, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=VRAM if bar.seconds is None else INK,
        )
    panel.set_yticks(range(len(bars)), [bar.name for bar in bars])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.42 * longest * factor)
    panel.set_xlabel(unit, fontsize=9, color=QUIET)
    panel.set_title("Time of a step (simulated)", loc="left", fontsize=11, color=INK)


def _length(bar: _Bar, plain_seconds: float | None) -> str:
    if bar.seconds is None:
        return OUT
    text = format_seconds(bar.seconds)
    if not plain_seconds:
        return text
    ratio = bar.seconds / plain_seconds
    return f"{text}, {ratio:.0f} times as long" if ratio >= 9.95 else f"{text}, {ratio:.1f} times"


# -- in memory ---------------------------------------------------------------------------------


class _StepCurve(NamedTuple):
    """Memory of one step: shares of its time, and the MiB allocated from then on."""

    shares: list[float]
    allocated: list[float]
    mode: str
    ends: tuple[str, str]


def _step(rows: Sequence[ModeRow]) -> _StepCurve | None:
    """Return the last step of the first mode that fits and completed one; None without timelines.

    If there is no such mode, return the whole run of the first mode with a timeline. Tensors are
    the same in every mode; their lifetimes differ, so time is in shares of the step.
    """
    whole = [row for row in rows if row.fits and row.timeline and row.step_seconds]
    row = next(iter(whole or [row for row in rows if row.timeline]), None)
    if row is None:
        return None
    ends = list(accumulate(row.step_seconds, initial=0.0))
    start, end = ends[-2:] if whole else (row.timeline[0].seconds, row.timeline[-1].seconds)
    names = ("an update ends" if start else "start", "the next ends" if start else "an update ends")
    if not whole:
        names = "start", OUT
    before = [sample for sample in row.timeline if sample.seconds <= start]
    inside = [sample for sample in row.timeline if start < sample.seconds <= end]
    samples = [*before[-1:], *inside]
    length = end - start or 1.0
    shares = [min(1.0, max(0.0, (sample.seconds - start) / length)) for sample in samples]
    allocated = [sample.allocated_bytes / MIB for sample in samples]
    return _StepCurve([*shares, 1.0], [*allocated, allocated[-1]], row.title, names)


def _draw_memory(panel: Any, step: _StepCurve | None, vram_bytes: int) -> None:
    """Draw a step's memory and the line of VRAM."""
    vram = vram_bytes / MIB
    highest = vram if step is None else max(step.allocated)
    if step is not None:
        _fill(panel, step, vram)
    if vram <= 3 * highest:
        highest = max(highest, vram)
        panel.axhline(vram, color=VRAM, linestyle="--", linewidth=1.4)
        name, place = f"VRAM, {format_bytes(vram_bytes)}", vram
    else:  # a line so high would leave the step flat
        name, place = f"VRAM, {format_bytes(vram_bytes)}, is far above", 1.04 * highest
    panel.annotate(
        name, (0, place), (5, 4), textcoords="offset points", color=VRAM, fontsize=9.5, bbox=BOX
    )
    panel.set_ylim(0, 1.18 * highest or 1)
    panel.set_xlim(0, 1)
    panel.set_xticks([0, 1], ("", "") if step is None else step.ends)
    panel.get_xticklabels()[0].set_horizontalalignment("left")
    panel.get_xticklabels()[-1].set_horizontalalignment("right")
    panel.set_ylabel("MiB", fontsize=9, color=QUIET)
    panel.set_title(_heading(step), loc="left", fontsize=11, color=INK)


def _heading(step: _StepCurve | None) -> str:
    if step is None:
        return "Memory of one step"
    if step.ends[1] == OUT:
        return f"Memory in {step.mode}, until it ran out"
    return f"Memory of one step, the same in every mode (drawn at the pace of {step.mode})"


def _fill(panel: Any, step: _StepCurve, vram: float) -> None:
    """Fill the areas that fit into VRAM and that do not, and annotate the peak."""
    low = [min(allocated, vram) for allocated in step.allocated]
    panel.fill_between(
        step.shares, low, step="post", color=FITS, linewidth=0, label="has room in VRAM"
    )
    if max(step.allocated) > vram:
        panel.fill_between(
            step.shares,
            low,
            step.allocated,
            step="post",
            color=OVER,
            linewidth=0,
            label="has none: on the host, fetched or read there when it is used",
        )
    peak = max(step.allocated)
    at = step.allocated.index(peak)
    middle = (step.shares[at] + step.shares[_last(step.allocated, peak)]) / 2
    panel.annotate(
        f"peak, {format_bytes(round(peak * MIB))}",
        (middle, peak),
        (0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=9.5,
        color=INK,
    )
    panel.legend(
        loc="upper left",
        ncols=2,
        frameon=False,
        fontsize=9,
        bbox_to_anchor=(0, -0.1),
        borderaxespad=0.4,
    )


def _last(values: Sequence[float], value: float) -> int:
    return min(len(values) - 1, len(values) - values[::-1].index(value))


# -- as a table -----------------------------------------------------------------------------------

_NEXT = {"KiB": "MiB", "MiB": "GiB", "GiB": "TiB"}


def mode_table(rows: Sequence[ModeRow], title: str, *, simulated: bool) -> Table:
    """Make a table of at most 80 columns; a dash means not run, or unknown.

    The losses are the first step's and the last's.

    Args:
        simulated: whether residency and times are a model's; the headings then say so.
    """
    step = "step\n(simul.)" if simulated else "step"
    table = Table(
        title=title, title_justify="left", box=box.HORIZONTALS, show_edge=False, padding=0
    )
    for heading in ("mode", "", "fits"):
        table.add_column(heading, no_wrap=True)
    for heading in ("peak", "peak in\nVRAM", "moved\nin", "moved\nout", "faults", step, "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: ModeRow) -> list[str]:
    """Return a mode's cells of the table."""
    return [
        row.title.replace(" + ", "\n+ "),
        row.how,
        "yes" if row.fits else "NO",
        _size(row.peak_bytes),
        _size(row.resident_peak_bytes),
        _size(row.migrated_in_bytes),
        _size(row.migrated_out_bytes),
        _count(row.fault_count),
        "-" if row.seconds is None else _time(row.seconds),
        f"{_loss(row.loss[0])}\n{_loss(row.loss[-1])}" if row.loss else "-",
    ]


def _time(seconds: float) -> str:
    """Format a time in at most eight characters a line."""
    return format_seconds(seconds).replace(" h ", " h\n").replace(" min ", " min\n")


def _count(number: int | None) -> str:
    """Format a count in at most seven characters."""
    if number is None:
        return "-"
    if number < 10**6:
        return f"{number:,}"
    return f"{number / 10**6:.1f} M" if number < 999.95e6 else f"{number:.1e}"


def _loss(loss: float) -> str:
    """Format a loss in at most five characters."""
    return f"{loss:.2f}" if abs(loss) < 99.99 else f"{loss:.0f}" if loss < 10**5 else f"{loss:.0e}"


def _size(nbytes: int | None) -> str:
    """Format a size in at most seven characters."""
    if not nbytes:
        return "-" if nbytes is None else "0"
    number, unit = format_bytes(nbytes).split()
    whole = f"{float(number):.0f}" if len(number) > 3 else number
    if len(whole) > 3 and unit in _NEXT:
        return f"1.0 {_NEXT[unit]}"
    return f"{whole} {unit}"


# -- before and after a plan ----------------------------------------------------------------------

KEPT, PLANNED, LIMIT, MEASURED = "#9aa5b1", "#2166ac", "#b2182b", "#1b7837"


def draw_steps(
    before: Sequence[int],
    after: Sequence[int],
    budget_bytes: int | None,
    measured_bytes: int | None,
    file: Path | IO[bytes],
) -> None:
    """Write a PNG of two predicted memory curves over a step's actions.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    figure = new_figure(9, 4)
    panel = figure.subplots()
    for values, color, label in (
        (before, KEPT, "plain step (predicted)"),
        (after, PLANNED, "plan (predicted)"),
    ):
        places = [index / max(1, len(values) - 1) for index in range(len(values))]
        panel.step(places, [v / MIB for v in values], where="post", color=color, label=label)
    for value, color, label in (
        (budget_bytes, LIMIT, "budget"),
        (measured_bytes, MEASURED, "peak (measured)"),
    ):
        if value is not None:
            panel.axhline(value / MIB, color=color, linestyle="--", linewidth=1, label=label)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("MiB")
    panel.set_xlabel("actions of a step, from first to last")
    panel.legend(frameon=False, fontsize=8)
    finish(figure, "Memory over a training step", file)
