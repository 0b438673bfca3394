"""Does the batch that is found without a trial fit, and the next one not, for 13 models and 5 GPUs?

Found: `umem.predict.batches`, on a step recorded at batches of 4 and 8.
Judged by other code than the search's, that of ``umem.choose``: a steady step at the found batch,
and at the next one, through the pool of the virtual GPU in plain memory. ``scaled`` judges the
recorded step taken to both batches; ``recorded``, for some models and little VRAM, a real step that
was recorded at both: it has the workspace that NumPy really takes, which the scaled one predicts.
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
from models import build
from prediction import MODELS, QUICK, SIZES
from report_tables import counted, quantity, text, verdict

import umem
import umem.chainer
from umem.devices.specs import gpu_spec
from umem.errors import BudgetError
from umem.predict.batches.finding import batches_of
from umem.predict.techniques.step_variants import StepVariants
from umem.units import GIB, MIB

GPU = "t4"
VRAMS = (512 * MIB, GIB, 4 * GIB, 15 * GIB, 80 * GIB)
QUICK_VRAMS = (64 * MIB, GIB)
FOUND = ("quickest_batch", "replay_count", "seconds", "scaled", "recorded")
RECORDED_BYTES = 512 * MIB
"""Up to so much VRAM the found batches of these models are also recorded."""
RECORDED_MODELS = ("autoencoder", "language model", "MLP")


def fits(trace: umem.Trace, vram: int, batch: int) -> bool:
    """Whether a steady step of a batch fits, as umem.choose judges it."""
    spec = gpu_spec(GPU).with_vram(vram)
    return StepVariants(trace, [spec], batch).fits(spec)


def measure(name: str, vram: int, trace: umem.Trace, step: Callable[[int], Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "vram_bytes": vram, **dict.fromkeys(FOUND)}
    start = time.process_time()
    try:
        found = batches_of(trace, GPU, vram=vram)
    except BudgetError:
        return {**row, "batch": 0, "passed": not fits(trace, vram, 1)}
    seconds = time.process_time() - start
    pair = found.batch, found.batch + 1
    scaled = [fits(trace, vram, batch) for batch in pair]
    recorded = None
    if vram <= RECORDED_BYTES and name in RECORDED_MODELS:
        real = umem.record_at(step, pair)
        recorded = [fits(real, vram, batch) for batch in pair]
    return {
        **row,
        "batch": found.batch,
        "next_batch": found.next_batch,
        "quickest_batch": found.quickest.batch,
        "replay_count": found.replay_count,
        "all_replay_count": found.all_replay_count,
        "seconds": seconds,
        "scaled": said(scaled),
        "recorded": None if recorded is None else said(recorded),
        "passed": scaled == [True, False],
    }


def said(both: list[bool]) -> str:
    """Whether a batch, and the next one, fit."""
    return {
        (True, False): "fits, next not",
        (True, True): "both fit",
        (False, False): "neither fits",
        (False, True): "only the next",
    }[both[0], both[1]]


def answer(result: common.Result) -> str:
    rows = [row for row in result["rows"] if row["batch"]]
    live = [row for row in rows if row["recorded"]]
    agreed = sum(row["recorded"] == "fits, next not" for row in live)
    exact = sum(row["passed"] for row in rows)
    most = max((row["replay_count"] for row in rows), default=0)
    without = len(result["rows"]) - len(rows)
    least = f", {without} more have no room for a batch of one" if without else ""
    return (
        f"For {exact} of {len(rows)} pairs of a model and VRAM the batch fits and the next one "
        f"does not, in at most {most} replays; of {len(live)} of them that were recorded "
        f"at both batches {agreed} agree{least}."
    )


BENCH = common.Bench(
    "batches",
    __doc__,
    answer,
    (
        text("model", "model"),
        quantity("VRAM", "vram_bytes", "GiB", per=GIB, places=1),
        counted("largest batch", "batch"),
        counted("quickest", "quickest_batch"),
        counted("replays", "replay_count"),
        quantity("search, simulated", "seconds", "CPU s", places=2),
        text("scaled", "scaled"),
        text("recorded", "recorded"),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small models, two sizes of VRAM.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    rows = []
    for name, size in (QUICK if quick else MODELS).items():
        np.random.seed(0)
        step = build(name, size).trainer()
        trace = umem.record_at(step, SIZES)
        for vram in QUICK_VRAMS if quick else VRAMS:
            rows.append(measure(name, vram, trace, step))
            click.echo(f"{name}, {vram / GIB:g} GiB: {rows[-1]['batch']:,}", err=True)
    options = {"quick": quick, "gpu": GPU, "sizes": list(SIZES)}
    BENCH.finish(rows, path, simulated=True, options=options)


if __name__ == "__main__":
    main()
