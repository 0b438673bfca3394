"""Runs that are stopped and go on: a trainer with everything random in it, and its losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


def dataset(count: int = 100) -> Any:
    """Rows of 20 numbers and a class of five."""
    random = np.random.RandomState(3)
    x = random.rand(count, 20).astype(np.float32)
    return chainer.datasets.TupleDataset(x, random.randint(0, 5, count).astype(np.int32))


def network(units: int = 30) -> Any:
    """A classifier with dropout and running statistics; its first layer is lazy."""
    return L.Classifier(
        chainer.Sequential(
            L.Linear(None, units),
            L.BatchNormalization(units),
            F.relu,
            lambda h: F.dropout(h, 0.3),
            L.Linear(units, 5),
        )
    )


ITERATORS = {
    "serial": chainer.iterators.SerialIterator,
    "threads": chainer.iterators.MultithreadIterator,
    "processes": chainer.iterators.MultiprocessIterator,
}


def trainer(
    out: Path,
    updates: int,
    iterator: str = "serial",
    optimizer: Any = None,
    every: Any = 5,
    units: int = 30,
    **options: Any,
) -> Any:
    """Make a trainer of a run of so many updates, which saves itself."""
    np.random.seed(0)
    processes = {"n_processes": 1} if iterator == "processes" else {}
    batches = ITERATORS[iterator](dataset(), 16, **processes)
    optimizer = (optimizer or chainer.optimizers.Adam)()
    optimizer.setup(network(units))
    updater = training.StandardUpdater(batches, optimizer)
    made = training.Trainer(updater, (updates, "iteration"), out=str(out))
    made.extend(extensions.LogReport(trigger=(1, "iteration")))
    for name in {"alpha", "lr"} & set(vars(optimizer.hyperparam)):
        made.extend(extensions.ExponentialShift(name, 0.98), trigger=(3, "iteration"))
    made.extend(umem.chainer.Snapshot(every=every, **options))
    return made


def losses(out: Path) -> list[float]:
    """The loss of every update, with all its digits."""
    log = json.loads((out / "log").read_text())
    return [entry["main/loss"] for entry in log]


def train(out: Path, updates: int, *args: Any, **kwargs: Any) -> list[float]:
    """Run a trainer to its end; returns the losses."""
    trainer(out, updates, *args, **kwargs).run()
    return losses(out)
