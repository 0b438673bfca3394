"""`accumulate` and `AccumulatingUpdater`: parts of a batch give the gradient of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

Loss = Callable[["Net", Any, Any], Any]
FULL = 11


class Net(chainer.Chain):
    """Two layers and a loss of them, with dropout between where a ratio is given."""

    def __init__(self, loss: Loss, dtype: Any = np.float64, ratio: float = 0.0) -> None:
        super().__init__()
        self.loss, self.ratio = loss, ratio
        np.random.seed(0)
        with self.init_scope(), chainer.using_config("dtype", dtype):
            self.first, self.second = L.Linear(5, 8), L.Linear(8, 4)

    def __call__(self, x: Any, t: Any) -> Any:
        h = F.tanh(self.first(x))
        y = self.second(F.dropout(h, self.ratio) if self.ratio else h)
        loss = self.loss(self, y, t)
        chainer.report({"loss": loss, "rows": float(len(x))}, self)
        return loss


def some(count: int = FULL, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Samples of which four in ten have no label."""
    draw = np.random.RandomState(1)
    x, t = draw.randn(count, 5).astype(dtype), draw.randint(0, 4, count).astype("i")
    t[draw.rand(count) < 0.4] = -1
    return x, t


def gradients(net: Any) -> Any:
    return np.concatenate([p.grad.ravel() for _, p in sorted(net.namedparams())])


def parameters(net: Any) -> Any:
    return np.concatenate([p.array.ravel() for _, p in sorted(net.namedparams())])


def apart(whole: Any, parts: Any) -> float:
    return float(np.linalg.norm(whole - parts) / np.linalg.norm(whole))


def optimizer_of(net: Any, kind: Any = chainer.optimizers.SGD) -> Any:
    return kind().setup(net)


def whole_gradient(loss: Loss, **kwargs: Any) -> Any:
    net = Net(loss, **kwargs)
    optimizer_of(net).update(net, *some(dtype=kwargs.get("dtype", np.float64)))
    return gradients(net)


def valid(t: Any) -> int:
    return max(1, int((t >= 0).sum()))


