"""Networks and losses that tests of accumulation train, and how far gradients are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

Loss = Callable[["Net", Any, Any], Any]
Weight = Callable[[Any, Any], float]
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


def labelled(x: Any, t: Any) -> int:
    return int((t >= 0).sum())


def samples(x: Any, t: Any) -> int:
    return len(x)


def valid(t: Any) -> int:
    return max(1, int((t >= 0).sum()))


WEIGHTS: dict[str, Weight] = {
    "sum by number": samples,
    "divided inside": samples,
    "sum by a count of labels": labelled,
    "all by a count of labels": labelled,
}
"""By name of `LOSSES`, what the user says that it was divided by."""


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
    "all by a count of labels": lambda net, y, t: F.sum(y**2) / valid(t),
    "divided inside": lambda net, y, t: F.sum(y**2 / len(y)),
    "a third of a mean": lambda net, y, t: F.mean(y**2) / 3,
    "weighted average": lambda net, y, t: F.average(
        F.sum(y**2, axis=1), weights=(t + 2.5).astype(y.dtype)
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
    "mean of single losses": lambda net, y, t: F.mean(
        F.softmax_cross_entropy(y, t, reduce="no")
    ),
    "sum of each sample's mean": lambda net, y, t: F.sum(F.mean(y**2, axis=1)),
    "mean of sums over samples": lambda net, y, t: F.mean(F.sum(y**2, axis=0)),
    "a mean and a penalty for leaving 0.1": lambda net, y, t: (
        F.mean(y**2) + 0.1 * F.sum((net.first.W - np.full(net.first.W.shape, 0.1, y.dtype)) ** 2)
    ),
    "a mean and a sum of rows": lambda net, y, t: (
        F.mean(y**2) + 0.1 * F.sum(net.second.W[t.clip(0)] ** 2)
    ),
    "two counts and a penalty": lambda net, y, t: (
        F.softmax_cross_entropy(y, t) + F.mean(y**2) + 0.1 * F.mean(net.first.W**2)
    ),
}  # fmt: skip
