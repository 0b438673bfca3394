"""What do float16, and bfloat16 to store in, take of memory and time, and what is learnt with them?

Steps of a transformer and of a convolutional network with Adam on NumPy, in turn in one process, by
the processor's time: Chainer's own in float32, and under `umem.chainer.half_precision`
and `saved_in("bfloat16")`. Memory by tracemalloc, from before the model is made:
the peak of a step, and what is kept between steps. Ratios are medians of those of each turn. And
two small networks that learn, from the same start on the same batches: the loss on what was held
out, over three seeds; then half precision from a loss scale of 2**40, which overflows at first.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, Table, counted, figure, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from models.attention import TransformerLayer
from models.learners import Gratings, MaskedBytes

from umem.units import MIB

SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 100, 2
HELD_OUT, QUICK_HELD_OUT = 20, 1
"""Batches that the loss is the mean of."""
MOST_LOSS, MOST_TIME = 0.01, 1.5
FIRST_SCALE = 2.0**40
Technique = Callable[[Any, Any], AbstractContextManager[Any]]
TECHNIQUES: dict[str, Technique] = {
    "float32": lambda model, optimizer: nullcontext(),
    "half precision": lambda model, optimizer: umem.chainer.half_precision(model, optimizer),
    "saved in bfloat16": lambda model, optimizer: umem.chainer.saved_in("bfloat16"),
}


# -- a step --------------------------------------------------------------------------------------


class Words(chainer.Chain):  # type: ignore[misc]
    """A transformer of four layers, of width 256, that names the next of 4,096 words."""

    words, width = 4096, 256

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(self.words, self.width)
            self.layers = chainer.ChainList(*(TransformerLayer(self.width, 4) for _ in range(4)))
            self.score = L.Linear(self.width, self.words)

    def batch(self, quick: bool) -> tuple[Any, Any]:
        lines = np.random.default_rng(0).integers(0, self.words, (2 if quick else 8, 129))
        return lines[:, :-1].astype("i"), lines[:, 1:].reshape(-1).astype("i")

    def __call__(self, x: Any, t: Any) -> Any:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        return F.softmax_cross_entropy(self.score(F.reshape(y, (-1, self.width))), t)


class Pictures(chainer.Chain):  # type: ignore[misc]
    """Eight convolutions of 64 channels with batch normalisation, on pictures of 32 by 32."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.convs = chainer.ChainList(
                *(L.Convolution2D(n, 64, 3, pad=1) for n in (3, *[64] * 7))
            )
            self.norms = chainer.ChainList(*(L.BatchNormalization(64) for _ in range(8)))
            self.score = L.Linear(64, 10)

    def batch(self, quick: bool) -> tuple[Any, Any]:
        generator, count = np.random.default_rng(0), 2 if quick else 16
        x = generator.standard_normal((count, 3, 32, 32), np.float32)
        return x, generator.integers(0, 10, count).astype("i")

    def __call__(self, x: Any, t: Any) -> Any:
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            x = F.max_pooling_2d(x, 2) if place == 3 else x
        return F.softmax_cross_entropy(self.score(F.mean(x, axis=(2, 3))), t)


class Run:
    """A network and its optimizer, with steps under one technique."""

    def __init__(self, kind: Any, technique: str, quick: bool) -> None:
        np.random.seed(0)
        self.model = kind()
        self.optimizer = chainer.optimizers.Adam(1e-4).setup(self.model)
        self._batch, self._technique = self.model.batch(quick), TECHNIQUES[technique]

    def steps(self, count: int) -> float:
        """Take steps; returns the processor's seconds of the last."""
        with self._technique(self.model, self.optimizer):
            for _ in range(count):
                start = time.process_time()
                self.optimizer.update(self.model, *self._batch)
                seconds = time.process_time() - start
        return seconds

    def memory(self) -> tuple[int, int]:
        """The peak of a step, and what is kept between steps."""
        with self._technique(self.model, self.optimizer):
            self.optimizer.update(self.model, *self._batch)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            self.optimizer.update(self.model, *self._batch)
            return tracemalloc.get_traced_memory()[1], kept


def step(network: str, kind: Any, repeats: int, quick: bool) -> list[Row]:
    """A row for each technique, beside float32."""
    runs = {technique: Run(kind, technique, quick) for technique in TECHNIQUES}
    seconds: dict[str, list[float]] = {technique: [] for technique in TECHNIQUES}
    for _ in range(repeats):
        for technique, run in runs.items():
            seconds[technique].append(run.steps(2))
    del runs
    rows = []
    for technique, found in seconds.items():
        gc.collect()
        tracemalloc.start(1)
        peak, kept = Run(kind, technique, quick).memory()
        tracemalloc.stop()
        pairs = zip(found, seconds["float32"], strict=True)
        rows.append({
            "part": "step", "network": network, "technique": technique, "seconds": found,
            "ratio": statistics.median(a / b for a, b in pairs), "peak_bytes": peak,
            "kept_bytes": kept,
        })  # fmt: skip
    for row in rows:
        row["less"] = 1 - row["peak_bytes"] / rows[0]["peak_bytes"]
    return rows


# -- what is learnt ------------------------------------------------------------------------------


def learners() -> dict[str, Callable[[], Any]]:
    return {"language": lambda: MaskedBytes(common.HERE.parent / "docs"), "pictures": Gratings}


