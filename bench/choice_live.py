"""How near is the step time that `umem.choose` predicts to a run on the same virtual GPU?

Each technique that fits is run live under the line of code that the choice gives for it, on a
virtual GPU with a share of the VRAM that the step needs; the host waits for the GPU after each
step. A run on the virtual GPU sees no workspace, and the trace has none either; `Recompute`
measures NumPy's all the same, plans with it, and may refuse a budget. The mean of the last steps is
compared with the prediction. Both are simulated; the arithmetic is real.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from prediction_parts.models import MODELS, QUICK, Model

import umem
import umem.chainer
from umem.predict.choosing import Option, choose
from umem.units import BLOCK_BYTES, format_bytes, format_seconds

QUESTION = (__doc__ or "").splitlines()[0]
GPU = "v100-16gb"
BATCHES = {"residual": 16, "transformer": 32, "mixer": 64, "MLP": 512}
ROOM = 0.6
SETTLING, STEPS = 4, 4
"""Steps before those that count: recomputation learns for three and lookahead then learns anew."""


def recorded(model: Model, batch: int) -> umem.Trace:
    np.random.seed(0)
    step = model.make()
    step(batch)
    with umem.record() as recorder:
        step(batch)
    return recorder.trace


def live(model: Model, batch: int, option: Option, vram_bytes: int) -> list[float]:
    """Simulated seconds of the steps that count."""
    np.random.seed(0)
    step = model.make()
    step(batch)
    ends: list[float] = []
    with umem.virtual_gpu(GPU, vram_bytes) as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore", umem.errors.LookaheadWarning)

        def train() -> None:
            for _ in range(SETTLING + STEPS):
                step(batch)
                gpu.synchronize()
                ends.append(gpu.figures.seconds)

        exec(f"{option.line or 'if True:'}\n    train()", {"umem": umem, "train": train})
    return [after - before for before, after in pairwise(ends)][-STEPS:]


def measure(model: Model, batch: int) -> list[dict[str, Any]]:
    trace = recorded(model, batch)
    peak = choose(trace, "h200").options[0].peak_bytes
    assert peak is not None
    vram = max(4 * BLOCK_BYTES, round(ROOM * peak) // BLOCK_BYTES * BLOCK_BYTES)
    rows = []
    for option in choose(trace, GPU, vram=vram).options:
        row = {
            "model": model.name,
            "batch": batch,
            "peak_bytes": peak,
            "vram_bytes": vram,
            "technique": option.name,
            "simulated_predicted_seconds": option.seconds,
        }
        try:
            steps = live(model, batch, option, vram)
        except umem.UmemError as error:
            rows.append({**row, "error": str(error).partition(";")[0]})
            continue
        mean = sum(steps) / len(steps)
        assert option.seconds is not None
        rows.append(
            {
                **row,
                "error": None,
                "simulated_live_seconds": mean,
                "simulated_live_steps": steps,
                "off_percent": round(100 * (option.seconds / mean - 1), 3),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    common.show(
        f"a step on {GPU} with {ROOM:.0%} of the VRAM that it needs (all simulated)",
        ("model", "batch", "VRAM", "technique", "predicted", "live", "off"),
        [
            (
                row["model"],
                row["batch"],
                format_bytes(row["vram_bytes"]),
                row["technique"],
                format_seconds(row["simulated_predicted_seconds"]),
                "did not run" if row["error"] else format_seconds(row["simulated_live_seconds"]),
                None if row["error"] else f"{row['off_percent']:+.1f} %",
            )
            for row in rows
        ],
    )
    for row in rows:
        if row["error"]:
            print(f"{row['model']}, {row['technique']}: {row['error']}")


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(BATCHES)))
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    wanted = {QUICK[0].name: 128} if quick else BATCHES
    rows = []
    for model in (*MODELS, *QUICK):
        if model.name in wanted and (quick or not names or model.name in names):
            rows += measure(model, wanted[model.name])
    show(rows)
    if path is not None:
        options = {"quick": quick, "batches": wanted, "room": ROOM, "gpu": GPU}
        common.write_json(
            path, common.report("choice_live", QUESTION, rows, simulated=True, options=options)
        )


if __name__ == "__main__":
    main()
