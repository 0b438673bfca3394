"""An analysis as text for a terminal of any width, with colour or without."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rich.text import Text

from umem._common.printable import short
from umem._common.stacks import innermost
from umem.reports.text.lines import Column, clipped, table, wrapped
from umem.trace import DATA_CACHE
from umem.trace.analysis import Analysis, Leak, OpTotal, Tensor, Vram, thinned
from umem.units import format_bytes, format_seconds

ROWS = 10
"""Lines of each list; `--json` and the page have more."""
PLACES = 4
"""Places of a stack that are shown."""
CHART_HEIGHT = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def step_text(
    analysis: Analysis, name: str, width: int, *, vram: Vram | None = None, plain: bool = False
) -> Iterator[Text]:
    """Format an analysis as a report.

    Args:
        name: the trace's name.
        width: the largest width of a line, in cells.
        vram: the VRAM to compare with the peak.
        plain: use only ASCII characters.
    """
    lines = _lines(analysis, name, width, vram, plain)
    return map(partial(_ascii, width), lines) if plain else lines


def _ascii(width: int, line: Text) -> Text:
    text = line.plain.encode("ascii", "backslashreplace").decode()
    return Text(clipped(text, width), style=line.style)


def _lines(
    analysis: Analysis, name: str, width: int, vram: Vram | None, plain: bool
) -> Iterator[Text]:
    """Yield the lines of a report."""
    yield from _heading(analysis, name, width)
    if not analysis.reading.tensors:
        yield from _text(wrapped("Nothing was allocated, so there is no memory to report.", width))
        return
    yield from _peak(analysis, width, vram)
    yield from _kinds(analysis, width, plain)
    yield from _tensors(analysis, width)
    yield from _operations(analysis, width)
    yield from _chart(analysis, width, plain)
    yield from _leaks(analysis, width)
    yield from _data(analysis, width)


def _text(lines: Sequence[str]) -> Iterator[Text]:
    return (Text(line) for line in lines)


def _section(title: str, width: int, lines: Sequence[str]) -> Iterator[Text]:
    yield Text()
    yield from (Text(line, style="bold") for line in wrapped(title, width))
    yield from _text(lines)


def _heading(analysis: Analysis, name: str, width: int) -> Iterator[Text]:
    """Yield the title, and the time."""
    trace = analysis.trace
    steps = f"{_steps(analysis)}, " if _has_steps(analysis) else ""
    what = (
        f"{name}: {_count(len(trace), 'event')}, {_count(analysis.op_count, 'operation')}, "
        f"{steps}recorded on {trace.backend}"
    )
    yield from (Text(line, style="bold") for line in wrapped(what, width))
    if analysis.seconds is not None:
        time = f"{format_seconds(analysis.seconds)} of host time in operations"
        if analysis.seconds_per_step is not None:
            time += f", {format_seconds(analysis.seconds_per_step)} a step"
        yield from _text(wrapped(time, width))


def _has_steps(analysis: Analysis) -> bool:
    """Tell whether steps are of interest: they ended in the trace, or it is of training."""
    return analysis.trains or analysis.step_count > 0


def _arrays(analysis: Analysis) -> str:
    """Return the word for one array: a network has tensors."""
    return "tensor" if analysis.trains else "array"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _steps(analysis: Analysis) -> str:
    first, count = analysis.first_step, analysis.step_count
    if first == 1 or not count:
        return _count(count, "step")
    return f"step {first}" if count == 1 else f"steps {first}-{first + count - 1}"


def _peak(analysis: Analysis, width: int, vram: Vram | None) -> Iterator[Text]:
    """Yield sentences on the peak."""
    peak = analysis.peak
    where = [f"event {peak.event:,} of {len(analysis.trace):,}"]
    if analysis.step_count:
        where.append(f"step {analysis.first_step + peak.step}")
    if peak.op is not None:
        where += [peak.op.phase, peak.op.name]
    if peak.seconds:
        where.append(f"after {format_seconds(peak.seconds)}")
    sentences = [f"Peak {format_bytes(peak.total_bytes)} at {', '.join(where)}."]
    if vram is not None:
        share = _percent(peak.total_bytes / vram.nbytes)
        size = format_bytes(vram.nbytes)
        sentences.append(f"That is {share} of the {size} of VRAM of {vram.gpu}.")
    if analysis.caveat is not None:
        sentences.append(analysis.caveat)
    if analysis.cap_advice is not None:
        sentences.append(analysis.cap_advice)
    if peak.idle_bytes:
        idle = f"No later operation uses {format_bytes(peak.idle_bytes)} of it"
        sentences.append(", made at ".join((idle, *_lines_of(peak.idle))) + ".")
    yield Text()
    yield from _text([line for text in sentences for line in wrapped(text, width)])


def _lines_of(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield the lines that made most of the bytes; none if no lines were recorded."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.stack:
            sizes[innermost(tensor.stack)] += tensor.nbytes
    most = sizes.most_common(PLACES)
    shown = [f"{place} ({format_bytes(n)})" for place, n in most if n >= 0.01 * sizes.total()]
    if shown:
        yield ", ".join(shown)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 9.995 else f"{share:,.0f} times"


def _kinds(analysis: Analysis, width: int, plain: bool) -> Iterator[Text]:
    """Yield a table of the peak's bytes by kind."""
    kinds = analysis.peak.by_kind
    total = max(1, analysis.peak.total_bytes)
    shares = [kind.total_bytes / total for kind in kinds]
    columns = [
        Column("kind", [kind.kind for kind in kinds]),
        Column("bytes", [format_bytes(kind.total_bytes) for kind in kinds]),
        Column("share", [_percent(share) for share in shares], 1),
        Column(
            f"{_arrays(analysis)}s",
            [f"{kind.tensor_count:,}" if kind.tensor_count else "-" for kind in kinds],
            2,
        ),
        Column("", [_bar(share, 24, plain) for share in shares], 3, True),
    ]
    yield from _section("What is alive at the peak", width, table(columns, width))


