"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing show.

Each phase has a track with its operations as slices; another track has the ends of steps, and a
counter shows memory by kind. The clock is the host time spent in operations; a trace without times
gets a sequence clock of a microsecond an operation, and its process's name says so.

The format: "Trace Event Format" of the Chromium project (JSON object format; phases X, C, i, M).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from umem._common.as_json import json_text
from umem.reports.outputs import ReportRequest
from umem.trace import PHASES, Op
from umem.trace.analysis import Analysis, Curve, kind_curves

PROCESS = 1
STEPS = len(PHASES)
"""The track of step ends, after the tracks of the phases."""


def perfetto(analysis: Analysis, name: str) -> dict[str, Any]:
    """Return the JSON object of a trace file, in microseconds and bytes."""
    timed = analysis.seconds is not None
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "trace": name,
            "backend": analysis.trace.backend,
            "clock": "host seconds in operations" if timed else "sequence: 1 us an operation",
            "peak_bytes": analysis.peak.total_bytes,
        },
        "traceEvents": [*_names(name, timed), *_events(analysis, timed)],
    }


def write(request: ReportRequest, file: IO[bytes]) -> None:
    """Write the requested trace file."""
    content = perfetto(request.analysis, request.name)
    file.write(json_text(content, compact=True).encode("ascii"))


def _names(name: str, timed: bool) -> Iterator[dict[str, Any]]:
    process = f"umem: {name}" if timed else f"umem: {name} (sequence clock, not time)"
    yield _named("process_name", 0, process)
    for track, phase in enumerate((*PHASES, "steps")):
        yield _named("thread_name", track, phase)
        yield {**_base("M", "thread_sort_index", track), "args": {"sort_index": track}}


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {**_base("M", what, track), "args": {"name": name}}


def _base(phase: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": track}


def _events(analysis: Analysis, timed: bool) -> Iterator[dict[str, Any]]:
    """Yield trace events: a slice an operation, memory counters, ends of steps."""
    curves = kind_curves(analysis.reading)
    steps = set(analysis.reading.steps)
    now, since, number = 0.0, 0, analysis.first_step
    for index, event in enumerate(analysis.trace.events):
        if isinstance(event, Op):
            micros = 1e6 * (event.host_seconds or 0.0) if timed else 1.0
            highest = since + int(analysis.reading.total[since : index + 1].argmax())
            yield from _counter(curves, highest, now)
            yield _slice(event, index, now, micros)
            now, since = now + micros, index + 1
        elif index in steps:
            yield {**_base("i", f"end of step {number}", STEPS), "ts": now, "s": "p"}
            number += 1
    if since < len(analysis.trace):
        highest = since + int(analysis.reading.total[since:].argmax())
        yield from _counter(curves, highest, now)
        yield from _counter(curves, len(analysis.trace) - 1, now)


def _slice(op: Op, index: int, start: float, micros: float) -> dict[str, Any]:
    """Return an operation's slice."""
    return {
        **_base("X", op.name, PHASES.index(op.phase)),
        "cat": op.phase,
        "ts": start,
        "dur": micros,
        "args": {
            "event": index,
            "read_bytes": sum(stop - start for _, start, stop in op.reads),
            "written_bytes": sum(stop - start for _, start, stop in op.writes),
            "workspace_bytes": op.workspace_bytes,
        },
    }


def _counter(curves: dict[str, Curve], index: int, now: float) -> Iterator[dict[str, Any]]:
    """Yield the live bytes while an operation runs: the most since the previous operation."""
    if curves:  # a counter without a series is none
        values = {kind: int(curve[index]) for kind, curve in curves.items()}
        yield {**_base("C", "memory", 0), "ts": now, "args": values}
