"""Chainer's training on CuPy, held against NumPy: optimizers, serializers, updaters, extensions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import chainer

F: Any = chainer.functions
L: Any = chainer.links
pytestmark = pytest.mark.gpu
GPU, CPU = "@cupy:0", "@numpy"
OPTIMIZERS = [
    name
    for name, value in vars(chainer.optimizers).items()
    if inspect.isclass(value) and issubclass(value, chainer.Optimizer)
]


class Net(chainer.Chain):  # type: ignore[misc, name-defined]
    """Batch normalisation is in it, which keeps more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(6, 8, nobias=True)  # normalisation takes it away again
            self.norm = L.BatchNormalization(8)
            self.last = L.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.last(F.relu(self.norm(self.first(x))))


def classifier(device: str) -> Any:
    np.random.seed(0)
    model = L.Classifier(Net())
    model.to_device(device)
    return model


def dataset(size: int = 48) -> Any:
    rng = np.random.RandomState(1)
    x = rng.standard_normal((size, 6)).astype("f")
    return chainer.datasets.TupleDataset(x, (x[:, :3]).argmax(axis=1).astype("i"))


def values(model: Any) -> dict[str, np.ndarray]:
    return {
        name: chainer.backends.cuda.to_cpu(parameter.array)
        for name, parameter in model.namedparams()
    }


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_agrees_with_numpy(name):
    found = []
    for device in (GPU, CPU):
        model = classifier(device)
        optimizer = getattr(chainer.optimizers, name)().setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
        x, t = chainer.dataset.concat_examples(dataset()[:], device=device)
        for _ in range(4):
            optimizer.update(model, x, t)
        found.append(values(model))
    assert_same(*found)


def trained(device: str, folder: Path, epochs: int, resume: Path | None = None) -> Any:
    model = classifier(device)
    optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
    train = chainer.iterators.SerialIterator(dataset(), 8, shuffle=False)
    test = chainer.iterators.SerialIterator(dataset(16), 8, repeat=False, shuffle=False)
    updater = chainer.training.StandardUpdater(train, optimizer, device=device)
    trainer = chainer.training.Trainer(updater, (epochs, "epoch"), out=str(folder))
    extensions = chainer.training.extensions
    trainer.extend(extensions.Evaluator(test, model, device=device))
    trainer.extend(extensions.ExponentialShift("lr", 0.9), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(filename="snapshot_{.updater.epoch}"), trigger=(1, "epoch"))
    if resume is not None:
        chainer.serializers.load_npz(str(resume), trainer)
    trainer.run()
    return model, trainer.get_extension("LogReport").log


def test_a_trainer_reports_what_it_reports_on_numpy(tmp_path):
    (gpu, found), (cpu, expected) = (trained(device, tmp_path / device, 3) for device in (GPU, CPU))
    assert gpu.predictor.first.W.array.device.id == 0
    assert_same(values(gpu), values(cpu))
    for one, other in zip(found, expected, strict=True):
        for name in ("main/loss", "main/accuracy", "validation/main/loss"):
            assert float(one[name]) == pytest.approx(float(other[name]), rel=1e-3), name


@pytest.mark.parametrize(("before", "after"), [(GPU, GPU), (GPU, CPU), (CPU, GPU)])
def test_training_resumes_from_a_snapshot_of_another_device(tmp_path, before, after):
    whole, _ = trained(CPU, tmp_path / "whole", 3)
    trained(before, tmp_path / "before", 2)
    rest, _ = trained(after, tmp_path / "after", 3, tmp_path / "before" / "snapshot_2")
    assert_same(values(rest), values(whole))


def test_a_model_goes_there_and_back(tmp_path):
    model = classifier(CPU)
    before = values(model)
    model.to_device(GPU)
    assert {type(p.array).__module__.split(".")[0] for p in model.params()} == {"cupy"}
    chainer.serializers.save_npz(tmp_path / "model.npz", model)
    for name, value in before.items():
        np.testing.assert_array_equal(values(model)[name], value)
    other = classifier(GPU)
    other.cleargrads()
    for parameter in other.params():
        parameter.array[...] = 0
    chainer.serializers.load_npz(tmp_path / "model.npz", other)
    other.to_device(CPU)
    for name, value in before.items():
        np.testing.assert_array_equal(values(other)[name], value)


def test_evaluation_and_mixed_precision_run_without_a_graph():
    with chainer.using_config("dtype", chainer.mixed16):
        model = classifier(GPU)
        x = model.xp.asarray(dataset()[:8][0][0][None].repeat(4, 0)).astype("float16")
        with chainer.no_backprop_mode(), chainer.using_config("train", False):
            y = model.predictor(x)
    assert y.dtype == np.float16 and y.creator is None
    assert np.isfinite(chainer.backends.cuda.to_cpu(y.array)).all()
