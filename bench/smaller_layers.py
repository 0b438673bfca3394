"""What do smaller layers take, in memory and time, and what do they cost in accuracy?

Networks that read the digits of scikit-learn are trained by Adam; then `umem.chainer.slimmer`
exchanges layers of the trained one: for low rank, separable, in groups, tied. Accuracy is that of
5-fold cross-validation, so that each of the 1,797 digits is asked once, of every seed: of the
network as it was; of the exchanged one at once; and of both after they were trained on as long.
Bytes are of parameters, and of what a training step of a batch of 64 holds at its peak, from a
trace; operations are a sample's, forward, from a trace; times are of a forward pass without
backward, and of a training step, old and new in turn in one process, one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, Table, counted, figure, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from models import digits
from models.digits import Digits, DigitTable, Fold

import umem
from umem.chainer.layers import Grouped, LowRank, Separable, TiedTo
from umem.units import KIB

NETWORKS: dict[str, Callable[[], Any]] = {**digits.NETWORKS, "table": DigitTable}
EXCHANGES: dict[str, dict[str, Any]] = {
    "perceptron": {
        "rank 16": {"/first": LowRank(rank=16), "/second": LowRank(rank=16)},
        "75 % of the energy": {"/first": LowRank(energy=0.75), "/second": LowRank(energy=0.75)},
    },
    "convolutional": {
        "separable": {"/second": Separable()},
        "separable, 3 kernels": {"/second": Separable(3)},
        "4 groups": {"/second": Grouped(4)},
        "rank 16": {"/third": LowRank(rank=16)},
        "separable, rank 16": {"/second": Separable(), "/third": LowRank(rank=16)},
    },
    "table": {
        "table of rank 16": {"/embed": LowRank(rank=16)},
        "layers tied": {"/third": TiedTo("/second")},
    },
}
"""By network, what is exchanged."""
SEEDS, EPOCHS, MORE, FOLDS = (0, 1, 2, 3, 4), 20, 5, 5
BATCH = 64


# -- accuracy ------------------------------------------------------------------------------------


def made(network: str, seed: int) -> Any:
    """A network that is not trained."""
    np.random.seed(seed)
    return NETWORKS[network]()


def exchanged(model: Any, rules: Any, images: Any) -> tuple[Any, Any]:
    """A copy of a model with other layers, and what `slimmer` says of it."""
    other = model.copy("copy")
    for parameter in other.params():
        parameter.update_rule = None  # the next optimizer brings its own
    return other, umem.chainer.slimmer(other, rules, images, quiet=True)


def of_fold(network: str, fold: Fold, seed: int, epochs: int, more: int) -> dict[str, Any]:
    """How many of a fold's digits are read: as it was, and by each exchange, at once and later."""
    model = made(network, seed)
    digits.train(model, fold.train, epochs, seed)
    found: dict[str, Any] = {"plain": digits.correct_count(model, fold.test)}
    others = {
        name: exchanged(model, rules, fold.train.images[:BATCH])[0]
        for name, rules in EXCHANGES[network].items()
    }
    found["at once"] = {n: digits.correct_count(one, fold.test) for n, one in others.items()}
    for one in (model, *others.values()):
        digits.train(one, fold.train, more, seed + 1000)
    found["plain later"] = digits.correct_count(model, fold.test)
    found["later"] = {n: digits.correct_count(one, fold.test) for n, one in others.items()}
    return found


def accuracies(
    network: str, data: Digits, seeds: tuple[int, ...], epochs: int, more: int, folds: int
) -> dict[str, dict[str, list[float]]]:
    """By exchange, shares of all digits that are read, one a seed."""
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in EXCHANGES[network]}
    for seed in seeds:
        every = list(digits.folds(data, seed, FOLDS))[:folds]
        asked = sum(len(fold.test.labels) for fold in every)
        found = [of_fold(network, fold, seed, epochs, more) for fold in every]
        for name, row in rows.items():
            for key, of in KEYS.items():
                share = sum(of(one, name) for one in found) / asked
                row.setdefault(key, []).append(share)
        click.echo(f"{network}, seed {seed}", err=True)
    return rows


KEYS: dict[str, Callable[[dict[str, Any], str], int]] = {
    "plain": lambda found, name: found["plain"],
    "plain_later": lambda found, name: found["plain later"],
    "at_once": lambda found, name: found["at once"][name],
    "later": lambda found, name: found["later"][name],
}


# -- memory and time -----------------------------------------------------------------------------


class Step:
    """A model and its optimizer, with the times of what they did."""

    def __init__(self, model: Any, batch: Digits) -> None:
        self.model, self.batch = model, batch
        self.optimizer = chainer.optimizers.Adam().setup(model)
        self.forward_seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.train()

    def loss(self) -> Any:
        return F.softmax_cross_entropy(self.model(self.batch.images), self.batch.labels)

    def train(self) -> None:
        self.optimizer.update(self.loss)

    def forward(self) -> None:
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            self.model(self.batch.images)

    def measure(self, calls: int) -> None:
        """Note the mean time of some calls of each."""
        for call, seconds in (
            (self.forward, self.forward_seconds),
            (self.train, self.step_seconds),
        ):
            start = time.process_time()
            for _ in range(calls):
                call()
            seconds.append((time.process_time() - start) / calls)

    def peak(self) -> int:
        with umem.record() as recorder:
            self.train()
        return recorder.trace.peak_bytes


