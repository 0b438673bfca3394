"""What does a report of a long trace cost?

Every view of `umem report`, as a command of its own: processor time (of the whole command, the
interpreter's start and the reading of the file included), elapsed time, and the size of what it
writes. The trace is of a recorded 200-step LSTM, step after step until there are as many
events as asked for; once plain, once with the stacks of the lines that made each tensor. Views
run in turns, several times; the median is shown. The targets are of a trace of 100,000 events:
a report in 3 s of processor time, a page below 5 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
from report_tables import counted, quantity, span, text, verdict

import umem
import umem.chainer
from umem.units import MIB

TARGET_SECONDS = 3.0
TARGET_PAGE_BYTES = 5_000_000
TARGET_EVENTS = 100_000
VIEWS = ("text", "json", "page", "picture", "perfetto", "comparison")


class Cost(NamedTuple):
    """What one command cost."""

    processor_seconds: float
    elapsed_seconds: float
    output_bytes: int


def record(count: int, *, stacks: bool) -> umem.Trace:
    """Steps of the LSTM of bench/overhead.py, cut off after ``count`` events."""
    import overhead

    step = overhead.make_step("lstm")
    step()
    with umem.record(stacks=stacks) as recorder:
        while len(recorder.trace) < count:
            step()
    trace = recorder.trace
    return umem.Trace(trace.events[:count], trace.backend, {"model": "LSTM of 200 steps"})


def command(view: str, trace: Path, output: Path) -> list[str]:
    """The command of a view that writes a file; the others write to standard output."""
    options = {
        "text": [],
        "json": ["--json"],
        "page": ["--html", output],
        "picture": ["--png", output],
        "perfetto": ["--export", "perfetto", output],
        "comparison": [trace],
    }
    return [sys.executable, "-m", "umem", "report", str(trace), *map(str, options[view])]


def run(view: str, trace: Path, folder: Path) -> Cost:
    """Run the command of a view and measure it."""
    output = folder / ("output.png" if view == "picture" else "output")
    output.unlink(missing_ok=True)
    printed = folder / "printed"
    path = os.pathsep.join(filter(None, [str(common.HERE.parent), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    with open(printed, "wb") as file:
        process = subprocess.Popen(
            command(view, trace, output), stdout=file, env={**os.environ, "PYTHONPATH": path}
        )
        _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"the {view} of {trace.name} failed")
    written = output if output.exists() else printed
    return Cost(usage.ru_utime + usage.ru_stime, elapsed, written.stat().st_size)


def measure(traces: dict[str, umem.Trace], repeats: int) -> list[dict[str, Any]]:
    """A row a trace and view, every repeat in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {what: trace.save(folder / f"{what}.umem.gz") for what, trace in traces.items()}
        costs: dict[tuple[str, str], list[Cost]] = {}
        for _ in range(repeats):
            for what, path in paths.items():
                for view in VIEWS:
                    costs.setdefault((what, view), []).append(run(view, path, folder))
        return [
            row(what, view, len(traces[what]), paths[what].stat().st_size, found)
            for (what, view), found in costs.items()
        ]


def row(
    what: str, view: str, event_count: int, file_bytes: int, costs: list[Cost]
) -> dict[str, Any]:
    """One row of the result; the target is judged where the trace is as long as it says."""
    processor = common.summary(cost.processor_seconds for cost in costs)
    output = costs[0].output_bytes
    passed = processor.median <= TARGET_SECONDS and (view != "page" or output <= TARGET_PAGE_BYTES)
    of_traces = 2 if view == "comparison" else 1
    return {
        "trace": what,
        "view": view,
        "event_count": event_count,
        "file_bytes": file_bytes,
        "processor_seconds": processor.median,
        "lowest_seconds": processor.low,
        "highest_seconds": processor.high,
        "elapsed_seconds": common.summary(cost.elapsed_seconds for cost in costs).median,
        "output_bytes": output,
        "passed": passed if event_count == TARGET_EVENTS and of_traces == 1 else None,
        "repeats": [cost._asdict() for cost in costs],
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    pages = [row["output_bytes"] / MIB for row in rows if row["view"] == "page"]
    judged = [row["passed"] for row in rows if row["passed"] is not None]
    return (
        f"A view of {rows[0]['event_count']:,} events takes "
        f"{span(row['processor_seconds'] for row in rows)} s of processor time, and the page has "
        f"{span(pages)} MiB; {sum(judged)} of {len(judged)} targets are met."
    )


BENCH = common.Bench(
    "report",
    __doc__,
    answer,
    (
        text("trace", "trace"),
        text("view", "view"),
        counted("events", "event_count"),
        quantity("file", "file_bytes", "KiB", per=1024),
        quantity("median", "processor_seconds", "CPU s"),
        quantity("least", "lowest_seconds", "CPU s"),
        quantity("most", "highest_seconds", "CPU s"),
        quantity("elapsed", "elapsed_seconds", "s"),
        quantity("output", "output_bytes", "KiB", per=1024),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option(
    "--events",
    "count",
    type=click.IntRange(1, 10_000_000),
    default=TARGET_EVENTS,
    show_default=True,
    help="How long the traces are.",
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="2,000 events, with stacks only, once.")
@common.json_option
def main(count: int, repeats: int, quick: bool, path: Path | None) -> None:
    if quick:
        count, repeats = 2000, 1
    kinds = {"stacks": True} if quick else {"plain": False, "stacks": True}
    traces = {what: record(count, stacks=stacks) for what, stacks in kinds.items()}
    options = {"events": count, "repeats": repeats}
    BENCH.finish(measure(traces, repeats), path, simulated=False, options=options)


if __name__ == "__main__":
    main()
