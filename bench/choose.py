"""How long does it take to choose among all techniques, for one GPU and for every GPU?

Processor time from a recorded step to the first result and to the last, of one GPU and of every GPU
of the table. The networks have a GPU with so little VRAM that the step does not fit, so that every
technique has something to do; the long LSTM of some 3,200 operations has the GPUs as they are, at a
size that has room on one GPU of the table alone, and at one that has room on all. Targets:
the first result within 2 s, one GPU within 5 s, every GPU within 60 s, or 20 s where the step fits
most; 10 s for one GPU on ResNet50's step. What the choice says is simulated.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import numpy as np
from models import build
from report_tables import Column, counted, figure, quantity, span, text, verdict

import umem
import umem.chainer
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.predict.choosing import Choice, Search
from umem.units import MIB

LONG = "unrolled LSTM"
NETWORKS = {
    "ResNet50": "64 px",
    "DCGAN": "32 px",
    "transformer": "4 layers",
    "LSTM": "40 words",
    LONG: "129 words",
}
QUICK = {"residual": "3 narrow blocks"}
GPU = "t4"
SIZES, SIZE = (4, 8), 32
LARGE, SMALL = 200_000, 10_000
"""The sizes of the long LSTM: 137 GiB, which one GPU of the table has, and 7 GiB."""
ROOM = 0.6
"""VRAM, as a share of what the step needs."""
FIRST_SECONDS = 2.0


class Case(NamedTuple):
    """A step to choose for: its size, its VRAM in bytes, and the seconds it may take.

    Without VRAM the GPUs have their own; None for seconds: no target.
    """

    trace: umem.Trace
    size: int
    vram: int | None
    one: float | None = None
    every: float | None = None


def cases(name: str, model_size: str) -> Iterator[Case]:
    np.random.seed(0)
    trace = umem.record_at(build(name, model_size).trainer(), SIZES)
    if name == LONG:
        yield Case(trace, LARGE, None, 5.0, 60.0)
        yield Case(trace, SMALL, None, 5.0, 20.0)
    else:
        vram = round(ROOM * trace.at(SIZE).peak_bytes)
        yield Case(trace, SIZE, vram, 10.0 if name == "ResNet50" else None)


def measure(name: str, model_size: str, repeats: int) -> Iterator[dict[str, Any]]:
    """For each case a row for one GPU, and one for all of the table."""
    for case in cases(name, model_size):
        at = case.trace.at(case.size)
        gpus = [gpu if case.vram is None else gpu.with_vram(case.vram) for gpu in GPUS.values()]
        one = [gpu for gpu in gpus if gpu.name == gpu_spec(GPU).name]
        for asked, target in ((one, case.one), (gpus, case.every)):
            found = [timed(case, asked) for _ in range(repeats)]
            yield {
                "model": name,
                "size": case.size,
                "op_count": sum(1 for _ in at.ops),
                "peak_bytes": at.peak_bytes,
                "vram_bytes": case.vram,
                "gpus": GPU if len(asked) == 1 else f"all {len(asked)}",
                **row(found[0][0], [(first, last) for _, first, last in found], target),
            }


def timed(case: Case, gpus: list[GpuSpec]) -> tuple[tuple[Choice, ...], float, float]:
    """The choices, and the processor time to the first result and to the last."""
    start = time.process_time()
    first = None
    search = Search(case.trace, gpus, case.size)
    for _ in search.found():
        first = first or time.process_time() - start
    return search.choices(), first or 0.0, time.process_time() - start


def row(
    choices: Sequence[Choice], seconds: list[tuple[float, float]], target: float | None
) -> dict[str, Any]:
    best = choices[0].best
    first, last = (common.summary(each).median for each in zip(*seconds, strict=True))
    passed = None if target is None else last < target and first < FIRST_SECONDS
    return {
        "first_cpu_seconds": first,
        "cpu_seconds": last,
        "cpu_repeats": [each for _, each in seconds],
        "target_seconds": target,
        "techniques": sum(len(choice.options) + len(choice.dropped) for choice in choices),
        "fit": sum(len(choice.options) for choice in choices),
        "simulated_best": None if best is None else best.name,
        "simulated_best_seconds": None if best is None else best.seconds,
        "passed": passed,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    one, every = (
        [row for row in rows if row["gpus"].startswith("all") is each] for each in (False, True)
    )
    judged = [row["passed"] for row in rows if row["passed"] is not None]
    return (
        f"For steps of up to {max(row['op_count'] for row in rows):,} operations the first result "
        f"is there within {_most(rows, 'first_cpu_seconds')} s, one GPU takes up to "
        f"{_most(one, 'cpu_seconds')} s and all GPUs of the table up to "
        f"{_most(every, 'cpu_seconds')} s of processor time; {sum(judged)} of {len(judged)} "
        "targets are met."
    )


def _most(rows: Sequence[dict[str, Any]], key: str) -> str:
    return figure(max(row[key] for row in rows))


BENCH = common.Bench(
    "choose",
    __doc__,
    answer,
    (
        text("model", "model"),
        counted("batch", "size"),
        text("GPUs", "gpus"),
        counted("operations", "op_count"),
        quantity("peak", "peak_bytes", "MiB", per=MIB),
        quantity("VRAM, if not its own", "vram_bytes", "MiB", per=MIB),
        counted("tried", "techniques"),
        counted("fit", "fit"),
        quantity("first result", "first_cpu_seconds", "CPU s"),
        quantity("last result", "cpu_seconds", "CPU s"),
        Column("least to most", lambda row: span(row["cpu_repeats"]), "CPU s"),
        text("best", "simulated_best"),
        quantity("its step", "simulated_best_seconds", "ms", per=1e-3),
        verdict(met="met", missed="too slow"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model, once.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@common.json_option
def main(quick: bool, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    models = QUICK if quick else {n: s for n, s in NETWORKS.items() if not names or n in names}
    repeats = 1 if quick else repeats
    rows = []
    for name, size in models.items():
        for row in measure(name, size, repeats):
            rows.append(row)
            click.echo(f"{name}, {row['gpus']}: {row['cpu_seconds']:.2f} s", err=True)
    options = {"quick": quick, "models": list(models), "room": ROOM, "repeats": repeats}
    BENCH.finish(rows, path, simulated=True, options=options)


if __name__ == "__main__":
    main()