def costs(network: str, name: str, data: Digits, repeats: int, calls: int) -> dict[str, Any]:
    """What one exchange leaves of memory and time."""
    batch = data.at(np.arange(BATCH))
    model = made(network, 0)
    digits.train(model, data, 1, 0)
    other, slim = exchanged(model, EXCHANGES[network][name], batch.images)
    old, new = Step(model, batch), Step(other, batch)
    for repeat in range(repeats):
        for one in (old, new)[:: 1 if repeat % 2 else -1]:
            one.measure(calls)
    totals = slim.totals
    return {
        "parameter_bytes": [totals.bytes_before, totals.bytes_after],
        "operations": [totals.operations_before, totals.operations_after],
        "peak_bytes": [old.peak(), new.peak()],
        "forward_seconds": [old.forward_seconds, new.forward_seconds],
        "step_seconds": [old.step_seconds, new.step_seconds],
        "forward_ratio": ratio(new.forward_seconds, old.forward_seconds),
        "step_ratio": ratio(new.step_seconds, old.step_seconds),
    }


def ratio(seconds: list[float], plain: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, plain, strict=True))


# -- the report ----------------------------------------------------------------------------------


def left(key: str) -> Callable[[Row], float]:
    """The share of a figure that is left."""
    return lambda row: row[key][1] / row[key][0]


def change(row: Row, key: str, plain: str) -> float:
    """Of the mean accuracy over the seeds, in points."""
    return 100 * (statistics.fmean(row[key]) - statistics.fmean(row[plain]))


def points(value: float) -> str:
    return figure(value, 2, signed=True)


def answer(result: common.Result) -> str:
    rows = result["rows"]
    at_once = [change(row, "at_once", "plain") for row in rows]
    later = [change(row, "later", "plain_later") for row in rows]
    return (
        f"The exchanges leave {span(map(left('parameter_bytes'), rows), percent)} of the bytes of "
        f"parameters and {span(map(left('operations'), rows), percent)} of the operations, and "
        f"take {span(row['forward_ratio'] for row in rows)} of the time of a forward pass; the "
        f"share of digits that are read changes by {span(at_once, points)} points at once, and by "
        f"{span(later, points)} once both were trained on."
    )


def tables(result: common.Result) -> list[Table]:
    common_columns = (text("network", "network"), text("exchange", "exchange"))
    return [
        Table(
            (
                *common_columns,
                quantity("parameters", lambda r: r["parameter_bytes"][0], "KiB", per=KIB),
                quantity("then", lambda r: r["parameter_bytes"][1], "KiB", per=KIB),
                counted("operations a sample", lambda r: round(r["operations"][0])),
                counted("then", lambda r: round(r["operations"][1])),
                text("peak of a step", lambda r: percent(left("peak_bytes")(r))),
                quantity("time of a forward pass", "forward_ratio"),
                quantity("time of a step", "step_ratio"),
            ),
            result["rows"],
            "Memory and time, as shares of what they were",
        ),
        Table(
            (
                *common_columns,
                text("as it was", lambda r: percent(statistics.fmean(r["plain"]))),
                text("exchanged", lambda r: percent(statistics.fmean(r["at_once"]))),
                text(
                    "as it was, trained on", lambda r: percent(statistics.fmean(r["plain_later"]))
                ),
                text("and trained on", lambda r: percent(statistics.fmean(r["later"]))),
                text("points", lambda r: points(change(r, "later", "plain_later"))),
                text(
                    "of a seed",
                    lambda r: span(
                        (100 * (a - b) for a, b in zip(r["later"], r["plain_later"], strict=True)),
                        points,
                    ),
                ),
            ),
            result["rows"],
            "Digits that are read, in the mean over the seeds",
        ),
    ]


def notes(result: common.Result) -> list[str]:
    slower = [
        f"{row['network']}, {row['exchange']} ({figure(row['forward_ratio'])})"
        for row in result["rows"]
        if row["forward_ratio"] > 1
    ]
    return [f"Slower on this CPU, with fewer operations or not: {'; '.join(slower) or 'none'}."]


BENCH = common.Bench(
    "smaller_layers",
    __doc__,
    answer,
    tables=tables,
    notes=notes,
    repeats=(*common.REPEATS, "step_seconds"),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed, one fold, few epochs.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    seeds, epochs, more, folds, repeats, calls = SEEDS, EPOCHS, MORE, FOLDS, 15, 10
    if quick:
        seeds, epochs, more, folds, repeats, calls = SEEDS[:1], 3, 1, 1, 3, 1
    data = digits.load()
    rows = []
    for network, exchanges in EXCHANGES.items():
        found = accuracies(network, data, seeds, epochs, more, folds)
        for name in exchanges:
            figures = costs(network, name, data, repeats, calls)
            rows.append({"network": network, "exchange": name, **figures, **found[name]})
    options = {"seeds": list(seeds), "epochs": epochs, "more": more, "folds": folds}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
