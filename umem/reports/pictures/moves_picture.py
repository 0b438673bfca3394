"""Moves of pages over time as a picture: a band for each line that allocated memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import IO

from umem.reports.page_owners import PagePart
from umem.reports.pictures.drawing import QUIET, finish, new_figure, plain

MOST_BANDS = 12
BAND = 0.8
COLORS = {
    "in, by a fault": "#d24f61",
    "in, prefetched": "#3f74bd",
    "out": "#e28c22",
    "new": "#9aa5b1",
}


def draw_pages(
    parts: Sequence[PagePart], begun: float, title: str, seconds: str, file: IO[bytes]
) -> None:
    """Write a PNG of moves; ``seconds`` names the unit of time, which counts from ``begun``.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    moved: dict[str, int] = defaultdict(int)
    for part in parts:
        moved[part.place] += part.nbytes
    rows = sorted((place for place in moved if moved[place]), key=lambda place: -moved[place])
    bands = {place: number for number, place in enumerate(rows[:MOST_BANDS])}
    figure = new_figure(10, 1.6 + 0.55 * max(1, len(bands)))
    panel = figure.subplots()
    for name, color in COLORS.items():
        chosen = [p for p in parts if p.place in bands and p.nbytes and _name(p) == name]
        times = [p.move.seconds - begun for p in chosen]
        lows = [bands[p.place] + BAND * (p.low - 0.5) for p in chosen]
        highs = [bands[p.place] + BAND * (p.high - 0.5) for p in chosen]
        width = 1.5 if name == "out" else 4  # an operation's moves have one time
        panel.vlines(times, lows, highs, color=color, linewidth=width, label=name)
    for number in bands.values():
        panel.axhline(number + 0.5, color=QUIET, linewidth=0.3)
    panel.set_yticks(range(len(bands)), [plain(place) for place in bands], fontsize=8)
    panel.set_ylim(max(1, len(bands)) - 0.5, -0.5)
    panel.set_xlabel(seconds)
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    finish(figure, title, file)


def _name(part: PagePart) -> str:
    if part.move.way == "in":
        return "in, prefetched" if part.move.cause == "prefetch" else "in, by a fault"
    return part.move.way
