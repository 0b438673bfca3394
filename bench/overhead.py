"""What does watching a step cost?

Conditions, interleaved step by step in one process, each time in another order: ``off``
(umem.chainer imported, nothing active), ``record`` (a recorder), ``stacks`` (one that keeps
stacks; at most 10% more than ``record``), ``watch`` (one that only counts, as `umem run --watch`
and MemoryReport), ``live`` (a recorder and a live virtual GPU).

Times are the processor's, so that other programs on the machine count little; the clock's are in
the result beside them.

Workloads: a 24-block residual network (3x3 convolution, batch normalisation, relu; batch 8, 32
channels, 32x32 pixels) and a 200-step LSTM of small operations.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import common
from report_tables import Row, Table, figure, listed, quantity, text

WORKLOADS = {"residual": ("residual", "24 blocks, sum first"), "lstm": ("LSTM", "200 narrow words")}
BATCH = 8
Seconds = tuple[float, float]
STACKS_LIMIT = 1.10


def make_step(workload: str) -> Callable[[], Seconds]:
    """Make a function that runs one step; it returns seconds by the clock and of the processor."""
    from models import build  # with the compatibility layer, where it is not in place

    model = build(*WORKLOADS[workload])
    inputs = model.inputs(BATCH)
    optimizer = model.make_optimizer().setup(model.link)

    def step() -> Seconds:
        start, used = time.perf_counter(), time.process_time()
        loss = model.loss(*inputs)
        model.link.cleargrads()
        loss.backward()
        optimizer.update()
        return time.perf_counter() - start, time.process_time() - used

    return step


def conditions() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What is on in each of the conditions of this process."""
    import umem
    from umem.trace.recording import Recorder, Tally

    @contextmanager
    def live() -> Any:
        with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed():
            yield

    return {
        "off": nullcontext,
        "record": umem.record,
        "stacks": lambda: umem.record(stacks=True),
        "watch": lambda: Recorder(Tally().on_event, keep=False),
        "live": live,
    }


def measure(workload: str, repeats: int) -> dict[str, Any]:
    """Measure a workload under all conditions, in an order drawn anew each round."""
    import umem
    import umem.chainer

    step = make_step(workload)
    with umem.record() as recorder:
        step()
        step()
    op_count = sum(1 for _ in recorder.trace.ops) // 2
    op_seconds = sorted(op.host_seconds or 0.0 for op in recorder.trace.ops)
    on = conditions()
    both: dict[str, list[Seconds]] = {name: [] for name in on}
    chance = random.Random(0)
    for _ in range(repeats):
        for name in chance.sample(list(on), len(on)):
            with on[name]():
                both[name].append(step())
    clock_seconds = {name: [clock for clock, _ in pairs] for name, pairs in both.items()}
    seconds = {name: [used for _, used in pairs] for name, pairs in both.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "workload": workload,
        "op_count": op_count,
        "median_op_seconds": op_seconds[len(op_seconds) // 2],
        "off_seconds": medians["off"],
        "ratio_to_off": ratios(seconds),
        "clock_ratio_to_off": ratios(clock_seconds),
        "added_us_per_op": {
            name: 1e6 * (medians[name] - medians["off"]) / op_count for name in on if name != "off"
        },
        "stacks_of_record": statistics.median(
            [a / b for a, b in zip(seconds["stacks"], seconds["record"], strict=True)]
        ),
        "seconds": seconds,
        "clock_seconds": clock_seconds,
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median over the repeats of what a condition takes of ``off``."""
    return {
        name: statistics.median([a / b for a, b in zip(values, seconds["off"], strict=True)])
        for name, values in seconds.items()
    }


WORDS = {
    "record": "with a recorder",
    "stacks": "with one that keeps stacks",
    "watch": "with one that only counts",
    "live": "with a live virtual GPU",
}


def answer(result: common.Result) -> str:
    parts = []
    for key, words in WORDS.items():
        times = [
            f"{figure(row['ratio_to_off'][key])} ({row['workload']})" for row in result["rows"]
        ]
        parts.append(f"{listed(times)} times as long {words}")
    return f"A step takes {'; '.join(parts)}, in processor time."


def by_condition(result: common.Result) -> Iterator[Table]:
    """Make a table a workload, with a line a condition."""
    for row in result["rows"]:
        lines: list[Row] = [
            {
                "condition": name,
                "median": statistics.median(seconds),
                "ratio": row["ratio_to_off"][name],
                "clock": row.get("clock_ratio_to_off", {}).get(name),
                "added": row["added_us_per_op"].get(name),
            }
            for name, seconds in row["seconds"].items()
        ]
        columns = (
            text("condition", "condition"),
            quantity("step", "median", "ms", per=1e-3),
            quantity("of off", "ratio"),
            quantity("of off, by the clock", "clock"),
            quantity("added to an operation", "added", "us", places=2, signed=True),
        )
        yield Table(columns, lines, f"{row['workload']}, {row['op_count']:,} operations")


def stacks(result: common.Result) -> list[str]:
    return [
        f"{row['workload']}: keeping stacks takes {figure(row['stacks_of_record'])} of a "
        f"recorder's step; limit {STACKS_LIMIT}: "
        f"{'met' if row['stacks_of_record'] <= STACKS_LIMIT else 'missed'}."
        for row in result["rows"]
    ]


BENCH = common.Bench("overhead", __doc__, answer, tables=by_condition, notes=stacks)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.option("--quick", is_flag=True, help="Two repeats.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    repeats = 2 if quick else repeats
    rows = [measure(workload, repeats) for workload in WORKLOADS]
    BENCH.finish(rows, path, simulated=False, options={"repeats": repeats})


if __name__ == "__main__":
    main()
