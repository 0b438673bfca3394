"""How near is the peak that is predicted for a batch of 32 from batches of 4 and 8?

On NumPy, for models and optimizers of many kinds. Predicted: ``Trace.at(32).peak_bytes`` of a
step that ``umem.record_at`` recorded. Measured: the peak of tracemalloc over a real step at 32,
parameters, gradients, the optimizer's state and the input included, without Python's objects,
which are taken off as they are at the end of the forward pass, where the graph is largest.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import Model, build
from recompute_parts.steps import object_bytes
from report_tables import counted, figure, quantity, text, verdict

import umem
import umem.chainer
from umem.units import MIB

# isort: split
import chainer  # after the compatibility layer

MODELS = {
    "residual": "12 blocks",
    "ResNet50": "64 px",
    "VGG16": "32 px",
    "U-Net": "4 levels",
    "DenseNet": "18 layers",
    "DCGAN": "32 px",
    "autoencoder": "32 px",
    "transformer": "4 layers",
    "LSTM": "40 words",
    "GRU": "40 words",
    "language model": "4,000 words",
    "mixer": "4 layers",
    "MLP": "1,024 wide",
}
QUICK = {"residual": "3 narrow blocks", "MLP": "256 wide"}
SIZES = (4, 8)
SIZE = 32
HIGH_PERCENT, LOW_PERCENT = 5.0, -2.0


# -- measured ----------------------------------------------------------------------------------


def measured_peak(make: Callable[[], Model]) -> tuple[int, int]:
    """The peak of arrays over a step, and the bytes of Python's objects."""
    np.random.seed(0)
    gc.collect()
    tracemalloc.start(1)
    try:
        step = make().trainer()
        step(SIZE)  # makes the optimizer's state
        gc.collect()
        tracemalloc.reset_peak()
        step(SIZE)
        _, peak = tracemalloc.get_traced_memory()
        objects = objects_after_forward(step)
    finally:
        tracemalloc.stop()
    return peak - objects, objects


def objects_after_forward(step: Callable[[int], None]) -> int:
    """The most that Python's objects held where a backward pass began."""
    found: list[int] = []
    original = chainer.Variable.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(object_bytes())
        original(self, *args, **kwargs)

    chainer.Variable.backward = backward
    try:
        step(SIZE)
    finally:
        chainer.Variable.backward = original
    return max(found)


# -- predicted ---------------------------------------------------------------------------------


def predicted(make: Callable[[], Model]) -> dict[str, Any]:
    """The peak at the batches that are recorded and at the one that is not."""
    np.random.seed(0)
    start = time.process_time()
    trace = umem.record_at(make().trainer(), SIZES)
    seconds = time.process_time() - start
    at = trace.at(SIZE)
    return {
        "op_count": sum(1 for _ in at.ops),
        "recorded_bytes": trace.at(SIZES[-1]).peak_bytes,
        "predicted_bytes": at.peak_bytes,
        "record_seconds": seconds,
    }


def measure(name: str, size: str) -> dict[str, Any]:
    def make() -> Model:
        return build(name, size)

    peak, objects = measured_peak(make)
    gc.collect()
    found = predicted(make)
    error = 100 * (found["predicted_bytes"] / peak - 1)
    return {
        "model": name,
        "optimizer": make().optimizer,
        "measured_bytes": peak,
        "object_bytes": objects,
        **found,
        "error_percent": error,
        "passed": LOW_PERCENT <= error <= HIGH_PERCENT,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    errors = [row["error_percent"] for row in rows]
    return (
        f"Within {figure(max(map(abs, errors)), 2)} % of what was measured for {len(rows)} models, "
        f"and {sum(row['passed'] for row in rows)} of them are between {LOW_PERCENT:g} and "
        f"+{HIGH_PERCENT:g} %."
    )


BENCH = common.Bench(
    "prediction",
    __doc__,
    answer,
    (
        text("model", "model"),
        text("optimizer", "optimizer"),
        counted("operations", "op_count"),
        quantity(f"peak at {SIZES[-1]}", "recorded_bytes", "MiB", per=MIB),
        quantity(f"predicted at {SIZE}", "predicted_bytes", "MiB", per=MIB),
        quantity("measured", "measured_bytes", "MiB", per=MIB),
        quantity("error", "error_percent", "%", places=2, signed=True),
        quantity("recording", "record_seconds", "CPU s"),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small models.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(MODELS)))
@common.json_option
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    rows = []
    for name, size in (QUICK if quick else MODELS).items():
        if quick or not names or name in names:
            rows.append(measure(name, size))
            click.echo(f"{name}: {rows[-1]['error_percent']:+.2f} %", err=True)
    options = {"sizes": list(SIZES), "size": SIZE, "quick": quick}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
