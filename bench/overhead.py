"""What does watching a step cost?

Conditions, interleaved step by step in one process, each time in another order: ``off``
(umem.chainer imported, nothing active), ``record`` (a recorder), ``stacks`` (one that keeps
stacks; at most 10% more than ``record``), ``watch`` (one that only counts, as `umem run --watch`
and MemoryReport), ``live`` (a recorder and a live virtual GPU). A second process
imports Chainer through the compatibility layer only and takes part in the interleaving as
``bare``, so that ``off`` can be compared with a program that knows umem's mends and nothing else.

On CuPy (the software GPU without its model, so that no simulated time is counted) blocks of twelve
steps of a perceptron take turns: nothing active, umem's meter of CuPy's pool, and
`Recompute("8GiB")`, whose meter and watch for memory that runs out find nothing to do. The first
five steps of a block, in which a pass is measured, do not count.

Times are the processor's, so that other programs on the machine count little; the clock's are in
the result beside them.

Workloads: a 24-block residual network (3x3 convolution, batch normalisation, relu; batch 8, 32
channels, 32x32 pixels) and a 200-step LSTM of small operations.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import common
from report_tables import Row, Table, figure, listed, quantity, text

WORKLOADS = {"residual": ("residual", "24 blocks, sum first"), "lstm": ("LSTM", "200 narrow words")}
ON_CUPY = {"perceptron": ("MLP", "256 wide")}
BATCHES = {"residual": 8, "lstm": 8, "perceptron": 4096}
SETTLING, STEPS = 5, 7
Seconds = tuple[float, float]
STACKS_LIMIT = 1.10


def make_step(workload: str, device: str = "@numpy") -> Any:
    """A function that runs one step and returns its seconds, by the clock and of the processor."""
    from models import build, sent  # with the compatibility layer, where it is not in place

    # isort: split
    import chainer

    model = build(*(WORKLOADS | ON_CUPY)[workload])
    model.link.to_device(device)
    place = chainer.get_device(device)
    model.link.to_device(place)
    inputs = sent(model.inputs(BATCHES[workload]), place)
    optimizer = model.make_optimizer().setup(model.link)

    def step() -> Seconds:
        start, used = time.perf_counter(), time.process_time()
        loss = model.loss(*inputs)
        model.link.cleargrads()
        loss.backward()
        optimizer.update()
        return time.perf_counter() - start, time.process_time() - used

    return step


def worker(workload: str) -> None:
    """The ``bare`` process: a step for each line that it reads."""
    import umem.compat

    umem.compat.install()
    step = make_step(workload)
    step()
    for _ in sys.stdin:
        print(*step(), flush=True)


def conditions() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What is on in each of the conditions of this process."""
    import umem
    from umem.trace.recording.recorder import Recorder
    from umem.trace.recording.tally import Tally

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
    import umem
    import umem.chainer

    step = make_step(workload)
    with umem.record() as recorder:
        step()
        step()
    op_count = sum(1 for _ in recorder.trace.ops) // 2
    op_seconds = sorted(op.host_seconds or 0.0 for op in recorder.trace.ops)
    command = [sys.executable, __file__, "--worker", workload]
    bare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bare.stdin is not None and bare.stdout is not None
    on = conditions()
    both: dict[str, list[Seconds]] = {name: [] for name in ("bare", *on)}
    chance = random.Random(0)
    with ExitStack() as stack:
        stack.callback(bare.wait)
        stack.callback(bare.stdin.close)
        for _ in range(repeats):
            bare.stdin.write("\n")
            bare.stdin.flush()
            clock, used = map(float, bare.stdout.readline().split())
            both["bare"].append((clock, used))
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


def measure_on_cupy(repeats: int) -> dict[str, Any]:
    """Measure what the meter and a budget cost on CuPy where nothing presses."""
    import umem

    umem.software_gpu("t4", force=True, model=False)  # before CuPy is imported
    import umem.chainer
    from umem.devices.cuda.pool_meter import PoolMeter

    step = make_step("perceptron", "@cupy:0")
    with umem.record() as recorder:
        step()
    memory = umem.chainer.Recompute("8GiB")
    on = {"off": nullcontext, "meter": PoolMeter, "budget": lambda: memory}
    both: dict[str, list[Seconds]] = {name: [] for name in on}
    chance = random.Random(0)
    for _ in range(repeats):
        for name in chance.sample(list(on), len(on)):
            with on[name]():
                for _ in range(SETTLING):
                    step()
                clock, used = zip(*(step() for _ in range(STEPS)), strict=True)
            both[name].append((statistics.median(clock), statistics.median(used)))
    clock_seconds = {name: [clock for clock, _ in pairs] for name, pairs in both.items()}
    seconds = {name: [used for _, used in pairs] for name, pairs in both.items()}
    return {
        "workload": "perceptron on CuPy",
        "op_count": sum(1 for _ in recorder.trace.ops),
        "ratio_to_off": ratios(seconds),
        "clock_ratio_to_off": ratios(clock_seconds),
        "added_us_per_op": {},
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
    "meter": "with the meter of CuPy's pool",
    "budget": 'with Recompute("8GiB")',
}


def answer(result: common.Result) -> str:
    said = []
    for key, words in WORDS.items():
        rows = [row for row in result["rows"] if key in row["ratio_to_off"]]
        times = [f"{figure(row['ratio_to_off'][key])} ({row['workload']})" for row in rows]
        if times:
            said.append(f"{listed(times)} times as long {words}")
    return f"A step takes {'; '.join(said)}, in processor time."


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
    rows = [row for row in result["rows"] if "stacks_of_record" in row]
    return [
        f"{row['workload']}: keeping stacks takes {figure(row['stacks_of_record'])} of a "
        f"recorder's step; limit {STACKS_LIMIT}: "
        f"{'met' if row['stacks_of_record'] <= STACKS_LIMIT else 'missed'}."
        for row in rows
    ]


BENCH = common.Bench("overhead", __doc__, answer, tables=by_condition, notes=stacks)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.option("--quick", is_flag=True, help="Two repeats.")
@click.option("--worker", "only", type=click.Choice(list(WORKLOADS)), hidden=True)
@click.option("--on-cupy", is_flag=True, hidden=True)
@common.json_option
def main(repeats: int, quick: bool, only: str | None, on_cupy: bool, path: Path | None) -> None:
    if only is not None:
        worker(only)
        return
    if on_cupy:  # in a process of its own, in which CuPy is not imported yet
        print(json.dumps(measure_on_cupy(repeats)))
        return
    repeats = 2 if quick else repeats
    rows = [measure(workload, repeats) for workload in WORKLOADS]
    command = [sys.executable, __file__, "--repeats", str(repeats), "--on-cupy"]
    rows.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    BENCH.finish(rows, path, simulated=False, options={"repeats": repeats})


if __name__ == "__main__":
    main()
