"""Chainer end to end through the layer: worker processes, and a trainer that stops and resumes."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python

from tests.compat.test_shims import chainer

WORKERS = """
import sys
import multiprocessing
import umem.chainer
import numpy as np
from chainer import iterators


class Squares:
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return np.full(3, i * i, "f"), np.int32(i)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    iterator = iterators.MultiprocessIterator(
        Squares(), 4, repeat=False, shuffle=False, n_processes=2, shared_mem=1000)
    for batch in iterator:
        print([int(label) for _, label in batch], [float(x[0]) for x, _ in batch])
    iterator.finalize()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocess_iterator(tmp_path, method):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    done = python("-W", "error::DeprecationWarning", script, method, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = [
        f"{list(range(i, i + 4))} {[float(j * j) for j in range(i, i + 4)]}" for i in (0, 4, 8)
    ]
    assert done.stdout.splitlines() == expected


def trainer_for(folder: Path, iterations: int) -> Any:
    """Return a trainer of a small classifier, three iterations an epoch, with what scripts use."""
    rng = np.random.RandomState(0)
    x = rng.rand(24, 6).astype("f")
    data = chainer.datasets.TupleDataset(x, (x.sum(axis=1) > 3).astype("i"))
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(6, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    train = chainer.iterators.SerialIterator(data, 8, order_sampler=in_turn)
    test = chainer.iterators.SerialIterator(data, 8, repeat=False, shuffle=False)
    updater = chainer.training.StandardUpdater(train, optimizer)
    trainer = chainer.training.Trainer(updater, (iterations, "iteration"), out=str(folder))
    extensions, each = chainer.training.extensions, (1, "iteration")
    trainer.extend(extensions.Evaluator(test, model))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss"], out=(folder / "out").open("a")))
    trainer.extend(extensions.snapshot(filename="at_{.updater.iteration}"), trigger=each)
    if importlib.util.find_spec("matplotlib"):
        trainer.extend(extensions.PlotReport(["main/loss"], "epoch", filename="loss.png"))
    return trainer


def in_turn(order: Any, position: int) -> Any:
    return np.arange(24)


def finish(trainer: Any) -> list[np.ndarray]:
    trainer.run()
    (target,) = trainer.updater.get_all_optimizers().values()
    return [np.array(param.array) for _, param in sorted(target.target.namedparams())]


@pytest.fixture
def plotting(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # PrintReport's file closes with the test
def test_a_trainer_that_resumes_within_an_epoch_ends_where_an_uninterrupted_one_does(
    tmp_path, plotting
):
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.mkdir()
    half.mkdir()
    expected = finish(trainer_for(whole, 12))
    finish(trainer_for(half, 5))
    resumed = trainer_for(half, 12)
    chainer.serializers.load_npz(str(half / "at_5"), resumed)
    got = finish(resumed)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_array_equal(a, b)
    logs = [json.loads((folder / "log").read_text()) for folder in (whole, half)]
    assert [[row[k] for k in row if k != "elapsed_time"] for row in logs[0]] == [
        [row[k] for k in row if k != "elapsed_time"] for row in logs[1]
    ]
    assert len(logs[0]) == 4 and "validation/main/accuracy" in logs[0][0]
    assert (half / "out").read_text().count("epoch") >= 1
