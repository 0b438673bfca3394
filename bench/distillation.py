"""What does a small network learn from a large one, of digits that nobody has labelled?

A fifth of the digits that are learned from have labels; the rest is seen without. The teacher is a
64-256-256-10 perceptron that was trained by Adam on those labels alone, or the mean of five such
from other starts; the student a 64-112-112-10 perceptron, with a quarter of the parameters of one.
Each student is trained twice from the same start, by as many updates on the same labelled batches
in the same order: on the labels alone, and by `umem.chainer.DistillingUpdater` on these and on
batches without labels. So one pair a seed; its accuracy is that of 5-fold cross-validation, in
which each of the 1,797 digits is asked once. Temperature and weight are the best of four pairs that
were tried on three of the seeds with one network for a teacher. And what a step takes of time and
memory beside one without a teacher, by turns in one process: peaks by tracemalloc, over what was
there before.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, Table, counted, figure, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator, ShuffleOrderSampler
from models import digits
from models.digits import DigitPerceptron, Digits

from umem.units import KIB

TEACHERS = {"one network": 1, "five networks": 5}
WIDTH, SMALL = 256, 112
SEEDS, UPDATES, FOLDS = tuple(range(10)), 400, 5
BATCH = 64
TEMPERATURE, WEIGHT = 1.0, 1.0
TRIED = (0, 1, 2)
"""The seeds on which these were chosen."""
LEAST_GAIN = 0.5
"""The points that a teacher is to bring."""


class Mean(chainer.ChainList):  # type: ignore[misc]
    """Networks that are asked together."""

    def forward(self, x: Any) -> Any:
        total = 0.0
        for network in self:
            total = total + network(x)
        return total / len(self)


def made(width: int, seed: int) -> Any:
    np.random.seed(seed)
    return DigitPerceptron(width)


def iterator(items: Any, seed: int) -> Any:
    return SerialIterator(items, BATCH, order_sampler=ShuffleOrderSampler(_state(seed)))


def _state(seed: int) -> Any:
    return np.random.RandomState(seed)


def updater(student: Any, teacher: Any, data: Digits, more: Any, seed: int, **how: Any) -> Any:
    """An updater; with a weight of 0 it is plain training, to the bit."""
    return umem.chainer.DistillingUpdater(
        iterator(TupleDataset(data.images, data.labels), seed),
        chainer.optimizers.Adam().setup(student),
        teacher,
        unlabelled=iterator(more, seed + 1),
        temperature=TEMPERATURE,
        **how,
    )


def trained(width: int, start: int, teacher: Any, *data: Any, weight: float, updates: int) -> Any:
    """A network after its updates."""
    student = made(width, start)
    one = updater(student, teacher, *data, weight=weight)
    for _ in range(updates):
        one.update()
    return student


# -- accuracy ------------------------------------------------------------------------------------


def shared(train: Digits, seed: int) -> tuple[Digits, Any]:
    """A fifth with labels, with equal shares of the classes, and the images of the rest."""
    part = next(iter(digits.folds(train, seed)))
    return part.test, part.train.images


def of_fold(fold: digits.Fold, seed: int, place: int, updates: int) -> dict[str, Any]:
    """How many of a fold's digits are read: by each teacher, and by the student of each."""
    data = (*shared(fold.train, seed), seed)
    start = 1000 * seed + 100 * place
    nobody = made(1, 0)
    many = max(TEACHERS.values())
    large = [
        trained(WIDTH, start + at, nobody, *data, weight=0, updates=updates) for at in range(many)
    ]
    alone = trained(SMALL, start + 50, nobody, *data, weight=0, updates=updates)
    found: dict[str, Any] = {"plain": digits.correct_count(alone, fold.test)}
    for name, count in TEACHERS.items():
        teacher = Mean(*large[:count])
        student = trained(SMALL, start + 50, teacher, *data, weight=WEIGHT, updates=updates)
        found[name] = [digits.correct_count(one, fold.test) for one in (teacher, student)]
    return found


def pairs(data: Digits, seeds: tuple[int, ...], updates: int, folds: int) -> list[Row]:
    """A row for each teacher and seed."""
    rows: list[Row] = []
    for seed in seeds:
        every = list(digits.folds(data, seed, FOLDS))[:folds]
        asked = sum(len(fold.test.labels) for fold in every)
        found = [of_fold(fold, seed, place, updates) for place, fold in enumerate(every)]
        for name in TEACHERS:
            teacher, student = (sum(one[name][at] for one in found) / asked for at in (0, 1))
            plain = sum(one["plain"] for one in found) / asked
            rows.append({
                "part": "pairs", "teacher": name, "seed": seed, "taught": student,
                "plain": plain, "of_teacher": teacher, "gain": 100 * (student - plain),
            })  # fmt: skip
        click.echo(f"seed {seed}", err=True)
    return rows


# -- a step --------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "labels alone": {"weight": 0},
    "teacher in float32": {"weight": WEIGHT},
    "teacher in float16": {"weight": WEIGHT, "teacher_precision": "float16"},
}