LOSSES: dict[str, Loss] = {
    "valid labels": lambda net, y, t: F.softmax_cross_entropy(y, t),
    "labels": lambda net, y, t: F.softmax_cross_entropy(y, t, normalize=False),
    "class weights": lambda net, y, t: F.softmax_cross_entropy(
        y, t, class_weight=np.arange(1, 5, dtype=y.dtype)
    ),
    "other ignored label": lambda net, y, t: F.softmax_cross_entropy(y, t, ignore_label=2),
    "twice differentiable": lambda net, y, t: F.softmax_cross_entropy(
        y, t, enable_double_backprop=True
    ),
    "soft targets": lambda net, y, t: F.softmax_cross_entropy(y, np.full_like(y.array, 0.25)),
    "valid bits": lambda net, y, t: F.sigmoid_cross_entropy(y, np.stack([t] * 4, 1).clip(-1, 1)),
    "mean": lambda net, y, t: F.mean(y**2),
    "mean of means": lambda net, y, t: F.mean(F.mean(y**2, axis=1)),
    "sum": lambda net, y, t: F.sum(y**2),
    "minus a sum": lambda net, y, t: 3 - F.sum(y**2) * 2,
    "sum by number": lambda net, y, t: F.sum(y**2) / len(y),
    "sum by a count of labels": lambda net, y, t: (
        F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / valid(t)
    ),
    "divided inside": lambda net, y, t: F.sum(y**2 / len(y)),
    "a third of a mean": lambda net, y, t: F.mean(y**2) / 3,
    "weighted average": lambda net, y, t: F.average(
        F.sum(y**2, axis=1), weights=(t + 2).astype(y.dtype)
    ),
    "squared error": lambda net, y, t: F.mean_squared_error(y, np.ones_like(y.array)),
    "absolute error": lambda net, y, t: F.mean_absolute_error(y, np.ones_like(y.array)),
    "hinge": lambda net, y, t: F.hinge(y, t.clip(0)),
    "Huber": lambda net, y, t: F.mean(F.huber_loss(y, np.ones_like(y.array), 0.5)),
    "contrastive pairs": lambda net, y, t: F.contrastive(y, y * y, t.clip(0, 1)),
    "triplet": lambda net, y, t: F.triplet(y, y * y, F.tanh(y)),
    "two means": lambda net, y, t: F.softmax_cross_entropy(y, t) + 0.1 * F.mean(y**2),
    "two means, stacked": lambda net, y, t: F.mean(
        F.stack([F.softmax_cross_entropy(y, t), F.mean(y**2)])
    ),
    "a mean and a sum": lambda net, y, t: F.mean(y) - F.sum(y**2),
    "a mean and a penalty": lambda net, y, t: (
        F.softmax_cross_entropy(y, t) + 0.1 * F.sum(net.first.W**2)
    ),
    "a sum and a penalty": lambda net, y, t: F.sum(y**2) + 0.1 * F.sum(net.first.W**2),
    "two counts and a penalty": lambda net, y, t: (
        F.softmax_cross_entropy(y, t) + F.mean(y**2) + 0.1 * F.mean(net.first.W**2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_give_the_gradient_of_the_whole(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, micro_batch=4):
        optimizer.update(net, *some())
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


@pytest.mark.parametrize("name", LOSSES)
def test_so_does_an_updater_in_single_precision_one_sample_at_a_time(name: str) -> None:
    net = Net(LOSSES[name], np.float32)
    samples = list(zip(*some(dtype=np.float32), strict=True))
    iterator = chainer.iterators.SerialIterator(samples, FULL, shuffle=False)
    umem.chainer.AccumulatingUpdater(iterator, optimizer_of(net), micro_batch=1).update()
    whole = whole_gradient(LOSSES[name], dtype=np.float32)
    assert apart(whole, gradients(net)) < 1e-5


def parts() -> Iterator[tuple[Any, Any]]:
    x, t = some()
    for part in (slice(0, 4), slice(4, 5), slice(5, 11)):
        yield x[part], t[part]


UNCLEAR = "twice differentiable", "sum by a count of labels"
"""Losses that divide by max(1, count), of which only 1 is seen where nothing was counted."""
ALONE = {name for name in LOSSES if "two" not in name and "and a sum" not in name} - {*UNCLEAR}
"""Losses that divide by one count, of which the total may be known in the end."""


@pytest.mark.parametrize("name", sorted(ALONE))
def test_three_calls_of_update_make_one_with_the_gradient_of_all(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, steps=3):
        for x, t in parts():
            optimizer.update(net, x, t)
    assert optimizer.t == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_call_in_which_perhaps_nothing_was_counted_is_refused(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    x, t = some()
    t[4] = -1
    refused = pytest.raises(umem.errors.AccumulationError, match="whether anything was counted")
    with umem.chainer.accumulate(optimizer, steps=3) as accumulated:
        optimizer.update(net, x[:4], t[:4])
        with refused:
            optimizer.update(net, x[4:5], t[4:5])
        assert accumulated.count == 0


@pytest.mark.parametrize("name", ["valid labels", "mean", "sum", "a mean and a penalty"])
@pytest.mark.parametrize("clear_first", [True, False])
def test_so_do_calls_after_going_backward_by_hand(name: str, clear_first: bool) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, steps=3):
        for x, t in parts():
            if clear_first:
                net.cleargrads()
            loss = net(x, t)
            if not clear_first:
                net.cleargrads()
            loss.backward()
            optimizer.update()
    assert optimizer.t == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


def test_mean_of_means_is_what_it_is_not() -> None:
    """The fault that every framework had in 2024, planted by hand, is seen by how far off it is."""
    net, total = Net(LOSSES["valid labels"]), 0.0
    for x, t in parts():
        net.cleargrads()
        net(x, t).backward()
        total = total + gradients(net) / 3
    assert apart(whole_gradient(LOSSES["valid labels"]), total) > 0.1


def test_the_fault_of_2024_is_caught() -> None:
    """A weight by samples, where the loss was divided by valid labels."""
    net = Net(LOSSES["valid labels"])
    optimizer = optimizer_of(net)
    before = parameters(net)
    wrong = umem.chainer.accumulate(optimizer, micro_batch=4, weight=lambda x, t: len(x))
    with wrong, pytest.raises(umem.errors.AccumulationError, match="something else than weight="):
        optimizer.update(net, *some())
    assert optimizer.t == 0 and np.array_equal(before, parameters(net))
