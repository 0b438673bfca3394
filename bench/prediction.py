"""How near is the peak that is predicted for a batch of 32 from batches of 4 and 8?

On NumPy, for models and optimizers of many kinds. Predicted: ``Trace.at(32).peak_bytes`` of a
step that ``umem.record_at`` recorded. Measured: the peak of tracemalloc over a real step at 32,
parameters, gradients, the optimizer's state and the input included, without Python's objects,
which are taken off as they are at the end of the forward pass, where the graph is largest.
Beside it, the processor time of a replay of each step at 32 on the model of a GPU that has half
of the memory that the step needs, scaling included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from prediction_parts.models import MODELS, QUICK, Model, Step

import umem
from umem.units import format_bytes, format_seconds

# isort: split
import chainer  # after the compatibility layer

QUESTION = (__doc__ or "").splitlines()[0]
SIZES = (4, 8)
SIZE = 32
GPU = "v100-16gb"
HIGH_PERCENT, LOW_PERCENT = 5.0, -2.0


# -- measured ----------------------------------------------------------------------------------


def object_bytes() -> int:
    """Bytes that tracemalloc follows now and that are not arrays."""
    others = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([others]).traces
    return sum(trace.size for trace in traces)


def measured_peak(model: Model) -> tuple[int, int]:
    """The peak of arrays over a step, and the bytes of Python's objects."""
    np.random.seed(0)
    gc.collect()
    tracemalloc.start(1)
    try:
        step = model.make()
        step(SIZE)  # makes the optimizer's state
        gc.collect()
        tracemalloc.reset_peak()
        step(SIZE)
        _, peak = tracemalloc.get_traced_memory()
        objects = objects_after_forward(step)
    finally:
        tracemalloc.stop()
    return peak - objects, objects


def objects_after_forward(step: Step) -> int:
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


def predicted(model: Model) -> dict[str, Any]:
    """The peak, and how long its replay takes."""
    np.random.seed(0)
    start = time.process_time()
    trace = umem.record_at(model.make(), SIZES)
    recorded = time.process_time()
    at = trace.at(SIZE)
    scaled = time.process_time()
    repeats = [replay_seconds(trace, at.peak_bytes // 2) for _ in range(3)]
    return {
        "op_count": sum(1 for _ in at.ops),
        "recorded_bytes": trace.at(SIZES[-1]).peak_bytes,
        "predicted_bytes": at.peak_bytes,
        "record_seconds": recorded - start,
        "scale_seconds": scaled - recorded,
        "replay_seconds": common.summary(repeats).median,
        "replay_repeats": repeats,
    }


def replay_seconds(trace: umem.Trace, vram_bytes: int) -> float:
    """Processor seconds of a replay at another size, scaling included."""
    start = time.process_time()
    umem.replay(trace, GPU, vram=vram_bytes, size=SIZE)
    return time.process_time() - start


def measure(model: Model) -> dict[str, Any]:
    peak, objects = measured_peak(model)
    gc.collect()
    found = predicted(model)
    error = 100 * (found["predicted_bytes"] / peak - 1)
    return {
        "model": model.name,
        "optimizer": model.optimizer,
        "measured_bytes": peak,
        "object_bytes": objects,
        **found,
        "error_percent": error,
        "passed": LOW_PERCENT <= error <= HIGH_PERCENT,
    }


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small models.")
@click.option("--only", "names", multiple=True, type=click.Choice([m.name for m in MODELS]))
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    rows = []
    for model in QUICK if quick else [m for m in MODELS if not names or m.name in names]:
        rows.append(measure(model))
        click.echo(f"{model.name}: {rows[-1]['error_percent']:+.2f} %", err=True)
    show(rows)
    if path is not None:
        options = {"sizes": list(SIZES), "size": SIZE, "quick": quick, "gpu": GPU}
        common.write_json(
            path, common.report("prediction", QUESTION, rows, simulated=False, options=options)
        )


def show(rows: list[dict[str, Any]]) -> None:
    columns = (
        "model",
        "optimizer",
        "operations",
        f"at {SIZES[-1]}",
        "predicted",
        "measured",
        "error",
        "replay",
        "",
    )
    lines = [
        [
            row["model"],
            row["optimizer"],
            row["op_count"],
            *(format_bytes(row[f"{name}_bytes"]) for name in ("recorded", "predicted", "measured")),
            f"{row['error_percent']:+.2f} %",
            format_seconds(row["replay_seconds"]),
            "ok" if row["passed"] else "off",
        ]
        for row in rows
    ]
    common.show(f"peak at {SIZE} from {SIZES}, replay on {GPU} (simulated)", columns, lines)


if __name__ == "__main__":
    main()
