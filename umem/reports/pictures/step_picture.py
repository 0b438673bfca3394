"""Memory over a step before and after a plan, as a picture; the curves are predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from umem.reports.pictures.drawing import finish, new_figure
from umem.units import MIB

KEPT, PLANNED, LIMIT, MEASURED = "#9aa5b1", "#2166ac", "#b2182b", "#1b7837"


def draw_steps(
    before: Sequence[int],
    after: Sequence[int],
    budget_bytes: int | None,
    measured_bytes: int | None,
    file: Path | IO[bytes],
) -> None:
    """Write a PNG of two predicted curves, over the actions of a step.

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
