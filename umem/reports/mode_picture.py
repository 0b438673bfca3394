"""A comparison of modes as a picture: allocated and resident bytes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from umem import extras
from umem.comparing import ModeRow
from umem.errors import MissingDependencyError
from umem.units import MIB, format_seconds

ALLOCATED, RESIDENT, VRAM = "#9aa5b1", "#2166ac", "#b2182b"


def draw_modes(
    rows: Sequence[ModeRow], vram_bytes: int, title: str, file: Path | IO[bytes]
) -> None:
    """Write a PNG with one panel for each row that has a timeline.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            f"pictures need matplotlib; {extras.command('plot')}"
        ) from None
    drawn = [row for row in rows if row.timeline]
    figure = Figure(figsize=(9, 1.2 + 1.5 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), 1, sharey=True, squeeze=False)[:, 0]
    for panel, row in zip(panels, drawn, strict=True):
        _draw_row(panel, row, vram_bytes)
    highest = max(sample.allocated_bytes for row in drawn for sample in row.timeline)
    panels[0].set_ylim(0, 1.08 * max(highest, vram_bytes) / MIB)  # the panels share it
    panels[-1].set_xlabel("simulated time, seconds (each panel has its own scale)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(file, dpi=110, format="png")


def _draw_row(panel: Any, row: ModeRow, vram_bytes: int) -> None:
    seconds = [sample.seconds for sample in row.timeline]
    allocated = [sample.allocated_bytes / MIB for sample in row.timeline]
    resident = [sample.resident_bytes / MIB for sample in row.timeline]
    panel.fill_between(
        seconds, allocated, step="post", color=ALLOCATED, alpha=0.5, label="allocated", linewidth=0
    )
    panel.step(
        seconds, resident, where="post", color=RESIDENT, label="resident in VRAM", linewidth=1.2
    )
    panel.axhline(vram_bytes / MIB, color=VRAM, linestyle="--", linewidth=1, label="VRAM")
    panel.set_title(_caption(row), loc="left", fontsize=9)
    panel.set_ylabel("MiB")
    panel.set_xlim(0, seconds[-1] or 1)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _caption(row: ModeRow) -> str:
    how = "run" if row.how == "run" else "replayed"
    if not row.fits:
        return f"{row.title} ({how}): out of memory"
    step = "" if row.seconds is None else f", {format_seconds(row.seconds)} a step (simulated)"
    return f"{row.title} ({how}){step}"
