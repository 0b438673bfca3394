"""The table and the picture of bench/oversubscribe.py: they see its rows and nothing else."""

from __future__ import annotations

from typing import Any

import click
import common

from umem.units import format_bytes, format_seconds

STYLES = (("o", 9, "-"), ("s", 7, "-"), ("^", 6, "--"), ("D", 4, ":"))
"""Marker, its size and the line of each mode: told apart where lines lie on each other."""


def show(found: list[dict[str, Any]], name: str, simulated: bool) -> None:
    """One table a workload: a line a factor, a column a mode."""
    word = "simulated" if simulated else "measured"
    for workload in dict.fromkeys(row["workload"] for row in found):
        lines: dict[float, list[Any]] = {}
        for row in found:
            if row["workload"] == workload:
                line = lines.setdefault(row["factor"], [f"{row['factor']:g}"])
                if not line[1:]:
                    line += [format_bytes(row["nbytes"]), format_bytes(row["vram_bytes"])]
                line.append(_cell(row))
        title = f"{workload} on {name}: time of a step ({word}), and per byte relative to the first"
        common.show(title, ("factor", "data", "VRAM", *_modes(found)), lines.values())


def _cell(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "out of memory"
    return f"{format_seconds(row['seconds'])}  {row['relative']:.2f}x"


def plot(found: list[dict[str, Any]], name: str, simulated: bool, path: str) -> None:
    """Relative time a byte against the factor, one panel a workload, one line a mode."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib, which is not installed; pip install matplotlib"
        ) from None
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    figure = Figure(figsize=(5.2 * len(workloads), 4.4), layout="constrained")
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        _panel(panel, workload, [row for row in found if row["workload"] == workload])
    panels[0].set_ylabel("time per byte, relative to the smallest factor")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(STYLES), frameon=False)
    word = "simulated" if simulated else "measured"
    figure.suptitle(f"As data outgrow VRAM: {name} ({word})")
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _panel(panel: Any, workload: str, found: list[dict[str, Any]]) -> None:
    for mode, (marker, size, line) in zip(_modes(found), STYLES, strict=True):
        own = [row for row in found if row["mode"] == mode and row["fits"]]
        label = mode
        if any(row["mode"] == mode and not row["fits"] for row in found):
            label += " (then out of memory)"
        panel.plot(
            [row["factor"] for row in own],
            [row["relative"] for row in own],
            label=label,
            marker=marker,
            markersize=size,
            linestyle=line,
            linewidth=1.6,
            markerfacecolor="none",
        )
    panel.axvline(1, color="0.6", linewidth=1, zorder=0)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    kept = "vram_bytes" if workload == "tensors" else "nbytes"
    what = "VRAM" if workload == "tensors" else "data"
    panel.set_title(f"{workload} ({what}: {format_bytes(found[0][kept])})")
    panel.set_xlabel("oversubscription factor (data over VRAM)")
    panel.grid(axis="y", color="0.9")
    panel.spines[["top", "right"]].set_visible(False)


def _modes(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in found))
