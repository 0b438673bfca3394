"""Every model of bench/models/ can be built and trained, and has the shape that its name says."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from bench_scripts import module

if find_spec("chainer") is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer

pytestmark = pytest.mark.thorough

assert umem.chainer
models = module("models")
LARGE = ("224 px", "572 px", "713 px", "128 px")
"""Sizes that take seconds: they are built by the benchmarks' own thorough tests."""
SMALL = [
    (name, size)
    for name, sizes in models.MODELS.items()
    for size in sizes
    if not any(large in size for large in LARGE) and name != "VGG16"
]
WITH_REGIONS = {
    "residual": "6 narrow blocks",
    "mixer": "4 layers",
    "unrolled LSTM": "129 words",
    "DenseNet": "18 layers",
    "U-Net": "4 levels",
    "GCN": "8 layers",
}


@pytest.mark.parametrize(("name", "size"), SMALL)
def test_a_model_trains_a_step_from_its_own_input(name: str, size: str) -> None:
    np.random.seed(0)
    model = models.build(name, size)
    batch = 300 if name == "GCN" else 2
    model.trainer()(batch)
    grads = [parameter.grad for parameter in model.link.params()]
    assert grads and all(grad is not None for grad in grads)


@pytest.mark.parametrize(("name", "size"), WITH_REGIONS.items())
def test_a_region_around_its_parts_changes_no_bit_of_the_loss(name: str, size: str) -> None:
    np.random.seed(0)
    model = models.build(name, size)
    inputs = model.inputs(300 if name == "GCN" else 2)
    calls: list[Any] = []

    def region(function: Any, *variables: Any) -> Any:
        calls.append(function)
        return function(*variables)

    plain, regional = model.loss(*inputs), model.loss(*inputs, region=region)
    assert calls and np.array_equal(plain.array, regional.array)


def test_the_input_of_a_batch_is_the_same_each_time() -> None:
    model = models.build("transformer", "4 layers")
    for one, other in zip(model.inputs(3), model.inputs(3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError):
        models.build("residual", "no blocks")
