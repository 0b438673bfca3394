"""Small runs, each with something that a resumed run easily gets wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions

UPDATES = 40
EVERY = 4
KEEP = 2
BATCH = 16


def serial(data: Any) -> Any:
    return chainer.iterators.SerialIterator(data, BATCH)


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        name: what it has, in words.
        optimizer: makes its optimizer, before it is set up.
        iterator: makes its iterator of a data set.
        context: what the training runs under.
        normalized: whether the network has batch normalisation.
        prepare: changes model and optimizer, once they are set up, for the rest of the process.
        updater: makes the updater of an iterator and an optimizer.
    """

    name: str
    optimizer: Callable[[], Any] = chainer.optimizers.Adam
    iterator: Callable[[Any], Any] = serial
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    normalized: bool = True
    prepare: Callable[[Any, Any], Any] | None = None
    updater: Callable[[Any, Any], Any] = training.StandardUpdater


def scaling_momentum() -> Any:
    """An optimizer that scales losses dynamically, and doubles the scale every fifth update."""
    optimizer = chainer.optimizers.MomentumSGD(0.05)
    optimizer.loss_scaling(interval=5)
    return optimizer


def threads(data: Any) -> Any:
    return chainer.iterators.MultithreadIterator(data, BATCH, n_threads=2)


def processes(data: Any) -> Any:
    return chainer.iterators.MultiprocessIterator(data, BATCH, n_processes=2, n_prefetch=3)


def adam8bit() -> Any:
    return umem.chainer.optimizers.Adam8bit(least_size=0)


def in_parts(iterator: Any, optimizer: Any) -> Any:
    return umem.chainer.AccumulatingUpdater(iterator, optimizer, micro_batch=6)


def least() -> Any:
    return umem.chainer.Recompute("min")


def in_halves(model: Any, optimizer: Any) -> Any:
    return umem.chainer.half_precision(model, optimizer)


def large_scale(model: Any, optimizer: Any) -> Any:
    """Half precision from a scale that overflows, so that steps are skipped."""
    return umem.chainer.half_precision(model, optimizer, scale=2.0**24, interval=3)


def groups(model: Any, optimizer: Any) -> Any:
    """Three calls of update make one, so that snapshots lie in the middle of a group."""
    return umem.chainer.accumulate(optimizer, steps=3).enable()


KINDS = [
    Kind("Adam, dropout, shuffling"),
    Kind("loss scaling", optimizer=scaling_momentum),
    Kind("Recompute", context=least),
    Kind("MultithreadIterator", iterator=threads),
    Kind("MultiprocessIterator", iterator=processes),
    Kind("Adam8bit", optimizer=adam8bit),
    Kind("AccumulatingUpdater", updater=in_parts, normalized=False),
    Kind("accumulate, inside of a group", prepare=groups, normalized=False),
    Kind("half_precision", prepare=large_scale),
    Kind(
        "all: Adam8bit, half_precision, AccumulatingUpdater, Recompute, MultiprocessIterator",
        optimizer=adam8bit,
        iterator=processes,
        context=least,
        normalized=False,
        prepare=in_halves,
        updater=in_parts,
    ),
]


def network(normalized: bool) -> Any:
    """A classifier with dropout; its first layer is lazy."""
    norm = L.BatchNormalization(24) if normalized else F.identity
    layers = [L.Linear(None, 24), norm, F.relu, lambda h: F.dropout(h, 0.4)]
    return L.Classifier(chainer.Sequential(*layers, L.Linear(24, 24), F.tanh, L.Linear(24, 5)))


def dataset() -> Any:
    """A hundred rows, which are no whole number of batches."""
    random = np.random.RandomState(5)
    x = random.rand(100, 12).astype(np.float32)
    return chainer.datasets.TupleDataset(x, random.randint(0, 5, 100).astype(np.int32))


class LossLog(training.Extension):
    """Writes each loss to a file at once, every digit of it, so that a kill loses none."""

    priority = training.PRIORITY_WRITER

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, trainer: Any) -> None:
        seen = trainer.observation["main/loss"]
        loss = float(getattr(seen, "array", seen))
        os.write(self._handle, f"{trainer.updater.iteration} {loss.hex()}\n".encode())

    def finalize(self) -> None:
        os.close(self._handle)


def train(kind: Kind, folder: Path, updates: int = UPDATES) -> None:
    """Train, or go on training, to the end."""
    np.random.seed(0)
    model = network(kind.normalized)
    optimizer = kind.optimizer().setup(model)
    if kind.prepare is not None:
        kind.prepare(model, optimizer)
    updater = kind.updater(kind.iterator(dataset()), optimizer)
    trainer = training.Trainer(updater, (updates, "iteration"), out=str(folder))
    name = "alpha" if "alpha" in vars(optimizer.hyperparam) else "lr"
    trainer.extend(extensions.ExponentialShift(name, 0.97), trigger=(3, "iteration"))
    trainer.extend(LossLog(folder / "losses"), trigger=(1, "iteration"))
    trainer.extend(umem.chainer.Snapshot(every=EVERY, keep=KEEP))
    with kind.context():
        trainer.run(show_loop_exception_msg=False)
