"""The answer, tables and picture of bench/oversubscribe.py: they see its rows and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import click
import common
from report_tables import Column, Row, Table, figure, listed, quantity

from umem.units import MIB, format_bytes

STYLES = (("o", 9, "-"), ("s", 7, "-"), ("^", 6, "--"), ("D", 4, ":"))
"""Marker, its size and the line of each mode: told apart where lines lie on each other."""


def answer(result: common.Result) -> str:
    said = []
    for workload, rows in _by(result["rows"], "workload").items():
        top = max(row["factor"] for row in rows)
        slower = [
            f"{figure(row['relative'])} times in {row['mode']} memory"
            for row in rows
            if row["factor"] == top and row["fits"]
        ]
        said.append(f"{listed(slower)} at factor {top:g} of `{workload}`")
    out = [row["factor"] for row in result["rows"] if not row["fits"]]
    ends = f"unmanaged memory runs out from factor {min(out):g} on" if out else "nothing runs out"
    return f"The time per byte grows to {'; '.join(said)}; {ends}."


def by_workload(result: common.Result) -> Iterator[Table]:
    """Make a table a workload: a line a factor, two columns a mode."""
    word = "simulated" if result["simulated"] else "measured"
    for workload, rows in _by(result["rows"], "workload").items():
        columns = [
            quantity("factor", "factor"),
            quantity("data", "nbytes", "MiB", per=MIB),
            quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        ]
        for mode in _modes(rows):
            columns.append(Column(mode, partial(_step, mode=mode), "ms"))
            columns.append(quantity("per byte", lambda row, mode=mode: row[mode]["relative"], "x"))
        lines = [
            {**same[0], **{row["mode"]: row for row in same}}
            for same in _by(rows, "factor").values()
        ]
        title = f"`{workload}`: time of a step ({word}), and per byte relative to the first"
        yield Table(columns, lines, title)


def _step(row: Row, mode: str) -> str:
    found = row[mode]
    return figure(1e3 * found["seconds"]) if found["fits"] else "out of memory"


def _by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """Group rows by what they hold under a key."""
    return {
        value: [row for row in rows if row[key] == value]
        for value in dict.fromkeys(row[key] for row in rows)
    }


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


def _modes(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in found))