def _bar(share: float, size: int, plain: bool) -> str:
    if plain:
        return "#" * round(share * size)
    eighths = round(share * size * 8)
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths < 8 * size else "")


def _tensors(analysis: Analysis, width: int) -> Iterator[Text]:
    """Yield a table of the largest tensors alive at the peak, similar ones together."""
    alike = Counter(_make(analysis, tensor) for tensor in analysis.peak.tensors)
    largest = sorted(alike, key=lambda make: -alike[make] * make.nbytes)[:ROWS]
    columns = [
        Column(_arrays(analysis), [make.label for make in largest]),
        Column("count", [f"{alike[make]:,}" for make in largest], 2),
        Column("each", [format_bytes(make.nbytes) for make in largest], 3),
        Column("bytes", [format_bytes(alike[make] * make.nbytes) for make in largest]),
    ]
    if analysis.trains:
        columns.append(Column("kind", [make.kind for make in largest], 1, True))
    if any(make.maker != "array" for make in largest):
        columns.append(Column("made by", [make.maker for make in largest], 4, True))
    count = _count(len(analysis.peak.tensors), _arrays(analysis))
    title = f"The largest of {count} alive at the peak, similar ones grouped"
    yield from _section(title, width, table(columns, width))


class _Make(NamedTuple):
    """Properties by which similar tensors are grouped."""

    label: str
    nbytes: int
    kind: str
    maker: str


def _make(analysis: Analysis, tensor: Tensor) -> _Make:
    return _Make(tensor.label, tensor.nbytes, tensor.kind, _maker(analysis, tensor))


def _maker(analysis: Analysis, tensor: Tensor) -> str:
    """Return a tensor's maker: a framework's operation, or the line if it is known."""
    op = None if tensor.maker is None else analysis.reading.op(tensor.maker)
    if tensor.stack and (op is None or op.phase == "array"):
        return innermost(tensor.stack)
    if op is None:
        return tensor.origin
    return op.phase if op.name == tensor.label else f"{op.name}, {op.phase}"


def _operations(analysis: Analysis, width: int) -> Iterator[Text]:
    """Yield tables of operations by time and by memory."""
    if not analysis.ops:
        return
    if analysis.seconds is None:
        yield from _section("Operations by time", width, wrapped("The trace has no times.", width))
    else:
        lines = _op_table(analysis.ops_by_seconds(), analysis.seconds, width)
        yield from _section("Operations by time", width, lines)
    lines = _op_table(analysis.ops_by_bytes(), analysis.seconds, width, by_time=False)
    yield from _section("Operations by memory", width, lines)


def _op_table(
    ops: Sequence[OpTotal], seconds: float | None, width: int, *, by_time: bool = True
) -> list[str]:
    """Format the first `ROWS` operations as a table, in their order.

    A narrow table keeps the times if ``by_time``, otherwise the bytes.
    """
    ops = ops[:ROWS]
    time, memory = (0, 3) if by_time else (3, 0)
    columns = [
        Column("operation", [op.name for op in ops]),
        Column("phase", [op.phase for op in ops], 2, True),
        Column("count", [f"{op.count:,}" for op in ops], 1),
        Column("seconds", [_seconds(op.seconds) for op in ops], time),
        Column("share", [_share(op.seconds, seconds) for op in ops], time and time + 1),
        Column("allocated", [format_bytes(op.allocated_bytes) for op in ops], memory),
        Column("workspace", [_bytes(op.workspace_bytes) for op in ops], 5),
    ]
    if all(op.workspace_bytes is None for op in ops):
        columns.pop()
    if all(op.phase == "array" for op in ops):
        columns = [column for column in columns if column.title != "phase"]
    return table(columns, width)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _share(seconds: float | None, total: float | None) -> str:
    return "-" if seconds is None or not total else _percent(seconds / total)


