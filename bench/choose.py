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
from prediction_parts.models import LONG, MODELS, QUICK, Model

import umem
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.predict.choosing import Choice, Search
from umem.units import format_bytes, format_seconds

QUESTION = (__doc__ or "").splitlines()[0]
NETWORKS = ("ResNet50", "transformer", "DCGAN", "LSTM", LONG.name)
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


def cases(model: Model) -> Iterator[Case]:
    np.random.seed(0)
    trace = umem.record_at(model.make(), SIZES)
    if model is LONG:
        yield Case(trace, LARGE, None, 5.0, 60.0)
        yield Case(trace, SMALL, None, 5.0, 20.0)
    else:
        vram = round(ROOM * trace.at(SIZE).peak_bytes)
        yield Case(trace, SIZE, vram, 10.0 if model.name == "ResNet50" else None)


def measure(model: Model, repeats: int) -> Iterator[dict[str, Any]]:
    """For each case a row for one GPU, and one for all of the table."""
    for case in cases(model):
        at = case.trace.at(case.size)
        gpus = [gpu if case.vram is None else gpu.with_vram(case.vram) for gpu in GPUS.values()]
        one = [gpu for gpu in gpus if gpu.name == gpu_spec(GPU).name]
        for asked, target in ((one, case.one), (gpus, case.every)):
            found = [timed(case, asked) for _ in range(repeats)]
            yield {
                "model": model.name,
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


def show(rows: list[dict[str, Any]]) -> None:
    common.show(
        f"choosing, with {ROOM:.0%} of the VRAM that the step needs, or its own (simulated)",
        (
            "model",
            "size",
            "GPU",
            "operations",
            "peak",
            "VRAM",
            "tried",
            "fit",
            "first CPU s",
            "CPU s",
            "spread",
            "best",
            "step",
            "",
        ),
        [
            (
                row["model"],
                row["size"],
                row["gpus"],
                row["op_count"],
                format_bytes(row["peak_bytes"]),
                "its own" if row["vram_bytes"] is None else format_bytes(row["vram_bytes"]),
                row["techniques"],
                row["fit"],
                f"{row['first_cpu_seconds']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{min(row['cpu_repeats']):.2f}-{max(row['cpu_repeats']):.2f}",
                row["simulated_best"],
                format_seconds(row["simulated_best_seconds"]),
                {True: "ok", False: "too slow", None: ""}[row["passed"]],
            )
            for row in rows
        ],
    )


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model, once.")
@click.option("--only", "names", multiple=True, type=click.Choice(NETWORKS))
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(quick: bool, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    wanted = names or NETWORKS
    models = [model for model in (*MODELS, LONG) if model.name in wanted]
    models = list(QUICK[:1]) if quick else models
    rows = []
    for model in models:
        for row in measure(model, 1 if quick else repeats):
            rows.append(row)
            click.echo(f"{model.name}, {row['gpus']}: {row['cpu_seconds']:.2f} s", err=True)
    show(rows)
    if path is not None:
        options = {
            "quick": quick,
            "models": [model.name for model in models],
            "room": ROOM,
            "repeats": 1 if quick else repeats,
        }
        common.write_json(
            path, common.report("choose", QUESTION, rows, simulated=True, options=options)
        )


if __name__ == "__main__":
    main()
