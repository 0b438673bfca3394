"""Accumulation on CuPy arrays. This has run on the software GPU only, never on a real one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import LOSSES, WEIGHTS, Net, apart, some

from umem.devices.cuda import open_cuda
from umem.errors import AccumulationError

pytestmark = pytest.mark.gpu
CHOSEN = (
    "valid labels", "labels", "mean", "sum by number", "a third of a mean", "weighted average",
    "squared error", "two means", "a mean and a penalty", "sum by a count of labels",
)  # fmt: skip


@pytest.fixture
def cupy() -> Any:
    with warnings.catch_warnings():  # of cuDNN, which CuPy 14 does not have
        warnings.simplefilter("ignore")
        chainer.get_device("@cupy:0").use()
    return open_cuda().xp


def on_gpu(loss: Any, **options: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    net = Net(loss, np.float32, **options)
    net.to_device("@cupy:0")
    optimizer = chainer.optimizers.SGD(0.0).setup(net)
    x, t = (chainer.get_device("@cupy:0").send(a) for a in some(dtype=np.float32))
    return net, optimizer, (x, t)


def gradients(net: Any) -> Any:
    return np.concatenate([p.grad.get().ravel() for _, p in sorted(net.namedparams())]).astype("d")


def host(loss: Any) -> Any:
    """What NumPy gives for the whole batch, by plain Chainer."""
    net = Net(loss, np.float32)
    t = some()[1]
    x = some(dtype=np.float32)[0]
    chainer.optimizers.SGD(0.0).setup(net).update(net, x, t)
    found = [p.grad.ravel() for _, p in sorted(net.namedparams())]
    return np.concatenate(found).astype("d")


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", CHOSEN)
def test_parts_give_the_gradient_of_the_whole(cupy: Any, name: str, size: int) -> None:
    net, optimizer, batch = on_gpu(LOSSES[name])
    with umem.chainer.accumulate(optimizer, micro_batch=size, weight=WEIGHTS.get(name)):
        optimizer.update(net, *batch)
    assert isinstance(net.first.W.grad, cupy.ndarray)
    assert apart(host(LOSSES[name]), gradients(net)) < 1e-5


def test_dropout_passes_its_input_through_in_the_comparison(cupy: Any) -> None:
    net, optimizer, batch = on_gpu(LOSSES["valid labels"], ratio=0.4)
    with umem.chainer.accumulate(optimizer, micro_batch=4):
        optimizer.update(net, *batch)
    assert optimizer.t == 1


def test_what_mixes_samples_is_refused(cupy: Any) -> None:
    net, optimizer, batch = on_gpu(lambda net, y, t: F.mean(F.normalize(y, axis=0) ** 3))
    named = pytest.raises(AccumulationError, match="of its norm from")
    with umem.chainer.accumulate(optimizer, micro_batch=4), named:
        optimizer.update(net, *batch)
    norm = chainer.Sequential(L.Linear(5, 4), L.BatchNormalization(4))
    norm.to_device("@cupy:0")
    optimizer = chainer.optimizers.SGD().setup(norm)
    named = pytest.raises(AccumulationError, match="'BatchNormalization' of /1 computes with all")
    with umem.chainer.accumulate(optimizer, micro_batch=4), named:
        optimizer.update(lambda x: F.mean(norm(x)), batch[0])


def test_a_step_that_does_not_fit_is_done_with_half(cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    net = L.Linear(64, 4)
    net.to_device("@cupy:0")
    optimizer = chainer.optimizers.SGD(0.0).setup(net)
    x = cupy.ones((16, 64), "f")

    def loss(x: Any) -> Any:
        wide = F.broadcast_to(net(x)[:, :, None], (len(x), 4, 1 << 16))  # 1 MiB a sample
        return F.mean(wide * 1.5)

    optimizer.update(loss, x)
    whole = net.W.grad.get()
    net.cleargrads()
    pool.free_all_blocks()
    before = pool.get_limit()
    pool.set_limit(size=pool.used_bytes() + (12 << 20))  # 16 MiB at once are too many
    try:
        with umem.chainer.accumulate(
            optimizer, micro_batch=16, survive=True, check=False
        ) as accumulated:
            optimizer.update(loss, x)
    finally:
        pool.set_limit(size=before)
    assert accumulated.micro_batch < 16
    assert apart(whole, net.W.grad.get()) < 1e-5


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
def test_calls_by_hand_and_with_a_loss_function_make_one_update(cupy: Any) -> None:
    whole = host(LOSSES["valid labels"])
    for by_hand in (True, False):
        net, optimizer, (x, t) = on_gpu(LOSSES["valid labels"])
        with umem.chainer.accumulate(optimizer, 3):
            for part in (slice(0, 4), slice(4, 8), slice(8, 11)):
                if by_hand:
                    net.cleargrads()
                    net(x[part], t[part]).backward()
                    optimizer.update()
                else:
                    optimizer.update(net, x[part], t[part])
        assert optimizer.t == 1 and apart(whole, gradients(net)) < 1e-5
