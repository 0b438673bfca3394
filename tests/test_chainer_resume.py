"""A run that was stopped goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

from resume_cases import ITERATORS, dataset, losses, network, train

import umem.chainer  # isort: skip
import chainer

from umem.errors import SnapshotError, SnapshotWarning, StateError


@pytest.mark.parametrize("iterator", ITERATORS)
def test_a_stopped_trainer_goes_on_to_the_bit(iterator: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 30, iterator)
    train(tmp_path / "parts", 13, iterator)
    assert train(tmp_path / "parts", 30, iterator) == whole
    assert len(whole) == 30 and len(set(whole)) > 20


@pytest.mark.filterwarnings("ignore:invalid value")  # MSVAG divides 0 by 0 where no unit is on
@pytest.mark.parametrize(
    "optimizer", ["SGD", "MomentumSGD", "AdaGrad", "AdaDelta", "RMSprop", "AMSGrad", "MSVAG"]
)
def test_every_kind_of_optimizer_goes_on(optimizer: str, tmp_path: Path) -> None:
    kind = getattr(chainer.optimizers, optimizer)
    whole = train(tmp_path / "whole", 12, optimizer=kind)
    train(tmp_path / "parts", 7, optimizer=kind)
    assert train(tmp_path / "parts", 12, optimizer=kind) == whole


def scaled() -> Any:
    """An optimizer that scales losses dynamically."""
    optimizer = chainer.optimizers.MomentumSGD()
    optimizer.loss_scaling(interval=4)
    return optimizer


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 14, optimizer=scaled)
    train(tmp_path / "parts", 7, optimizer=scaled)
    assert train(tmp_path / "parts", 14, optimizer=scaled) == whole


def test_it_says_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 6)
    assert capsys.readouterr().err == ""
    train(tmp_path, 8)
    assert f"umem: resumed from {tmp_path}/snapshots/step-5" in capsys.readouterr().err


def loop(folder: Path, steps: int, every: int = 4) -> list[float]:
    """A hand-written loop; returns the losses of the steps that it made."""
    np.random.seed(0)
    own = np.random.default_rng(7)
    model, found = network(), []
    optimizer = chainer.optimizers.Adam().setup(model)
    batches = chainer.iterators.SerialIterator(dataset(), 16)
    parts = {"model": model, "optimizer": optimizer, "batches": batches, "own": own}
    done = umem.chainer.resume_run(folder, **parts)
    assert done.values == ({} if done.path is None else {"seen": 16 * done.step})
    for step in range(done.step, steps):
        x, t = chainer.dataset.concat_examples(batches.next())
        optimizer.update(model, x + own.random(x.shape, np.float32), t)
        found.append(float(model.loss.array))
        if (step + 1) % every == 0:
            umem.chainer.save_run(folder, wait=True, seen=16 * (step + 1), **parts)
    return found


def test_a_loop_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole", 20)
    first = loop(tmp_path / "parts", 10)
    assert first[:8] + loop(tmp_path / "parts", 20) == whole


def test_a_torn_newest_one_is_passed_over(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 18)
    train(tmp_path / "parts", 11)
    arrays = tmp_path / "parts/snapshots/step-10/arrays.safetensors"
    data = bytearray(arrays.read_bytes())
    data[-9] ^= 1
    arrays.write_bytes(data)
    with pytest.warns(SnapshotWarning, match="step-10.*another SHA-256.*taking step-5"):
        assert train(tmp_path / "parts", 18) == whole


def test_another_model_is_refused_by_name_and_shape_and_nothing_is_changed(tmp_path: Path) -> None:
    umem.chainer.save_run(tmp_path, step=1, model=run_once(network()))
    other = run_once(network(31))
    before = [p.array.copy() for p in other.params()]
    with pytest.raises(SnapshotError, match=r"0/W.*\(30, 20\) there and .*\(31, 20\) here"):
        umem.chainer.resume_run(tmp_path, model=other)
    for parameter, array in zip(other.params(), before, strict=True):
        np.testing.assert_array_equal(parameter.array, array)


def run_once(model: Any) -> Any:
    """A model whose lazy parameters are there."""
    model(*chainer.dataset.concat_examples(dataset()[:2]))
    return model


def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    umem.chainer.resume_run(tmp_path / "snapshots", model=network())
    with pytest.raises(StateError, match="another run of this process writes"):
        train(tmp_path, 3)


def test_losses_are_read_whole(tmp_path: Path) -> None:
    assert train(tmp_path, 2) == losses(tmp_path)