def learnt(network: str, seed: int, steps: int, held_out: int) -> Row:
    """The loss on what was held out, under each technique."""
    losses, skipped = {}, 0
    for name, technique in TECHNIQUES.items():
        np.random.seed(seed)
        model = learners()[network]()
        optimizer = chainer.optimizers.Adam(alpha=1e-3).setup(model)
        generator = np.random.default_rng(seed)
        with ExitStack() as stack:
            half = stack.enter_context(technique(model, optimizer))
            for step in range(steps):
                optimizer.alpha = 1e-3 * (1 - step / steps)  # to nothing: less noise at the end
                optimizer.update(model, *model.batch(generator, False))
            skipped += getattr(half, "skipped_steps", 0)
        losses[name] = loss_on_held_out(model, held_out)
    changes = {name: loss / losses["float32"] - 1 for name, loss in losses.items()}
    return {
        "part": "training", "network": network, "seed": seed, "steps": steps, "losses": losses,
        "changes": changes, "skipped_steps": skipped,
    }  # fmt: skip


def recovery(network: str, steps: int) -> Row:
    """Half precision from a scale at which every gradient overflows."""
    np.random.seed(0)
    model = learners()[network]()
    optimizer = chainer.optimizers.Adam(alpha=1e-3).setup(model)
    generator = np.random.default_rng(0)
    batch = model.batch(generator, False)
    with umem.chainer.half_precision(model, optimizer, scale=FIRST_SCALE) as half:
        losses = []
        for _ in range(steps):
            losses.append(float(model(*batch).array))
            optimizer.update(model, *batch)
        return {
            "part": "recovery", "network": network, "steps": steps, "first": losses[0],
            "last": losses[-1], "scale": half.scale, "skipped_steps": half.skipped_steps,
            "count": optimizer.t,
        }  # fmt: skip


def loss_on_held_out(model: Any, batches: int) -> float:
    generator = np.random.default_rng(10_000)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        found = [float(model(*model.batch(generator, True)).array) for _ in range(batches)]
    return statistics.fmean(found)


# -- the report ----------------------------------------------------------------------------------


def of(result: common.Result, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def mean_changes(rows: list[Row]) -> dict[tuple[str, str], float]:
    """By network and technique, how the mean loss over the seeds changes."""
    found = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        its = [row["losses"] for row in rows if row["network"] == network]
        whole = sum(losses["float32"] for losses in its)
        for name in its[0]:
            if name != "float32":
                found[network, name] = sum(losses[name] for losses in its) / whole - 1
    return found


def answer(result: common.Result) -> str:
    half = [row for row in of(result, "step") if row["technique"] == "half precision"]
    saved = [row for row in of(result, "step") if row["technique"] == "saved in bfloat16"]
    changes = mean_changes(of(result, "training")).values()
    return (
        f"Half precision takes {span((row['less'] for row in half), percent)} less memory at the "
        f"peak and {span(row['ratio'] for row in half)} of the time of float32 on this CPU, "
        f"activations saved in bfloat16 {span((row['less'] for row in saved), percent)} less and "
        f"{span(row['ratio'] for row in saved)} of the time; over the seeds the mean loss on what "
        f"is held out changes by {span(changes, lambda x: percent(x, signed=True))}."
    )


def tables(result: common.Result) -> list[Table]:
    step_table = Table(
        (
            text("network", "network"),
            text("technique", "technique"),
            quantity("a step", lambda row: statistics.median(row["seconds"]), "s"),
            quantity("time of float32", "ratio"),
            quantity("peak", "peak_bytes", "MiB", per=MIB),
            quantity("kept between steps", "kept_bytes", "MiB", per=MIB),
            text("less at the peak", lambda row: percent(row["less"])),
        ),
        of(result, "step"),
        "A step",
    )
    training = Table(
        (
            text("network", "network"),
            counted("seed", "seed"),
            quantity("loss in float32", lambda row: row["losses"]["float32"]),
            *(
                text(name, lambda row, name=name: percent(row["changes"][name], signed=True))
                for name in list(TECHNIQUES)[1:]
            ),
            counted("steps skipped", "skipped_steps"),
        ),
        of(result, "training"),
        "Change of the loss on what was held out",
    )
    recoveries = Table(
        (
            text("network", "network"),
            counted("steps", "steps"),
            counted("skipped", "skipped_steps"),
            quantity("loss at first", "first"),
            quantity("loss at last", "last"),
        ),
        of(result, "recovery"),
        "From a loss scale of 2**40",
    )
    return [step_table, training, recoveries]


def notes(result: common.Result) -> list[str]:
    kept = {
        f"{network}, {name}": abs(change) <= MOST_LOSS
        for (network, name), change in mean_changes(of(result, "training")).items()
    }
    half = [row for row in of(result, "step") if row["technique"] == "half precision"]
    times = {row["network"]: row["ratio"] <= MOST_TIME for row in half}
    return [
        f"Mean loss within {percent(MOST_LOSS)} over the seeds: {_judged(kept)}.",
        f"Half precision in at most {figure(MOST_TIME)} of the time of float32: {_judged(times)}.",
    ]


def _judged(found: dict[str, bool]) -> str:
    return "; ".join(f"{name} {'met' if met else 'missed'}" for name, met in found.items())


BENCH = common.Bench("half_precision", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True)
@click.option("--quick", is_flag=True, help="Small batches, one repeat, two steps, one seed.")
@common.json_option
def main(repeats: int, steps: int, quick: bool, path: Path | None) -> None:
    if quick:
        repeats, steps = 1, QUICK_STEPS
    common.writable(path)
    rows: list[Row] = []
    for network, kind in (("transformer", Words), ("convolutional", Pictures)):
        rows += step(network, kind, repeats, quick)
    for network in learners():
        for seed in SEEDS[: 1 if quick else None]:
            rows.append(learnt(network, seed, steps, QUICK_HELD_OUT if quick else HELD_OUT))
    rows += [recovery(network, 26 if quick else 60) for network in learners()]
    options = {"repeats": repeats, "steps": steps}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
