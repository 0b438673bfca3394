"""What do weights in 8 and 4 bits take of a network's bytes and time, and does it still read?

Two networks learn the handwritten digits that scikit-learn ships, by five seeds in five folds, so
that every seed is asked all 1,797: a perceptron 64-256-256-10 and a small convolutional network.
`umem.chainer.quantize` has 300 of a fold's training images for calibration. Bytes in memory are
those of all arrays that Chainer's serializers see, bytes of a file those of safetensors, header and
all. Then narrow networks, where 4 bits cost accuracy: in floats, quantised by calibration alone,
and trained under `umem.chainer.quantization_aware` in the last third of the same number of epochs.
Times are those of a batch of 360 and of a step of training with 64, in turn in one process, by the
processor's time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import numpy as np
from report_tables import Row, Table, counted, figure, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from models import digits
from safetensors.numpy import save_file

CALIBRATION = 300
FOLDS, SEEDS, EPOCHS = 5, 5, 15
GROUP = 32
SMALL: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8}, "4 bits": {"bits": 4}, "4 bits, groups": {"bits": 4, "group": GROUP}
}  # fmt: skip
LEAST_LOSS = 2.0
"""Points that calibration alone costs the narrow networks that the answer is about."""


class Narrow(NamedTuple):
    """A network of another width, and its epochs: in floats, and in floats or aware."""

    network: str
    width: int
    epochs: int
    more: int


NARROW = (
    Narrow("perceptron", 6, 40, 20),
    Narrow("perceptron", 8, 40, 20),
    Narrow("perceptron", 16, 40, 20),
    Narrow("convolutional", 4, 20, 10),
)


def made(network: str, seed: int, *width: int) -> Any:
    np.random.seed(seed)
    return digits.NETWORKS[network](*width)


# -- bytes and accuracy ----------------------------------------------------------------------------


def whole(network: str, seed: int, epochs: int, folds: int) -> Row:
    """What one seed's networks read, over the folds, and the bytes of the first."""
    correct = dict.fromkeys(("float32", *SMALL), 0)
    sizes: dict[str, dict[str, int]] = {}
    total = 0
    for fold in list(digits.folds(digits.load(), seed))[:folds]:
        model = made(network, seed)
        digits.train(model, fold.train, epochs, seed)
        models = {"float32": model}
        for name, how in SMALL.items():
            models[name] = umem.chainer.quantize(model, fold.train.images[:CALIBRATION], **how)
        for name, each in models.items():
            correct[name] += digits.correct_count(each, fold.test)
            sizes.setdefault(name, bytes_of(each))
        total += len(fold.test.labels)
    return {
        "part": "whole", "network": network, "seed": seed, "epochs": epochs, "asked": total,
        "correct": correct, "bytes": sizes,
    }  # fmt: skip


def bytes_of(model: Any) -> dict[str, int]:
    """Bytes of all arrays, and of a file of them."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    arrays = {name: np.ascontiguousarray(each) for name, each in serializer.target.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if hasattr(model, "quantization_report"):
            umem.chainer.save_quantized(path, model)
        else:
            save_file(arrays, path)
        file = path.stat().st_size
    return {"memory": sum(each.nbytes for each in arrays.values()), "file": file}


def narrow(case: Narrow, seed: int, folds: int) -> Row:
    """What networks read that have too few numbers to lose any bits; the same epochs for all."""
    correct = dict.fromkeys(("float32", "4 bits", "4 bits, groups", "aware"), 0)
    total = 0
    for fold in list(digits.folds(digits.load(), seed))[:folds]:
        model = made(case.network, seed, case.width)
        digits.train(model, fold.train, case.epochs, seed)
        aware = copy.deepcopy(model)
        digits.train(model, fold.train, case.more, seed + SEEDS)
        images = fold.train.images[:CALIBRATION]
        models = {"float32": model}
        for name in ("4 bits", "4 bits, groups"):
            models[name] = umem.chainer.quantize(model, images, **SMALL[name])
        umem.chainer.quantization_aware(aware, 4)
        digits.train(aware, fold.train, case.more, seed + SEEDS)
        models["aware"] = umem.chainer.quantize(aware)
        for name, each in models.items():
            correct[name] += digits.correct_count(each, fold.test)
        total += len(fold.test.labels)
    return {"part": "narrow", **case._asdict(), "seed": seed, "asked": total, "correct": correct}


# -- time ------------------------------------------------------------------------------------------


def times(network: str, repeats: int) -> list[Row]:
    """A batch, and a step of training, in turn."""
    fold = next(digits.folds(digits.load(), 0))
    model = made(network, 0)
    digits.train(model, fold.train, 1, 0)
    images = fold.train.images[:CALIBRATION]
    batch: dict[str, Callable[[], object]] = {"float32": lambda: read(model, fold.test)}
    for name, how in SMALL.items():
        small = umem.chainer.quantize(model, images, **how)
        batch[name] = lambda small=small: read(small, fold.test)  # type: ignore[misc]
    aware = made(network, 0)
    umem.chainer.quantization_aware(aware, 4)
    part = fold.train.at(np.arange(64))
    step = {"float32": stepping(made(network, 0), part), "aware": stepping(aware, part)}
    return [
        {"part": "time", "network": network, "what": what, "seconds": taken(calls, repeats)}
        for what, calls in ((f"a batch of {len(fold.test.labels)}", batch), ("a step of 64", step))
    ]


def read(model: Any, digits: Any) -> None:
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        model(digits.images)


def stepping(model: Any, part: Any) -> Callable[[], object]:
    optimizer = chainer.optimizers.Adam().setup(model)
    return lambda: optimizer.update(
        lambda: F.softmax_cross_entropy(model(part.images), part.labels)
    )


def taken(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Measure the seconds of calls in turn, each five at a time."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(5):
                call()
            seconds[name].append((time.process_time() - start) / 5)
    return seconds


# -- the report --------------------------------------------------------------------------------


def of(result: common.Result, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def points(rows: list[Row], name: str) -> float:
    """The mean accuracy of rows with as many digits each, in points."""
    return 100 * sum(row["correct"][name] for row in rows) / sum(row["asked"] for row in rows)


def shares(result: common.Result, name: str, what: str) -> list[float]:
    rows = of(result, "whole")
    return [row["bytes"][name][what] / row["bytes"]["float32"][what] for row in rows]


def summed(result: common.Result, part: str) -> list[Row]:
    """A row for each network of a part: its seeds' together."""
    found = []
    for key in dict.fromkeys((row["network"], row.get("width")) for row in of(result, part)):
        rows = [r for r in of(result, part) if (r["network"], r.get("width")) == key]
        names = rows[0]["correct"]
        found.append({
            "network": key[0], "width": key[1], "seeds": len(rows),
            "points": {name: points(rows, name) for name in names},
            "bytes": rows[0].get("bytes"),
        })  # fmt: skip
    return found


