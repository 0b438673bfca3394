"""A run on CuPy that was stopped goes on to the bit, its random numbers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer
from tests.compat.test_shims import chainer

F: Any = chainer.functions
L: Any = chainer.links
pytestmark = pytest.mark.gpu
GPU = "@cupy:0"


def dataset() -> Any:
    random = np.random.RandomState(1)
    x = random.standard_normal((60, 6)).astype("f")
    return chainer.datasets.TupleDataset(x, (x[:, :3]).argmax(axis=1).astype("i"))


def network() -> Any:
    layers = [L.Linear(None, 12), L.BatchNormalization(12), F.relu, lambda h: F.dropout(h, 0.4)]
    return L.Classifier(chainer.Sequential(*layers, L.Linear(12, 3)))


def train(out: Path, updates: int, optimizer: Any = None) -> list[float]:
    """Train with dropout, which draws from CuPy's generator; returns the losses."""
    np.random.seed(0)
    chainer.backends.cuda.cupy.random.seed(0)
    model = network()
    model.to_device(GPU)
    optimizer = (chainer.optimizers.Adam if optimizer is None else optimizer)()
    optimizer.setup(model)
    batches = chainer.iterators.SerialIterator(dataset(), 16)
    updater = chainer.training.StandardUpdater(batches, optimizer, device=GPU)
    trainer = chainer.training.Trainer(updater, (updates, "iteration"), out=str(out))
    log = chainer.training.extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(log)
    trainer.extend(umem.chainer.Snapshot(every=4))
    trainer.run()
    return [float(entry["main/loss"]) for entry in log.log]


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 14)
    train(tmp_path / "parts", 7)
    assert train(tmp_path / "parts", 14) == whole
    assert len(set(whole)) == 14


def test_states_of_8_bits_go_on(tmp_path: Path) -> None:
    def optimizer() -> Any:
        return umem.chainer.optimizers.Adam8bit(least_size=0)

    whole = train(tmp_path / "whole", 10, optimizer)
    train(tmp_path / "parts", 5, optimizer)
    assert train(tmp_path / "parts", 10, optimizer) == whole


def test_what_was_saved_on_a_gpu_goes_on_without_one(tmp_path: Path) -> None:
    model = network()
    model.to_device(GPU)
    optimizer = chainer.optimizers.Adam().setup(model)
    x, t = chainer.dataset.concat_examples(dataset()[:8], GPU)
    optimizer.update(model, x, t)
    umem.chainer.save_run(tmp_path, model=model, optimizer=optimizer)
    other = network()
    theirs = chainer.optimizers.Adam().setup(other)
    assert umem.chainer.resume_run(tmp_path, model=other, optimizer=theirs).step == 1
    for mine, its in zip(other.params(), model.params(), strict=True):
        np.testing.assert_array_equal(mine.array, its.array.get())
    theirs.update(other, x.get(), t.get())


def test_values_that_lay_on_the_gpu_come_back_there(tmp_path: Path) -> None:
    class Mean:
        """A part with a value that begins as a plain number."""

        total: Any = 0.0

        def serialize(self, serializer: Any) -> None:
            self.total = serializer("total", self.total)

    mean, other = Mean(), Mean()
    mean.total = mean.total + chainer.backends.cuda.cupy.float32(2.5) * model_array()
    umem.chainer.save_run(tmp_path, step=1, mean=mean)
    umem.chainer.resume_run(tmp_path, mean=other)
    assert isinstance(other.total, chainer.backends.cuda.ndarray)
    assert float(other.total) == float(mean.total)


def model_array() -> Any:
    return chainer.backends.cuda.cupy.ones((), "f")
