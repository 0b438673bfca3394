"""Shared by pictures: a figure of matplotlib, a PNG."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, Any

from umem._common import extras
from umem._common.printable import short
from umem.errors import MissingDependencyError

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
