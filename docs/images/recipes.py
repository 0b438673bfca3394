"""Makes recipe-*.png: each way's time in docs/how-to/recipes.md as data outgrows VRAM.

The times are those of bench/results/recipes.json, of the sizes that the page was written from.
Needs matplotlib. Run it from the repository's root: python docs/images/recipes.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from umem.reports import finish, new_figure
from umem.units import MIB

HERE = Path(__file__).resolve().parent
RESULT = HERE.parents[1] / "bench" / "results" / "recipes.json"
GPU = "t4"
STYLES = {
    "blocks": ("#2166ac", "o", "-"),
    "managed": ("#b3261e", "s", "-"),
    "managed, hint": ("#d08a2e", "^", "--"),
    "hybrid": ("#2b7a4b", "D", ":"),
}
"""Color, marker and line of each way."""


def file_name(program: str) -> str:
    """Return the name of a recipe's picture."""
    return f"recipe-{program.replace(' ', '-').lower()}.png"


def draw(rows: list[dict[str, Any]], vram_mib: int, path: Path) -> None:
    """Draw the times of one recipe on one GPU, a line a way."""
    figure = new_figure(5.4, 3.2)
    panel = figure.subplots()
    sizes = [row["of_vram"] for row in rows]
    for way, (color, marker, line) in STYLES.items():
        label = f"managed, {rows[0]['hint']}" if way == "managed, hint" else way
        panel.plot(
            range(len(rows)),
            [1000 * row[way] for row in rows],
            color=color,
            marker=marker,
            linestyle=line,
            markerfacecolor="none",
            label=label,
        )
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if _is_shown(value) else "")
    panel.tick_params(which="both", labelsize=8)
    panel.set_xticks(range(len(rows)), [f"{size:g}" for size in sizes])
    panel.set_xlabel(f"data, times VRAM ({vram_mib} MiB)", fontsize=9)
    panel.set_ylabel("simulated ms, logarithmic", fontsize=9)
    panel.grid(axis="y", color="0.92")
    panel.legend(fontsize=8, frameon=False)
    finish(figure, f"{rows[0]['program']} on a {GPU.upper()}, simulated", path)


def _is_shown(value: float) -> bool:
    """Tell whether a number between two powers of ten is written beside the axis."""
    return f"{value:.0e}"[0] in "25"


def main(folder: Path) -> None:
    """Draw one picture a recipe."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for program in result["options"]["programs"]:
        rows = [
            row
            for row in result["rows"]
            if (row["program"], row["gpu"]) == (program, GPU) and row["seen"]
        ]
        draw(rows, result["options"]["vram_bytes"] // MIB, folder / file_name(program))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
