"""Step times of techniques, or of GPUs, as a picture; all of them simulated."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from umem import extras
from umem.errors import MissingDependencyError
from umem.predict.choosing import Choice, Option
from umem.printable import shown
from umem.units import format_bytes, format_seconds

BAR, RANGE, NONE = "#2166ac", "#1b2130", "#9aa5b1"
WIDE = 30
"""Times that differ by more than this factor are drawn on a logarithmic scale."""


class _Row(NamedTuple):
    """A row: its name, what is written beside it, and the option that is drawn, if any."""

    name: str
    note: str
    option: Option | None


def draw_choice(choice: Choice, file: Path | IO[bytes]) -> None:
    """Write a PNG of the techniques that make a step fit a GPU.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    bars = [_Row(option.name, _note(option), option) for option in choice.options]
    vram = format_bytes(choice.vram_bytes)
    _draw(bars, f"Step time on a simulated {choice.title}, {vram} usable{_at(choice)}", file)


def draw_gpus(choices: Sequence[Choice], file: Path | IO[bytes]) -> None:
    """Write a PNG of the GPUs that run a step, each with its best technique; see `draw_choice`."""
    bars = [
        _Row(choice.gpu, _note(choice.best, _with(choice.best)), choice.best)
        if choice.best
        else _Row(choice.gpu, "cannot run it", None)
        for choice in choices
    ]
    _draw(bars, f"Step time on each GPU, simulated{_at(choices[0])}", file)


def _at(choice: Choice) -> str:
    return "" if choice.size is None else f", at size {choice.size}"


def _with(option: Option) -> str:
    return "as it is" if option.line is None else f"with {option.name}"


def _note(option: Option, how: str | None = None) -> str:
    said = f"{format_seconds(option.seconds)}, peak {format_bytes(option.peak_bytes)}"
    if option.host_bytes:
        said += f", {format_bytes(option.host_bytes)} on the host"
    return said if how is None else f"{said}, {how}"


def _draw(bars: Sequence[_Row], title: str, file: Path | IO[bytes]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            f"pictures need matplotlib; {extras.command('plot')}"
        ) from None
    figure = Figure(figsize=(9, 1.3 + 0.32 * max(1, len(bars))), layout="constrained")
    panel = figure.subplots()
    scale = "; logarithmic scale" if _bars(panel, bars) else ""
    panel.set_yticks(range(len(bars)), [_plain(bar.name) for bar in bars], fontsize=9)
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.set_xlabel(f"simulated seconds a step{scale}; the thin line is the model's range")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=11)
    with warnings.catch_warnings():  # a name may have letters that the font does not have
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, dpi=110, format="png")


def _bars(panel: Any, bars: Sequence[_Row]) -> bool:
    """Draw the rows; whether on a logarithmic scale, as points because that has no zero."""
    drawn = [bar.option for bar in bars if bar.option is not None]
    seconds = [option.seconds or 0.0 for option in drawn]
    ends = [option.seconds_high or 0.0 for option in drawn]
    is_log = bool(seconds) and min(seconds) > 0 and max(seconds) > WIDE * min(seconds)
    if is_log:
        panel.set_xscale("log")
        room = (max(seconds) / min(seconds)) ** 0.9  # for what is written beside the last one
        panel.set_xlim(0.5 * min(seconds), room * max(ends))
    else:
        panel.set_xlim(0, 1.7 * max(ends, default=1.0) or 1.0)
    for place, (_, note, option) in enumerate(bars):
        if option is None:
            panel.text(
                0.01,
                place,
                note,
                transform=panel.get_yaxis_transform(),
                va="center",
                fontsize=8,
                color=NONE,
            )
            continue
        if is_log:
            panel.plot(option.seconds, place, "o", color=BAR)
        else:
            panel.barh(place, option.seconds, color=BAR, height=0.6)
        panel.hlines(place, option.seconds_low, option.seconds_high, color=RANGE, linewidth=1)
        at = max(option.seconds or 0.0, option.seconds_high or 0.0)
        panel.annotate(
            _plain(note), (at, place), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    return is_log


def _plain(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return shown(text, 150).replace("$", r"\$")
