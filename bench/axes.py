"""How near is the peak that is predicted at 8 times the recorded length, width or edge?

On NumPy. Predicted: ``Trace.at`` of a step that ``umem.record_at`` recorded over two axes, the
batch and another, at two small sizes each (and a third where it sees that arrays grow faster).
Recorded: the same step, recorded at the batch and at 8 times the larger size of the other axis:
tensors and workspace, which the first knows only from small arrays.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import build
from report_tables import counted, figure, quantity, text, verdict

import umem
import umem.chainer
from umem.units import MIB

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L
from models.attention import TransformerLayer
from models.model import labels, normal

LIMIT_PERCENT = 2.0
TIMES = 8
Step = Callable[..., None]


@lru_cache(maxsize=1)  # a width has parameters of its own
def transformer(layers: int, width: int) -> tuple[Any, Any]:
    parts = [TransformerLayer(width, 4) for _ in range(layers)]
    model = chainer.ChainList(*parts, L.Linear(width, 100))
    return model, chainer.optimizers.Adam(1e-4).setup(model)


def transformer_step(batch: int, length: int = 64, width: int = 128, layers: int = 4) -> None:
    (*parts, score), optimizer = list(transformer(layers, width)[0]), transformer(layers, width)[1]

    def loss() -> Any:
        x, t = normal(batch, length, width), labels(batch * length, classes=100)
        for part in parts:
            x = part(x)
        return F.softmax_cross_entropy(score(F.reshape(x, (-1, width))), t)

    optimizer.update(loss)


def image_step(name: str, size: str) -> Step:
    model = build(name, size)
    optimizer = model.make_optimizer().setup(model.link)

    def step(batch: int, edge: int) -> None:
        optimizer.update(lambda: model.loss(*model.inputs(batch, edge)))

    return step


CASES: dict[str, tuple[Callable[[], Step], str, tuple[int, int]]] = {
    "transformer": (lambda: transformer_step, "length", (32, 64)),
    "transformer, short": (lambda: transformer_step, "length", (16, 32)),
    "transformer, wide": (lambda: transformer_step, "width", (64, 128)),
    "DenseNet": (lambda: image_step("DenseNet", "18 layers"), "edge", (16, 32)),
    "U-Net": (lambda: image_step("U-Net", "4 levels"), "edge", (16, 32)),
}
QUICK = {"transformer, short": CASES["transformer, short"]}
BATCHES = (2, 4)


def measure(name: str, make: Callable[[], Step], axis: str, sizes: tuple[int, int]) -> Any:
    np.random.seed(0)
    step = make()
    start = time.process_time()
    trace = umem.record_at(step, {"batch": BATCHES, axis: sizes})
    seconds = time.process_time() - start
    asked = {"batch": BATCHES[-1], axis: TIMES * sizes[1]}
    predicted = trace.at(asked)
    real = umem.record_at(lambda size: step(**{**asked, "batch": size}), BATCHES).at(BATCHES[-1])
    error = 100 * (predicted.peak_bytes / real.peak_bytes - 1)
    flops = [sum(op.flops for op in each.ops) for each in (predicted, real)]
    return {
        "model": name,
        "axis": f"{axis} {sizes[0]}, {sizes[1]}",
        "asked": asked[axis],
        "recording_count": len(trace.sizes),
        "record_seconds": seconds,
        "first_bytes": trace.at({"batch": BATCHES[-1], axis: sizes[0]}).peak_bytes,
        "predicted_bytes": predicted.peak_bytes,
        "recorded_bytes": real.peak_bytes,
        "error_percent": error,
        "flops_equal": flops[0] == flops[1],
        "passed": abs(error) <= LIMIT_PERCENT,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    worst = max(abs(row["error_percent"]) for row in rows)
    passed = sum(row["passed"] for row in rows)
    return (
        f"Within {figure(worst, 2)} % of a recording there for {len(rows)} steps, and {passed} of "
        f"them within {LIMIT_PERCENT:g} %."
    )


BENCH = common.Bench(
    "axes",
    __doc__,
    answer,
    (
        text("model", "model"),
        text("recorded at", "axis"),
        counted("asked", "asked"),
        counted("recordings", "recording_count"),
        quantity("recording", "record_seconds", "CPU s"),
        quantity("peak at the first", "first_bytes", "MiB", per=MIB),
        quantity("predicted", "predicted_bytes", "MiB", per=MIB),
        quantity("recorded there", "recorded_bytes", "MiB", per=MIB),
        quantity("error", "error_percent", "%", places=2, signed=True),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="The short transformer alone.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    rows = [measure(name, *case) for name, case in (QUICK if quick else CASES).items()]
    options = {"quick": quick, "batches": list(BATCHES), "times": TIMES}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
