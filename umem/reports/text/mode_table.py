"""A comparison of modes as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from umem.predict.comparing import ModeRow
from umem.units import format_bytes, format_seconds

_NEXT = {"KiB": "MiB", "MiB": "GiB", "GiB": "TiB"}


def mode_table(rows: Sequence[ModeRow], title: str, *, simulated: bool) -> Table:
    """A table of 80 columns at most; a dash is what did not happen or cannot be known.

    The losses are the first step's and the last's.

    Args:
        simulated: whether residency and times are a model's; the headings then say so.
    """
    step = "step\n(simul.)" if simulated else "step"
    table = Table(
        title=title, title_justify="left", box=box.HORIZONTALS, show_edge=False, padding=0
    )
    for heading in ("mode", "", "fits"):
        table.add_column(heading, no_wrap=True)
    for heading in ("peak", "peak in\nVRAM", "moved\nin", "moved\nout", "faults", step, "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: ModeRow) -> list[str]:
    return [
        row.title.replace(" + ", "\n+ "),
        row.how,
        "yes" if row.fits else "NO",
        _size(row.peak_bytes),
        _size(row.resident_peak_bytes),
        _size(row.migrated_in_bytes),
        _size(row.migrated_out_bytes),
        _count(row.fault_count),
        "-" if row.seconds is None else format_seconds(row.seconds).replace(" h ", " h\n"),
        f"{_loss(row.loss[0])}\n{_loss(row.loss[-1])}" if row.loss else "-",
    ]


def _count(number: int | None) -> str:
    """A count in at most seven characters."""
    if number is None:
        return "-"
    if number < 10**6:
        return f"{number:,}"
    return f"{number / 10**6:.1f} M" if number < 999.95e6 else f"{number:.1e}"


def _loss(loss: float) -> str:
    """A loss in at most five characters."""
    return f"{loss:.2f}" if abs(loss) < 99.99 else f"{loss:.0f}" if loss < 10**5 else f"{loss:.0e}"


def _size(nbytes: int | None) -> str:
    """A size in at most seven characters."""
    if not nbytes:
        return "-" if nbytes is None else "0"
    number, unit = format_bytes(nbytes).split()
    whole = f"{float(number):.0f}" if len(number) > 3 else number
    if len(whole) > 3 and unit in _NEXT:
        return f"1.0 {_NEXT[unit]}"
    return f"{whole} {unit}"