def losing(result: common.Result) -> list[Row]:
    """Narrow networks that calibration alone costs at least two points."""
    return [row for row in summed(result, "narrow") if lost(row) >= LEAST_LOSS]


def lost(row: Row) -> float:
    return float(row["points"]["float32"] - row["points"]["4 bits"])


def back(row: Row) -> float:
    """The share of what was lost that aware training gets back."""
    return float(row["points"]["aware"] - row["points"]["4 bits"]) / lost(row)


def ratio(row: Row, name: str) -> float:
    pairs = zip(row["seconds"][name], row["seconds"]["float32"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    changes = [
        row["points"]["8 bits"] - row["points"]["float32"] for row in summed(result, "whole")
    ]
    batches = [row for row in of(result, "time") if "8 bits" in row["seconds"]]
    found = losing(result)
    four = "with 4 bits no narrow network loses two points"
    if found:
        four = (
            f"with 4 bits, narrow networks that lose {span(map(lost, found))} points by "
            f"calibration alone get {span(map(back, found), percent)} of that back by aware "
            "training"
        )
    return (
        f"In 8 bits a network takes {span(shares(result, '8 bits', 'file'))} of a file's bytes "
        f"and {span(shares(result, '8 bits', 'memory'))} of memory's, its accuracy changes by "
        f"{span(changes, lambda x: figure(x, 2, signed=True))} points in the mean of its seeds, "
        f"and a batch takes {span(ratio(row, '8 bits') for row in batches)} of the time on this "
        f"CPU; {four}."
    )


def tables(result: common.Result) -> list[Table]:
    """Make the tables of a result."""

    def accuracy(name: str) -> Any:
        return quantity(f"{name}", lambda row: round(row["points"][name], 2), "points")

    def share(name: str, what: str) -> Any:
        def found(row: Row) -> float:
            return float(row["bytes"][name][what] / row["bytes"]["float32"][what])

        return quantity(f"{what}, {name}", found)

    seeds = (text("network", "network"), counted("seeds", "seeds"))
    return [
        Table(
            (*seeds, *(accuracy(name) for name in ("float32", *SMALL))),
            summed(result, "whole"),
            "Digits read",
        ),
        Table(
            (text("network", "network"), *(
                share(name, what) for name in SMALL for what in ("file", "memory")
            )),
            summed(result, "whole"),
            "Bytes, of those in float32",
        ),
        Table(
            (*seeds, counted("width", "width"),
             *(accuracy(name) for name in ("float32", "4 bits", "4 bits, groups", "aware")),
             text("got back", lambda row: percent(back(row)) if lost(row) > 0 else None)),
            summed(result, "narrow"),
            "Narrow networks, weights of 4 bits, inputs of 8",
        ),
        Table(
            (
                text("network", "network"),
                text("what", "what"),
                quantity("in float32",
                         lambda row: 1e3 * statistics.median(row["seconds"]["float32"]), "ms"),
                *(
                    quantity(name, lambda row, name=name:
                             ratio(row, name) if name in row["seconds"] else None, "of it")
                    for name in (*SMALL, "aware")
                ),
            ),
            of(result, "time"),
            "Time",
        ),
    ]  # fmt: skip


# Ratios are medians of pairs that were timed in turn: every repeat is needed.
BENCH = common.Bench("quantization", __doc__, answer, tables=tables, repeats=())


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=SEEDS, show_default=True)
@click.option("--quick", is_flag=True, help="One seed, one fold, an epoch or two, one repeat.")
@common.json_option
def main(repeats: int, seeds: int, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    common.writable(path)
    folds, epochs, cases = FOLDS, EPOCHS, NARROW
    if quick:
        repeats, seeds, folds, epochs = 1, 1, 1, 1
        cases = (Narrow("perceptron", 8, 2, 1),)
    rows: list[Row] = [row for network in digits.NETWORKS for row in times(network, repeats)]
    for seed in range(seeds):
        rows += [whole(network, seed, epochs, folds) for network in digits.NETWORKS]
        rows += [narrow(case, seed, folds) for case in cases]
    options = {"repeats": repeats, "seeds": seeds, "folds": folds}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
