"""Smaller layers on CuPy arrays. This has run on the software GPU only, never on a real one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.links as L
import layer_cases

from umem.chainer.layers import LowRank, LowRankLinear, Separable
from umem.devices.cuda import open_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cupy() -> Iterator[None]:
    with warnings.catch_warnings():  # of cuDNN, which CuPy 14 does not have
        warnings.simplefilter("ignore")
        chainer.get_device("@cupy:0").use()
        open_cuda()
        yield


@pytest.mark.parametrize("name", layer_cases.LAYERS)
@pytest.mark.parametrize("dtype", ["e", "f", "d"])
def test_gradients_are_those_of_central_differences_on_the_host(name: str, dtype: str) -> None:
    link, x = layer_cases.made(name, dtype)
    gy = np.random.default_rng(1).standard_normal(link(x).shape).astype(dtype)
    expected = layer_cases.differences(name, link, x, gy.astype("d"))
    link.to_device("@cupy:0")
    found = layer_cases.gradients(link, x, gy)
    assert layer_cases.apart(found, expected) < layer_cases.TOLERANCES[dtype]


def test_trained_weights_on_a_gpu_become_layers_there() -> None:
    link = L.Linear(8, 6)
    expected = LowRankLinear.from_linear(link, 2)
    link.to_device("@cupy:0")
    made = LowRankLinear.from_linear(link, 2)
    for name, one in made.namedparams():
        assert one.device.name == "@cupy:0"
        assert np.allclose(one.array.get(), dict(expected.namedparams())[name].array)


def test_a_model_on_a_gpu_is_slimmed_there() -> None:
    model = chainer.Sequential(L.Convolution2D(3, 8, 3), L.Linear(8 * 4, 5))
    model.to_device("@cupy:0")
    x = model.xp.ones((2, 3, 4, 4), "f")
    slim = umem.chainer.slimmer(model, {"/0": Separable(), "/1": LowRank(rank=2)}, x, quiet=True)
    assert {one.device.name for one in model.params()} == {"@cupy:0"}
    assert model(x).shape == (2, 5)
    # Multiplies and adds: 4 pixels by 3 kernels of 9 and 3 * 8; 2 * (32 + 5). And a reshape of 32.
    assert slim.totals.operations_after == 2 * (4 * 3 * 9 + 4 * 3 * 8 + 2 * (32 + 5)) + 32


def test_what_is_undone_comes_back_where_the_model_is_now() -> None:
    for device in ("@cupy:0", "@numpy"):
        model = chainer.Sequential(L.Linear(6, 6), L.Linear(6, 6), L.Linear(6, 6))
        slim = umem.chainer.slimmer(model, {"/0": LowRank(rank=1)}, quiet=True)
        ties = umem.chainer.tie(model, "/1/W", "/2/W")
        model.to_device(device)
        ties.undo()
        slim.undo()
        assert model(model.xp.zeros((2, 6), "f")).shape == (2, 6)
