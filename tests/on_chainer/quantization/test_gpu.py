"""Quantised models on CuPy, held against NumPy: the same sums to the bit, and there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import chainer
from umem.chainer import load_quantized, quantization_aware, quantize, save_quantized
from umem.chainer.quantization.integer_products import integer_product

pytestmark = pytest.mark.gpu
F, L = chainer.functions, chainer.links
X = np.random.default_rng(0).standard_normal((6, 4, 5, 5)).astype("f")


def model(seed: int = 0) -> Any:
    np.random.seed(seed)
    return chainer.Sequential(L.Convolution2D(4, 6, 3, pad=1, groups=2), F.relu, L.Linear(150, 3))


def called(net: Any, x: Any = X) -> Any:
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        return chainer.backends.cuda.to_cpu(net(net.device.send(x)).array)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, None), (4, 8)])
def test_a_model_that_goes_to_the_gpu_and_back_computes_the_same(
    bits: int, group: int | None
) -> None:
    small = quantize(model(), X, bits, group=group)
    expected = called(small)
    small.to_device("@cupy:0")
    assert isinstance(small[0].weight.codes, chainer.backends.cuda.ndarray)
    assert np.allclose(called(small), expected, rtol=1e-5, atol=1e-6)
    small.to_device("@numpy")
    assert (called(small) == expected).all()


def test_a_model_is_quantised_on_the_gpu_as_on_the_host(tmp_path: Any) -> None:
    host, there = model(), model()
    there.to_device("@cupy:0")
    one, other = quantize(host, X, 4), quantize(there, there.device.send(X), 4)
    for name in ("codes", "scales"):
        found = chainer.backends.cuda.to_cpu(getattr(other[0].weight, name))
        assert (found == getattr(one[0].weight, name)).all()
    save_quantized(tmp_path / "net", other)
    assert (called(load_quantized(tmp_path / "net", model(3))) == called(one)).all()
    again = load_quantized(tmp_path / "net", there)
    assert isinstance(again[2].weight.codes, chainer.backends.cuda.ndarray)
    assert np.allclose(called(again), called(one), rtol=1e-5, atol=1e-6)


def test_sums_on_the_gpu_are_those_of_integers_to_the_bit() -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(-255, 256, (7, 1300))
    weight = generator.integers(-127, 128, (5, 1300))
    codes[0], weight[0] = 255, 127

    class Whole:
        def part(self, rows: slice, columns: slice) -> Any:
            return chainer.get_device("@cupy:0").send(weight[rows, columns].astype("f"))

    given = chainer.get_device("@cupy:0").send(codes.astype("f"))
    found = integer_product(given, Whole(), slice(0, 5))
    assert (chainer.backends.cuda.to_cpu(found) == codes @ weight.T).all()


def test_training_for_few_bits_goes_on_there() -> None:
    net = model()
    net.to_device("@cupy:0")
    quantization_aware(net)
    optimizer = chainer.optimizers.SGD(0.1).setup(net)
    x, labels = net.device.send(X), net.device.send(np.arange(6, dtype="i") % 3)
    losses = []
    for _ in range(8):
        loss = F.softmax_cross_entropy(net(x), labels)
        net.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    assert losses[-1] < losses[0]
    assert (called(quantize(net)) == called(net)).all()
