"""Shared by pictures: a figure of matplotlib, bars of times with a range, a PNG."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from umem import extras
from umem.errors import MissingDependencyError
from umem.printable import short

INK, QUIET = "#1b2130", "#5b6475"


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure with a size in inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            f"pictures need matplotlib; {extras.command('plot')}"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: Any, title: str, file: Path | IO[bytes]) -> None:
    """Add a title above the panels, remove upper and right borders, and write the PNG.

    Raises:
        OSError: the file cannot be written.
    """
    for panel in figure.axes:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=11, color=INK)
    with warnings.catch_warnings():  # a name may have letters that the font does not have
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, dpi=110, format="png")


def plain(text: str) -> str:
    """Escape and shorten text so that matplotlib does not read it as mathematics."""
    return short(text, 150).replace("$", r"\$")


# -- times, a bar each -----------------------------------------------------------------------------

BAR, RANGE, NONE = "#2166ac", "#1b2130", "#9aa5b1"
WIDE = 30
"""Times that differ by more than this factor are drawn on a logarithmic scale."""


class Bar(NamedTuple):
    """A row: a name, a text beside the bar, and a time with its range; None: no bar."""

    name: str
    note: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None


def draw_times(bars: Sequence[Bar], title: str, file: Path | IO[bytes]) -> None:
    """Write a PNG of simulated step times, a row each.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    figure = new_figure(9, 1.3 + 0.32 * max(1, len(bars)))
    panel = figure.subplots()
    scale = "; logarithmic scale" if _bars(panel, bars) else ""
    panel.set_yticks(range(len(bars)), [plain(bar.name) for bar in bars], fontsize=9)
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.set_xlabel(f"simulated seconds a step{scale}; the thin line is the model's range")
    finish(figure, title, file)


def _bars(panel: Any, bars: Sequence[Bar]) -> bool:
    """Draw the rows; on a logarithmic scale as points, because it has no zero."""
    seconds = [bar.seconds for bar in bars if bar.seconds is not None]
    ends = [bar.high or 0.0 for bar in bars if bar.seconds is not None]
    is_log = bool(seconds) and min(seconds) > 0 and max(seconds) > WIDE * min(seconds)
    if is_log:
        panel.set_xscale("log")
        room = (max(seconds) / min(seconds)) ** 0.9  # for what is written beside the last one
        panel.set_xlim(0.5 * min(seconds), room * max(ends))
    else:
        panel.set_xlim(0, 1.7 * max(ends, default=1.0) or 1.0)
    beside = {"va": "center", "fontsize": 8}
    for place, (_, note, time, low, high) in enumerate(bars):
        if time is None:
            at = panel.get_yaxis_transform()
            panel.text(0.01, place, note, transform=at, color=NONE, **beside)
            continue
        if is_log:
            panel.plot(time, place, "o", color=BAR)
        else:
            panel.barh(place, time, color=BAR, height=0.6)
        panel.hlines(place, low, high, color=RANGE, linewidth=1)
        end = (max(time, high or 0.0), place)
        panel.annotate(plain(note), end, (6, 0), textcoords="offset points", **beside)
    return is_log
