"""How near is the step time that `umem.choose` predicts to a run on the same virtual GPU?

Each technique that fits and is a block of code is run live in that block, on a
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
from models import build
from report_tables import counted, figure, quantity, text

import umem
import umem.chainer
from umem.predict.choosing import Option, choose
from umem.units import BLOCK_BYTES, MIB

GPU = "v100-16gb"
BATCHES = {
    ("residual", "12 blocks"): 16,
    ("transformer", "4 layers"): 32,
    ("mixer", "4 layers"): 64,
    ("MLP", "1,024 wide"): 512,
}
QUICK = {("residual", "3 narrow blocks"): 128}
ROOM = 0.6
SETTLING, STEPS = 4, 4
"""Steps before those that count: recomputation learns for three and lookahead then learns anew."""


def recorded(model: tuple[str, str], batch: int) -> umem.Trace:
    np.random.seed(0)
    step = build(*model).trainer()
    step(batch)
    with umem.record() as recorder:
        step(batch)
    return recorder.trace


def live(model: tuple[str, str], batch: int, option: Option, vram_bytes: int) -> list[float]:
    """Simulated seconds of the steps that count."""
    np.random.seed(0)
    step = build(*model).trainer()
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


def measure(model: tuple[str, str], batch: int) -> list[dict[str, Any]]:
    trace = recorded(model, batch)
    peak = choose(trace, "h200").options[0].peak_bytes
    assert peak is not None
    vram = max(4 * BLOCK_BYTES, round(ROOM * peak) // BLOCK_BYTES * BLOCK_BYTES)
    rows = []
    for option in choose(trace, GPU, vram=vram).options:
        if option.line is not None and not option.line.startswith("with "):
            continue  # it converts the optimizer or the model, before any block
        row = {
            "model": model[0],
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


def answer(result: common.Result) -> str:
    ran = [row for row in result["rows"] if not row["error"]]
    off = [abs(row["off_percent"]) for row in ran]
    near = sum(each <= 5 for each in off)
    rest = len(result["rows"]) - len(ran)
    return (
        f"Of {len(ran)} runs {near} took what was predicted within 5 %, and all within "
        f"{figure(max(off))} %; {rest or 'none'} did not run."
    )


BENCH = common.Bench(
    "choice_live",
    __doc__,
    answer,
    (
        text("model", "model"),
        counted("batch", "batch"),
        quantity("peak", "peak_bytes", "MiB", per=MIB),
        quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        text("technique", "technique"),
        quantity("predicted", "simulated_predicted_seconds", "ms", per=1e-3),
        quantity("live", "simulated_live_seconds", "ms", per=1e-3),
        quantity("off", "off_percent", "%", places=1, signed=True),
    ),
    notes=lambda result: [
        f"{row['model']}, {row['technique']} did not run: {row['error']}"
        for row in result["rows"]
        if row["error"]
    ],
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model.")
@click.option("--only", "names", multiple=True, type=click.Choice([name for name, _ in BATCHES]))
@common.json_option
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    wanted = QUICK if quick else {m: b for m, b in BATCHES.items() if not names or m[0] in names}
    rows = [row for model, batch in wanted.items() for row in measure(model, batch)]
    batches = {f"{name}, {size}": batch for (name, size), batch in wanted.items()}
    options = {"quick": quick, "batches": batches, "room": ROOM, "gpu": GPU}
    BENCH.finish(rows, path, simulated=True, options=options)


if __name__ == "__main__":
    main()
