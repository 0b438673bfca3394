"""How near is what half of each size is said to save to a recording of the halved model?

On NumPy, five models. Predicted: `umem.scale_each` on steps that were recorded at sizes of an
eighth to a half of what is asked for, each over the batch and one other axis; what changes the
operations is recorded apart with half of it, over the batch. Recorded: the step at the sizes asked
for with one of them halved, judged by the same replays on the model of a GPU. Precision is recorded
under ``umem.chainer.half_precision``, and judged as NumPy has it; bench/half_peaks.py has more of
that, and CuPy.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import figure, quantity, text, verdict

import umem
import umem.chainer
from umem.predict.techniques.changes import Changes
from umem.predict.techniques.step_variants import StepVariants
from umem.units import MIB

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L
from models.attention import TransformerLayer
from models.gcn import gcn
from models.model import RATES, labels, normal

LIMIT_PERCENT = 5.0
GPU = "t4"
Sizes = Mapping[str, int]
Step = Callable[..., None]


@lru_cache(maxsize=1)
def trained(make: Callable[..., Any], half: bool, **sizes: int) -> tuple[Any, Any]:
    """A model of these sizes and its optimizer; the last one is kept."""
    np.random.seed(0)
    model = make(**sizes)
    optimizer = chainer.optimizers.Adam(**RATES["Adam"]).setup(model)
    if half:
        umem.chainer.half_precision(model, optimizer)
    return model, optimizer


# -- the models ----------------------------------------------------------------------------------


def perceptron(width: int, depth: int) -> Any:
    hidden = [part for _ in range(depth) for part in (L.Linear(width, width), F.relu)]
    return chainer.Sequential(L.Linear(784, width), F.relu, *hidden, L.Linear(width, 10))


def pictures(batch: int) -> tuple[Any, ...]:
    return normal(batch, 784), labels(batch, classes=10)


def classified(model: Any, x: Any, t: Any) -> Any:
    return F.softmax_cross_entropy(model(x), t)


def convolutions(width: int, depth: int) -> Any:
    hidden = [
        part
        for _ in range(depth)
        for part in (L.Convolution2D(width, width, 3, pad=1), L.BatchNormalization(width), F.relu)
    ]
    return chainer.Sequential(L.Convolution2D(3, width, 3, pad=1), *hidden, L.Linear(None, 10))


def coloured(batch: int) -> tuple[Any, ...]:
    return normal(batch, 3, 32, 32), labels(batch, classes=10)


def recurrent(width: int, embedding: int) -> Any:
    return chainer.ChainList(
        L.EmbedID(2000, embedding), L.LSTM(embedding, width), L.Linear(width, 2000)
    )


def sentences(batch: int, length: int) -> tuple[Any, ...]:
    return (labels(batch, length + 1, classes=2000),)


def recurrent_loss(model: Any, words: Any) -> Any:
    embed, cell, score = model
    cell.reset_state()
    terms = [
        F.softmax_cross_entropy(score(cell(embed(words[:, place]))), words[:, place + 1])
        for place in range(words.shape[1] - 1)
    ]
    return sum(terms)


def transformer(width: int, depth: int) -> Any:
    parts = [TransformerLayer(width, 4) for _ in range(depth)]
    return chainer.ChainList(L.EmbedID(1000, width), *parts, L.Linear(width, 1000))


def pairs(batch: int, length: int) -> tuple[Any, ...]:
    return labels(batch, length, classes=1000), labels(batch * length, classes=1000)


def transformer_loss(model: Any, words: Any, t: Any) -> Any:
    embed, *parts, score = model
    x = embed(words)
    for part in parts:
        x = part(x)
    return F.softmax_cross_entropy(score(F.reshape(x, (words.size, -1))), t)


def graph_step(half: bool, nodes: int, width: int, depth: int) -> None:
    """One model a width and a depth, which has its input's makers with it."""
    model, optimizer = _graph(half, width, depth)
    optimizer.update(model.loss, *model.inputs(nodes))


@lru_cache(maxsize=1)
def _graph(half: bool, width: int, depth: int) -> tuple[Any, Any]:
    model = gcn(depth, width, 16, 5)
    optimizer = model.make_optimizer().setup(model.link)
    if half:
        umem.chainer.half_precision(model.link, optimizer)
    return model, optimizer


def stepping(make: Any, inputs: Any, loss: Any, own: tuple[str, ...]) -> Callable[..., None]:
    """A step by its sizes; ``own`` are those that parameters depend on.

    The batch is there until the update is over, as in Chainer's updaters.
    """

    def step(half: bool, **sizes: int) -> None:
        model, optimizer = trained(make, half, **{axis: sizes[axis] for axis in own})
        rest = {axis: size for axis, size in sizes.items() if axis not in own}
        optimizer.update(loss, model, *inputs(**rest))

    return step


@dataclass(frozen=True)
class Case:
    """A model, the sizes asked for, and those that it is recorded at.

    Attributes:
        step: takes ``half`` and all sizes.
        asked: the sizes.
        batch: the name of what is always recorded along, and its sizes.
        along: by axis, sizes that it is recorded at.
        apart: axes that half of is recorded apart.
    """

    step: Callable[..., None]
    asked: Sizes
    batch: tuple[str, tuple[int, ...]]
    along: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    apart: tuple[str, ...] = ()


