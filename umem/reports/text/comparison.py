"""A comparison of two traces as text; each difference has its sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from umem.reports.text.lines import Column, table, wrapped
from umem.trace.analysis import Comparison, Difference, OpDifference, Vram, vram_share
from umem.units import format_bytes, format_seconds

ROWS = 15

Show = Callable[[float | None], str]


def comparison_text(
    comparison: Comparison, before: str, after: str, width: int, vram: Vram | None = None
) -> Iterator[Text]:
    """Format a comparison.

    Args:
        before, after: names of the traces.
        width: the largest width of a line, in cells.
        vram: the VRAM to compare with both peaks.
    """
    yield from (Text(line, style="bold") for line in wrapped(f"{before} -> {after}", width))
    if comparison.common_share < 0.5:
        yield from (Text(line) for line in wrapped(_warning(comparison), width))
    for name, caveat in zip((before, after), comparison.caveats, strict=True):
        if caveat is not None:
            yield from (Text(line) for line in wrapped(f"{name}: {caveat}", width))
    each = " a step" if comparison.per_step else ""
    sizes = (comparison.peak_bytes, comparison.idle_bytes, comparison.outliving_bytes)
    rows = [_row(difference, format_bytes) for difference in sizes]
    if vram is not None:
        rows.insert(1, _row(vram_share(comparison, vram), _percent))
    rows.append(_row(comparison.seconds, format_seconds, each))
    rows.append(_row(comparison.op_count, _number, each))
    yield from _section("", ("", "before", "after", "change"), rows, width)
    rows = [_row(difference, format_bytes) for difference in comparison.kinds]
    yield from _section("At the peak", ("kind", "before", "after", "change"), rows, width)
    yield from _ops(comparison, each, width)


def _warning(comparison: Comparison) -> str:
    common = _percent(comparison.common_share)
    return f"Only {common} of the operations are in both: these are hardly runs of one model."


def _section(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Text]:
    yield Text()
    if title:
        yield from (Text(line, style="bold") for line in wrapped(title, width))
    drops = (0, 1, 2, 0)
    columns = [Column(name, [row[at] for row in rows], drops[at]) for at, name in enumerate(titles)]
    yield from (Text(line) for line in table(columns, width))


def _row(difference: Difference, show: Show, more: str = "") -> list[str]:
    return [
        difference.name + more,
        _or_dash(difference.before, show),
        _or_dash(difference.after, show),
        signed(difference.change, show),
    ]


def _or_dash(value: float | None, show: Show) -> str:
    return "-" if value is None else show(value)


def signed(change: float | None, show: Show) -> str:
    """Format a change with its sign; zero has none."""
    if change is None:
        return "-"
    return show(change) if not change else ("+" if change > 0 else "-") + show(abs(change))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:,.1f}%"


def _ops(comparison: Comparison, each: str, width: int) -> Iterator[Text]:
    """Format the operations that changed most."""
    changed = [op for op in comparison.ops if _has_changed(op)]
    ops = changed[:ROWS]
    yield Text()
    if not ops:
        yield from (Text(line) for line in wrapped("The operations are the same.", width))
        return
    title = f"Operations that changed most{each}"
    if len(changed) > ROWS:
        title += f" ({ROWS} of {len(changed)})"
    yield from (Text(line, style="bold") for line in wrapped(title, width))
    columns = [
        Column("operation", [op.name for op in ops]),
        Column("phase", [op.phase for op in ops], 2, True),
        Column("count", [signed(op.count.change, _number) for op in ops], 1),
        Column("seconds", [signed(op.seconds.change, format_seconds) for op in ops]),
        Column("allocated", [signed(op.allocated_bytes.change, format_bytes) for op in ops], 3),
    ]
    yield from (Text(line) for line in table(columns, width))


def _has_changed(op: OpDifference) -> bool:
    return any(figure.change for figure in (op.count, op.seconds, op.allocated_bytes))
