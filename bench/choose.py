"""How long does it take to choose among all techniques, for one GPU and for every GPU?

Processor time of `umem.choose` and `umem.choosing.choose_each` on one recorded step, on a GPU
with so little VRAM that the step does not fit, so that every technique has something to do. The
target is 10 s for one GPU on ResNet50's step. What the choice says is simulated.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from prediction_parts.models import MODELS, QUICK, Model

import umem
from umem.choosing import Choice, choose, choose_each
from umem.devices.specs import GPUS, gpu_spec
from umem.units import format_bytes, format_seconds

QUESTION = (__doc__ or "").splitlines()[0]
NETWORKS = ("ResNet50", "transformer", "DCGAN", "LSTM")
GPU = "t4"
SIZES, SIZE = (4, 8), 32
ROOM = 0.6
"""VRAM, as a share of what the step needs."""
TARGET_SECONDS = 10.0


def recorded(model: Model) -> umem.Trace:
    np.random.seed(0)
    return umem.record_at(model.make(), SIZES)


def measure(model: Model, repeats: int) -> list[dict[str, Any]]:
    """A row for one GPU, and one for all of the table."""
    trace = recorded(model)
    at = trace.at(SIZE)
    vram = round(ROOM * at.peak_bytes)
    gpus = [spec.with_vram(vram) for spec in GPUS.values()]
    shared = {
        "model": model.name,
        "op_count": sum(1 for _ in at.ops),
        "peak_bytes": at.peak_bytes,
        "vram_bytes": vram,
    }
    one, seconds = timed(repeats, lambda: choose(trace, gpu_spec(GPU), SIZE, vram=vram))
    every, of_every = timed(repeats, lambda: choose_each(trace, gpus, SIZE))
    judged = model.name == "ResNet50"
    first = {**shared, "gpus": GPU, **row([one], seconds)}
    first["passed"] = first["cpu_seconds"] < TARGET_SECONDS if judged else None
    return [first, {**shared, "gpus": f"all {len(gpus)}", **row(every, of_every), "passed": None}]


def timed(repeats: int, ask: Callable[[], Any]) -> tuple[Any, list[float]]:
    """An answer, and the processor time of each time that it was asked for."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        answer = ask()
        seconds.append(time.process_time() - start)
    return answer, seconds


def row(choices: list[Choice], seconds: list[float]) -> dict[str, Any]:
    best = choices[0].best
    return {
        "cpu_seconds": common.summary(seconds).median,
        "cpu_repeats": seconds,
        "techniques": sum(len(choice.options) + len(choice.dropped) for choice in choices),
        "fit": sum(len(choice.options) for choice in choices),
        "simulated_best": None if best is None else best.name,
        "simulated_best_seconds": None if best is None else best.seconds,
    }


def show(rows: list[dict[str, Any]]) -> None:
    common.show(
        f"choosing at size {SIZE}, with {ROOM:.0%} of the VRAM that the step needs (simulated)",
        ("model", "GPU", "operations", "peak", "VRAM", "tried", "fit", "CPU s", "spread", "best",
         "step", ""),
        [
            (
                row["model"], row["gpus"], row["op_count"], format_bytes(row["peak_bytes"]),
                format_bytes(row["vram_bytes"]), row["techniques"], row["fit"],
                f"{row['cpu_seconds']:.2f}",
                f"{min(row['cpu_repeats']):.2f}-{max(row['cpu_repeats']):.2f}",
                row["simulated_best"], format_seconds(row["simulated_best_seconds"]),
                {True: "ok", False: "too slow", None: ""}[row["passed"]],
            )
            for row in rows
        ],
    )  # fmt: skip


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model, once.")
@click.option("--only", "names", multiple=True, type=click.Choice(NETWORKS))
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(quick: bool, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    wanted = names or NETWORKS
    models = QUICK[:1] if quick else [model for model in MODELS if model.name in wanted]
    rows = []
    for model in models:
        rows += measure(model, 1 if quick else repeats)
        click.echo(f"{model.name}: {rows[-2]['cpu_seconds']:.2f} s for one GPU", err=True)
    show(rows)
    if path is not None:
        options = {"quick": quick, "models": [model.name for model in models], "size": SIZE,
                   "room": ROOM, "repeats": 1 if quick else repeats}  # fmt: skip
        common.write_json(
            path, common.report("choose", QUESTION, rows, simulated=True, options=options)
        )


if __name__ == "__main__":
    main()