# -- the curve ---------------------------------------------------------------------------------


def _chart(analysis: Analysis, width: int, plain: bool) -> Iterator[Text]:
    """Yield a chart of memory over events."""
    total = analysis.reading.total
    high = analysis.peak.total_bytes
    if not high:
        return
    label = len(format_bytes(high))
    places = thinned(total, max(1, width - label - 2))
    levels = [int(total[place]) / high * CHART_HEIGHT for place in places]
    lines = []
    for row in range(CHART_HEIGHT, 0, -1):
        at = format_bytes(high) if row == CHART_HEIGHT else "0 B" if row == 1 else ""
        cells = "".join(_cell(level - (row - 1), plain) for level in levels)
        lines.append(f"{at:>{label}} |{cells}".rstrip())
    lines.append(" " * label + " +" + "".join(_marks(analysis, len(places))))
    marks = "^ the peak, | the end of a step" if analysis.step_count else "^ the peak"
    title = f"Memory over the events ({marks})"
    yield from _section(title, width, lines)


def _cell(level: float, plain: bool) -> str:
    eighths = min(8, max(0, round(level * 8)))
    return ("#" if eighths > 3 else " ") if plain else _EIGHTHS[eighths]


def _marks(analysis: Analysis, count: int) -> list[str]:
    cells = ["-"] * count
    for mark, places in (("|", analysis.reading.steps), ("^", [analysis.peak.event])):
        for place in places:
            cells[place * count // len(analysis.trace)] = mark
    return cells


# -- leaks -------------------------------------------------------------------------------------


def _data(analysis: Analysis, width: int) -> Iterator[Text]:
    found = analysis.trace.meta.get(DATA_CACHE)
    if found is not None:
        lines = wrapped(short(found), width)
        yield from _section("Data that was cached, up to the end of these steps", width, lines)


def _leaks(analysis: Analysis, width: int) -> Iterator[Text]:
    """Yield the tensors that outlive their step."""
    if not _has_steps(analysis):
        return
    title = f"{_arrays(analysis).capitalize()}s that outlive their step"
    leaks = analysis.leaks
    if not leaks:
        yield from _section(title, width, wrapped(analysis.no_leaks, width))
        return
    total = sum(leak.total_bytes for leak in leaks)
    first = analysis.first_step
    groups = _by_stack(leaks)
    lines = [line for stack, group in groups for line in _group(stack, group, first, width)]
    yield from _section(f"{title}: {format_bytes(total)} (leaks?)", width, lines)


def _by_stack(leaks: Sequence[Leak]) -> list[tuple[tuple[str, ...], list[Leak]]]:
    """Group leaks by stack, most bytes first."""
    groups: dict[tuple[str, ...], list[Leak]] = defaultdict(list)
    for leak in leaks:
        groups[leak.stack].append(leak)
    size = {stack: sum(leak.total_bytes for leak in group) for stack, group in groups.items()}
    return sorted(groups.items(), key=lambda item: -size[item[0]])[:ROWS]


def _group(stack: tuple[str, ...], leaks: list[Leak], first: int, width: int) -> list[str]:
    """Format the leaks of one stack."""
    lines = [line for leak in leaks[:ROWS] for line in wrapped(_leak(leak, first), width, hang=2)]
    if len(leaks) > ROWS:
        rest = sum(leak.total_bytes for leak in leaks[ROWS:])
        lines += wrapped(f"and {len(leaks) - ROWS} more, {format_bytes(rest)}", width)
    places = [
        f"made at {place}" if not depth else f"called at {place}"
        for depth, place in enumerate(stack[:PLACES])
    ]
    return lines + [line for place in places for line in wrapped(place, width, "    ", 2)]


def _leak(leak: Leak, first: int) -> str:
    """Format one leak."""
    made = "" if leak.op is None else f", made by {leak.op}, {leak.phase}"
    when = [_in_steps([first + step for step in leak.steps])] if leak.steps else []
    if leak.earlier_count:
        when.append(f"{leak.earlier_count} made before the recording")
    if leak.freed_count:
        when.append(f"{leak.freed_count} freed later")
    return (
        f"{format_bytes(leak.total_bytes)} in {_count(leak.tensor_count, 'tensor')} of "
        f"{leak.label!r} ({leak.kind}){made}; {'; '.join(when)}"
    )


def _in_steps(steps: list[int]) -> str:
    more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
    return f"in step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:8]))}{more}"