def steps(data: Digits, repeats: int, calls: int) -> list[Row]:
    """A row for each way to take a step; all on as many rows, half of them without labels."""
    half = len(data.labels) // 2
    first, more = data.at(np.arange(half)), data.images[half:]
    teacher = made(WIDTH, 0)
    every = {name: updater(made(SMALL, 1), teacher, first, more, 0, **how)
             for name, how in WAYS.items()}  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, one in every.items():
            start = time.process_time()
            for _ in range(calls):
                one.update()
            if repeat:  # the first one warms up
                seconds[name].append((time.process_time() - start) / calls)
    rows, x = [], data.images[: 2 * BATCH]
    for name, one in every.items():
        compared = zip(seconds[name], seconds["labels alone"], strict=True)
        asked = 0 if name == "labels alone" else peak(lambda one=one: one.loss.teacher(0, x))
        rows.append({
            "part": "step", "way": name, "seconds": seconds[name],
            "ratio": statistics.median(a / b for a, b in compared),
            "peak_bytes": peak(one.update), "asked_bytes": asked,
            "teacher_bytes": one.loss.teacher.parameter_bytes,
        })  # fmt: skip
    return rows


def largest_layer_bytes() -> int:
    """What the teacher's widest layer reads and makes, for a batch of both halves."""
    return 2 * BATCH * 4 * (WIDTH + WIDTH)


def peak(call: Callable[[], Any]) -> int:
    """The most that a call takes over what was there before."""
    call()
    gc.collect()
    tracemalloc.start(1)
    call()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


# -- the report ----------------------------------------------------------------------------------


def of(result: common.Result, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def gains(result: common.Result) -> dict[str, tuple[float, float | None]]:
    """By teacher, the mean gain in points and its standard error, which one seed has not."""
    found = {}
    for name in dict.fromkeys(row["teacher"] for row in of(result, "pairs")):
        each = [row["gain"] for row in of(result, "pairs") if row["teacher"] == name]
        error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
        found[name] = statistics.fmean(each), error
    return found


def points(value: float) -> str:
    return figure(value, 2, signed=True)


def _said(error: float | None) -> str:
    return "unknown" if error is None else figure(error, 2)


def answer(result: common.Result) -> str:
    said = " and ".join(
        f"{points(gain)} points (standard error {_said(error)}) by {name}"
        for name, (gain, error) in gains(result).items()
    )
    ratios = [row["ratio"] for row in of(result, "step") if row["way"] != "labels alone"]
    return (
        f"A student with a quarter of the parameters gains {said} over the same student on the "
        f"labels alone, where a step takes {span(ratios)} of the time."
    )


def tables(result: common.Result) -> list[Table]:
    def mean(key: str) -> Callable[[Row], str]:
        return lambda row: percent(statistics.fmean(row[key]))

    rows: list[Row] = []
    for name, (gain, error) in gains(result).items():
        its = [row for row in of(result, "pairs") if row["teacher"] == name]
        keys = ("of_teacher", "plain", "taught")
        rows.append({
            "teacher": name, "seeds": len(its), "gain": gain, "error": error,
            **{key: [row[key] for row in its] for key in keys},
            "of_seeds": span((row["gain"] for row in its), points),
        })  # fmt: skip
    return [
        Table(
            (
                text("teacher", "teacher"),
                counted("seeds", "seeds"),
                text("teacher's accuracy", mean("of_teacher")),
                text("student on labels alone", mean("plain")),
                text("student with the teacher", mean("taught")),
                text("points gained", lambda row: points(row["gain"])),
                quantity("standard error", "error", places=2),
                text("points of a seed", "of_seeds"),
            ),
            rows,
            "Digits that are read, in the mean over the seeds",
        ),
        Table(
            (
                text("a step with", "way"),
                quantity("time", lambda row: statistics.median(row["seconds"]) * 1e3, "ms"),
                quantity("of that on labels alone", "ratio"),
                quantity("peak over what stays", "peak_bytes", "KiB", per=KIB),
                quantity("teacher's parameters", "teacher_bytes", "KiB", per=KIB),
                quantity("while it is asked", "asked_bytes", "KiB", per=KIB),
            ),
            of(result, "step"),
            "A step of the student",
        ),
    ]


def notes(result: common.Result) -> list[str]:
    judged = "; ".join(
        f"{name} {'met' if gain >= LEAST_GAIN and error is not None and gain > error else 'missed'}"
        for name, (gain, error) in gains(result).items()
    )
    asked = [row["asked_bytes"] for row in of(result, "step")]
    others = [row for row in of(result, "pairs") if row["seed"] not in TRIED]
    apart = "; ".join(
        f"{points(gain)} by {name}" for name, (gain, _) in gains({"rows": others}).items()
    )
    return [
        f"At least {LEAST_GAIN} points and more than the standard error: {judged}.",
        f"Points gained on the seeds that nothing was chosen on: {apart or 'there were none'}.",
        "A teacher is asked for a batch of 128; what its widest layer reads and makes is "
        f"{figure(largest_layer_bytes() / KIB)} KiB in float32, and it took "
        f"{figure(max(asked) / KIB)} KiB at most. In halves NumPy computes as float32, so that "
        "it takes longer here; labels alone is a step on 64 rows, the others on 128.",
    ]


BENCH = common.Bench("distillation", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed, one fold, few updates.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    seeds, updates, folds, repeats, calls = SEEDS, UPDATES, FOLDS, 15, 20
    if quick:
        seeds, updates, folds, repeats, calls = SEEDS[:1], 30, 1, 2, 2
    data = digits.load()
    rows = [*pairs(data, seeds, updates, folds), *steps(data, repeats, calls)]
    options = {
        "seeds": list(seeds), "updates": updates, "folds": folds, "batch": BATCH,
        "temperature": TEMPERATURE, "weight": WEIGHT,
    }  # fmt: skip
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