CASES = {
    "MLP": Case(
        stepping(perceptron, pictures, classified, ("width", "depth")),
        {"batch": 4096, "width": 768, "depth": 4},
        ("batch", (256, 512)),
        {"width": (128, 256)},
        ("depth",),
    ),
    "CNN": Case(
        stepping(convolutions, coloured, classified, ("width", "depth")),
        {"batch": 16, "width": 32, "depth": 4},
        ("batch", (2, 4)),
        {"width": (8, 16)},
        ("depth",),
    ),
    "LSTM": Case(
        stepping(recurrent, sentences, recurrent_loss, ("width", "embedding")),
        {"batch": 64, "length": 8, "width": 256, "embedding": 256},
        ("batch", (16, 32)),
        {"width": (64, 128), "embedding": (64, 128)},
        ("length",),
    ),
    "transformer": Case(
        stepping(transformer, pairs, transformer_loss, ("width", "depth")),
        {"batch": 8, "length": 128, "width": 128, "depth": 4},
        ("batch", (2, 4)),
        {"length": (32, 64), "width": (32, 64)},
        ("depth",),
    ),
    "GCN": Case(
        graph_step,
        {"nodes": 8000, "width": 128, "depth": 4},
        ("nodes", (1000, 2000)),
        {"width": (32, 64)},
        ("depth",),
    ),
}
QUICK = {
    "MLP": Case(
        stepping(perceptron, pictures, classified, ("width", "depth")),
        {"batch": 1024, "width": 256, "depth": 2},
        ("batch", (128, 256)),
        {"width": (64, 128)},
        ("depth",),
    )
}


def recorded(case: Case, sizes: Mapping[str, tuple[int, ...]], fixed: Sizes) -> umem.Trace:
    """The step recorded over some axes, the others as they are."""
    others = {axis: size for axis, size in fixed.items() if axis not in sizes}
    return umem.record_at(lambda **point: case.step(False, **others, **point), sizes)


def predicted(case: Case) -> tuple[Any, int]:
    """What is said of half of each axis, and of half precision on NumPy."""
    name, sizes = case.batch
    traces = [
        recorded(case, {name: sizes, axis: along}, case.asked) for axis, along in case.along.items()
    ]
    halved = {
        axis: recorded(case, {name: sizes}, {**case.asked, axis: case.asked[axis] // 2})
        for axis in case.apart
    }
    known = {name, *case.along}
    asked = {axis: size for axis, size in case.asked.items() if axis in known}
    own = {axis: asked[axis] for axis in traces[0].axes}
    return umem.scale_each(traces, 0.5, GPU, asked, scaled=halved), on_numpy(
        traces[0], own, half=True
    )


def there(case: Case, sizes: Sizes, half: bool = False) -> umem.Trace:
    """The step as it was recorded at these sizes."""
    name = case.batch[0]
    others = {axis: size for axis, size in sizes.items() if axis != name}

    def step(size: int) -> None:
        case.step(half, **others, **{name: size})

    trace = umem.record_at(step, (sizes[name] // 2, sizes[name]))
    return umem.Trace(trace.events, trace.backend, trace.meta)


def on_gpu(trace: umem.Trace) -> int:
    """The peak on a GPU."""
    return umem.scale_each(trace, 0.5, GPU).peak_bytes


def on_numpy(trace: umem.Trace, size: Sizes | None = None, half: bool = False) -> int:
    """The peak on the host, as it is or in half precision."""
    return StepVariants(trace, (), size, Changes(half=half), correct="off").trace.peak_bytes


def measure(name: str, case: Case) -> list[dict[str, Any]]:
    advice, in_half = predicted(case)
    whole = there(case, case.asked)
    peak, host = on_gpu(whole), on_numpy(whole)
    rows = [_row(name, "nothing", advice.peak_bytes, peak, peak)]
    for row in advice.rows:
        if row.peak_bytes is None:
            continue
        if row.axis == "precision":
            found = on_numpy(there(case, case.asked, half=True))
            rows.append(_row(name, "precision, on NumPy", in_half, found, host))
        else:
            halved = {**case.asked, row.axis: case.asked[row.axis] // 2}
            rows.append(_row(name, row.axis, row.peak_bytes, on_gpu(there(case, halved)), peak))
        click.echo(f"{name}, {row.axis}: {rows[-1]['error_percent']:+.2f} %", err=True)
    return rows


def _row(name: str, axis: str, said: int, peak: int, whole: int) -> dict[str, Any]:
    error = 100 * (said / peak - 1)
    return {
        "model": name,
        "halved": axis,
        "predicted_bytes": said,
        "recorded_bytes": peak,
        "saved_percent": 100 * (1 - peak / whole),
        "error_percent": error,
        "passed": abs(error) <= LIMIT_PERCENT,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    worst = max(rows, key=lambda row: abs(row["error_percent"]))
    passed = sum(row["passed"] for row in rows)
    return (
        f"{passed} of {len(rows)} peaks of {len({row['model'] for row in rows})} models are within "
        f"{LIMIT_PERCENT:g} % of a recording; the worst, {worst['model']} with half of "
        f"{worst['halved']}, is {figure(abs(worst['error_percent']), 2)} % off."
    )


BENCH = common.Bench(
    "advice",
    __doc__,
    answer,
    (
        text("model", "model"),
        text("halved", "halved"),
        quantity("predicted", "predicted_bytes", "MiB", per=MIB),
        quantity("recorded", "recorded_bytes", "MiB", per=MIB),
        quantity("saves", "saved_percent", "%"),
        quantity("error", "error_percent", "%", places=2, signed=True),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small perceptron alone.")
@click.option("--model", "only", multiple=True, help="These models alone.")
@common.json_option
def main(quick: bool, only: tuple[str, ...], path: Path | None) -> None:
    rows = []
    for name, case in (QUICK if quick else CASES).items():
        if not only or name in only:
            rows += measure(name, case)
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "gpu": GPU, "only": only})


if __name__ == "__main__":
    main()
