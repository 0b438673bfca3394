"""Memory over a trace as a picture: bytes of each kind, the peak, the VRAM, the operations."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from umem.reports.outputs import ReportRequest
from umem.reports.pictures.drawing import INK, QUIET, finish, new_figure, plain
from umem.trace.analysis import KINDS, Analysis, Vram, kind_curves, thinned
from umem.units import GIB, KIB, MIB, format_bytes, format_seconds

COLORS = dict(zip(KINDS, (
    "#3f74bd", "#7d62bd", "#a79bbd", "#2b9c8e", "#6f8ea1", "#e28c22", "#e8c768", "#d24f61",
    "#8f9bb0",
), strict=True))  # fmt: skip
VRAM = "#b3261e"
POINTS = 2000
"""The curves have at most this many columns, each the maximum of its stretch."""
BARS = 8


def draw_timeline(
    analysis: Analysis, name: str, file: Path | IO[bytes], vram: Vram | None = None
) -> None:
    """Write a PNG: the timeline, the peak by kind, and the operations by time.

    Raises:
        MissingDependencyError: matplotlib is not installed. OSError: the file cannot be written.
    """
    figure = new_figure(10, 6.4)
    panels: Any = figure.subplot_mosaic(
        [["time", "time"], ["kinds", "ops"]], height_ratios=[2.2, 1]
    )
    _timeline(panels["time"], analysis, vram)
    _kinds(panels["kinds"], analysis)
    _ops(panels["ops"], analysis)
    for panel in panels.values():
        panel.tick_params(labelsize=8)
    finish(figure, _title(analysis, name), file)


def write(request: ReportRequest, file: IO[bytes]) -> None:
    """Write the requested picture; see `draw_timeline`."""
    draw_timeline(request.analysis, request.name, file, request.vram)


def _title(analysis: Analysis, name: str) -> str:
    title = f"{name}: peak {format_bytes(analysis.peak.total_bytes)}"
    if analysis.seconds_per_step is not None:
        title += f", {format_seconds(analysis.seconds_per_step)} of host time a step"
    return title


def _unit(nbytes: int) -> tuple[str, int]:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= 2 * factor:
            return unit, factor
    return "bytes", 1


# -- the timeline ------------------------------------------------------------------------------


def _timeline(panel: Any, analysis: Analysis, vram: Vram | None) -> None:
    """Draw memory over events, with steps, peak and VRAM."""
    peak = analysis.peak
    unit, factor = _unit(peak.total_bytes)
    _bands(panel, analysis, factor)
    for step in analysis.reading.steps:
        panel.axvline(step, color=QUIET, linewidth=0.7, alpha=0.6)
    panel.plot([peak.event], [peak.total_bytes / factor], "o", color=INK, markersize=5)
    late = peak.event > 0.7 * len(analysis.trace)
    panel.annotate(
        f"peak {format_bytes(peak.total_bytes)}",
        (peak.event, peak.total_bytes / factor),
        (-8 if late else 8, -3),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5},
    )
    high = max(1, peak.total_bytes)
    if vram is not None and vram.nbytes < 2 * high:
        high = max(high, vram.nbytes)
        panel.axhline(vram.nbytes / factor, color=VRAM, linestyle="--", linewidth=1.2)
        panel.annotate(
            f"VRAM of {plain(vram.gpu)}",
            (0, vram.nbytes / factor),
            (4, 4),
            color=VRAM,
            textcoords="offset points",
        )
    panel.set_ylim(0, 1.1 * high / factor)
    panel.set_xlim(0, max(1, len(analysis.trace)))
    panel.set_ylabel(unit)
    panel.set_xlabel("events; a line is the end of a step")


def _bands(panel: Any, analysis: Analysis, factor: int) -> None:
    """Draw the bytes of each kind, stacked."""
    places = thinned(analysis.reading.total, POINTS)
    curves = kind_curves(analysis.reading)
    if not curves or not len(places):
        return
    panel.stackplot(
        places,
        *(curve[places] / factor for curve in curves.values()),
        step="post",
        linewidth=0,
        colors=[COLORS[kind] for kind in curves],
    )


# -- below the timeline ------------------------------------------------------------------------


def _kinds(panel: Any, analysis: Analysis) -> None:
    """Draw the bytes alive at the peak by kind."""
    kinds = analysis.peak.by_kind[::-1]
    unit, factor = _unit(analysis.peak.total_bytes)
    panel.barh(
        [kind.kind for kind in kinds],
        [kind.total_bytes / factor for kind in kinds],
        color=[COLORS[kind.kind] for kind in kinds],
    )
    panel.set_title("alive at the peak", loc="left", fontsize=9)
    panel.set_xlabel(unit)


def _ops(panel: Any, analysis: Analysis) -> None:
    """Draw the operations by time, or by bytes without times."""
    timed = analysis.seconds is not None
    ops = (analysis.ops_by_seconds() if timed else analysis.ops_by_bytes())[:BARS][::-1]
    unit, factor = _unit(max((op.allocated_bytes for op in ops), default=0))
    values = [(op.seconds or 0) if timed else op.allocated_bytes / factor for op in ops]
    panel.barh(range(len(ops)), values, color=QUIET)
    names = [plain(f"{op.name}, {op.phase}") for op in ops]
    panel.set_yticks(range(len(ops)), [n if len(n) <= 36 else n[:34] + ".." for n in names])
    panel.set_title(
        "operations by host time" if timed else "operations by bytes allocated",
        loc="left",
        fontsize=9,
    )
    panel.set_xlabel("seconds" if timed else unit)
