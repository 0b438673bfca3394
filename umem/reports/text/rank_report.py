"""All ranks of a run as text: their peaks, the bytes that they sent, and their operations."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from umem.reports.text.lines import Column, table, wrapped
from umem.trace.analysis import OpTotal, RankedTraces, RankRow, Vram
from umem.units import format_bytes, format_seconds

OPERATIONS = 8
"""Operations listed for each rank, by time; `--json` has all."""


def ranks_text(found: RankedTraces, width: int, vram: Vram | None = None) -> Iterator[Text]:
    """Format a report of several ranks.

    Args:
        found: the ranks.
        width: the largest width of a line, in cells.
        vram: the VRAM to compare with the largest peak.
    """
    for line in _summary(found, width, vram):
        yield Text(line)
    for row in found.rows:
        yield Text("")
        yield Text(f"Rank {row.rank}", style="bold")
        for line in _operations(row, width):
            yield Text(line)


def _summary(found: RankedTraces, width: int, vram: Vram | None) -> Iterator[str]:
    """Format a sentence on the largest peak, and a row for each rank."""
    largest = found.largest
    peak = format_bytes(largest.peak_bytes)
    of = "" if vram is None else f", {largest.peak_bytes / vram.nbytes:.0%} of {vram.gpu}'s VRAM"
    sent = found.sent_bytes
    total = "" if sent is None else f"; all ranks send {format_bytes(sent)} of the halo a step"
    head = f"{len(found.rows)} ranks: rank {largest.rank} has the largest peak, {peak}{of}{total}."
    yield from wrapped(head, width)
    yield ""
    rows = found.rows
    columns = [
        Column("rank", [str(row.rank) for row in rows]),
        Column("peak", [format_bytes(row.peak_bytes) for row in rows]),
        Column("sent a step", [format_bytes(row.sent_bytes) for row in rows], drop=2),
        Column("a step", [format_seconds(row.seconds) for row in rows], drop=1),
        Column("trace", [row.name for row in rows], drop=3, left=True),
    ]
    yield from table(columns, width)


def _operations(row: RankRow, width: int) -> list[str]:
    """Format a rank's longest operations."""
    ops = sorted(row.ops, key=_weight, reverse=True)[:OPERATIONS]
    columns = [
        Column("operation", [op.name for op in ops], left=True),
        Column("phase", [op.phase for op in ops], drop=3, left=True),
        Column("calls", [f"{op.count:,}" for op in ops], drop=2),
        Column("time", [format_seconds(op.seconds) for op in ops], drop=1),
        Column("allocated", [format_bytes(op.allocated_bytes) for op in ops]),
    ]
    return table(columns, width) if ops else ["nothing was recorded"]


def _weight(op: OpTotal) -> tuple[float, int]:
    return op.seconds or 0.0, op.allocated_bytes
