"""Networks and losses that tests of accumulation train, and how far gradients are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import umem.chainer
from umem.errors import AccumulationError

Loss = Callable[["Net", Any, Any], Any]
Weight = Callable[[Any, Any], float] | int
FULL = 11


class Net(chainer.Chain):
    """Two layers and a loss of them, with dropout between where a ratio is given."""

    def __init__(self, loss: Loss, dtype: Any = np.float64, ratio: float = 0.0) -> None:
        super().__init__()
        self.loss, self.ratio = loss, ratio
        np.random.seed(0)
        with self.init_scope(), chainer.using_config("dtype", dtype):
            self.first, self.second = L.Linear(5, 8), L.Linear(8, 4)
        self.add_persistent("seen", np.zeros(()))

    def __call__(self, x: Any, t: Any) -> Any:
        self.seen += len(x)
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
    return float(np.linalg.norm(whole - parts) / (np.linalg.norm(whole) or 1.0))


def optimizer_of(net: Any, kind: Any = chainer.optimizers.SGD) -> Any:
    return kind().setup(net)


def updater(net: Any, micro_batch: Any = 4, count: int = FULL, **options: Any) -> Any:
    batch = list(zip(*some(), strict=True))
    iterator = chainer.iterators.SerialIterator(batch, count, shuffle=False)
    return umem.chainer.AccumulatingUpdater(iterator, optimizer_of(net), micro_batch, **options)


def whole_gradient(loss: Loss, **kwargs: Any) -> Any:
    net = Net(loss, **kwargs)
    optimizer_of(net).update(net, *some(dtype=kwargs.get("dtype", np.float64)))
    return gradients(net)


def apart_after(
    make: Callable[[], Any], loss: Any, batches: Sequence[tuple[Any, ...]], **how: Any
) -> list[float]:
    """How far each update's gradient is from plain Chainer's of the whole batch, in float64.

    The loss is given the model first.
    """
    found = []
    with chainer.using_config("dtype", np.float64):
        models = []
        for _ in range(2):
            np.random.seed(0)
            models.append(make())
        plain, ours = (chainer.optimizers.SGD(0.1).setup(model) for model in models)
        with umem.chainer.accumulate(ours, **how):
            for batch in batches:
                plain.update(lambda *args: loss(models[0], *args), *batch)
                ours.update(lambda *args: loss(models[1], *args), *batch)
                found.append(apart(*map(gradients, models)))
    return found


def of_net(loss: Loss, *batches: tuple[Any, Any], **how: Any) -> float:
    """How far the updates of a `Net` are from plain Chainer's at most; of `some` samples."""
    return max(apart_after(lambda: Net(loss), Net.__call__, batches or [some()], **how))


@contextmanager
def refused(optimizer: Any, text: str, error: Any = AccumulationError) -> Iterator[None]:
    """Check that the block is refused, and leaves the state as it was and no gradients."""
    before = state_of(optimizer)
    with pytest.raises(error, match=text):
        yield
    assert state_of(optimizer) == before
    assert all(p.grad is None for p in optimizer.target.params())


def state_of(optimizer: Any) -> dict[str, Any]:
    """Parameters, what links keep, the optimizer's state, and NumPy's random numbers."""
    found: dict[str, Any] = {}
    chainer.serializers.DictionarySerializer(found).save(optimizer.target)
    chainer.serializers.DictionarySerializer(found)["optimizer"].save(optimizer)
    found["random"] = np.random.get_state()[1]
    return {name: np.asarray(value).tobytes() for name, value in found.items()}


def refuse(loss: Loss, text: str, *batches: tuple[Any, Any], ratio: float = 0, **how: Any) -> None:
    """Check that the last of some batches is refused, and that this changes nothing."""
    *before, last = batches or [some()]
    net = Net(loss, ratio=ratio)
    optimizer = optimizer_of(net)
    parts = {} if "steps" in how else {"micro_batch": 4}
    with umem.chainer.accumulate(optimizer, **parts | how):
        for batch in before:
            optimizer.update(net, *batch)
        with refused(optimizer, text):
            optimizer.update(net, *last)


def labelled(x: Any, t: Any) -> int:
    return int((t >= 0).sum())


def samples(x: Any, t: Any) -> int:
    return len(x)


def valid(t: Any) -> int:
    return max(1, int((t >= 0).sum()))


def ones(y: Any) -> Any:
    return y.xp.ones_like(y.array)


KNOWN: dict[str, Loss] = {
    "valid labels": lambda net, y, t: F.softmax_cross_entropy(y, t),
    "labels": lambda net, y, t: F.softmax_cross_entropy(y, t, normalize=False),
    "class weights": lambda net, y, t: F.softmax_cross_entropy(
        y, t, class_weight=np.arange(1, 5, dtype=y.dtype)
    ),
    "other ignored label": lambda net, y, t: F.softmax_cross_entropy(y, t, ignore_label=2),
    "soft targets": lambda net, y, t: F.softmax_cross_entropy(y, np.full_like(y.array, 0.25)),
    "labels of pixels": lambda net, y, t: F.softmax_cross_entropy(
        F.reshape(F.concat([y, y * 2]), (-1, 4, 2, 1)), np.stack([t, t.clip(0)], 1)[..., None]
    ),
    "valid bits": lambda net, y, t: F.sigmoid_cross_entropy(y, np.stack([t] * 4, 1).clip(-1, 1)),
    "bits": lambda net, y, t: F.sigmoid_cross_entropy(
        y, np.stack([t] * 4, 1).clip(-1, 1), normalize=False
    ),
    "mean": lambda net, y, t: F.mean(y**2),
    "mean of means": lambda net, y, t: F.mean(F.mean(y**2, axis=1)),
    "a third of a mean": lambda net, y, t: F.mean(y**2) / 3,
    "minus a mean": lambda net, y, t: 3 - F.mean(y**2) * 2,
    "squared error": lambda net, y, t: F.mean_squared_error(y, ones(y)),
    "absolute error": lambda net, y, t: F.mean_absolute_error(y, ones(y)),
    "hinge": lambda net, y, t: F.hinge(y, t.clip(0)),
    "squared hinge": lambda net, y, t: F.hinge(y, t.clip(0), norm="L2"),
    "Huber": lambda net, y, t: F.mean(F.huber_loss(y, ones(y), 0.5)),
    "contrastive pairs": lambda net, y, t: F.contrastive(y, y * y, t.clip(0, 1)),
    "triplet": lambda net, y, t: F.triplet(y, y * y, F.tanh(y)),
    "CTC": lambda net, y, t: F.connectionist_temporal_classification(
        [y, y * 2, y * 3], t.clip(0, 2)[:, None], 3
    ),
    "mean of single losses": lambda net, y, t: F.mean(
        F.softmax_cross_entropy(y, t, reduce="no")
    ),
    "two means": lambda net, y, t: F.softmax_cross_entropy(y, t) + 0.1 * F.mean(y**2),
    "a difference": lambda net, y, t: F.mean(y**2) / 2 - (F.mean_absolute_error(y, ones(y)) - 1),
    "a mean and a penalty": lambda net, y, t: (
        F.softmax_cross_entropy(y, t) + 0.1 * F.sum(net.first.W**2)
    ),
    "two counts and a penalty": lambda net, y, t: (
        F.softmax_cross_entropy(y, t) + F.mean(y**2) + 0.1 * F.mean(net.first.W**2)
    ),
}  # fmt: skip
"""Losses whose divisors are known."""
SAID: dict[str, tuple[Weight, Loss]] = {
    "sum": (1, lambda net, y, t: F.sum(y**2)),
    "minus a sum": (1, lambda net, y, t: 3 - F.sum(y**2) * 2),
    "sum by number": (samples, lambda net, y, t: F.sum(y**2) / len(y)),
    "divided inside": (samples, lambda net, y, t: F.sum(y**2 / len(y))),
    "sum by a count of labels": (
        labelled, lambda net, y, t: F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / valid(t)
    ),
    "twice differentiable": (
        labelled, lambda net, y, t: F.softmax_cross_entropy(y, t, enable_double_backprop=True)
    ),
    "weighted average": (
        lambda x, t: (t + 2.5).sum(),
        lambda net, y, t: F.average(F.sum(y**2, axis=1), weights=(t + 2.5).astype(y.dtype)),
    ),
    "sum of each sample's mean": (1, lambda net, y, t: F.sum(F.mean(y**2, axis=1))),
    "one by one": (1, lambda net, y, t: sum(F.mean(y[i] ** 2) for i in range(len(t)))),
    "Gaussian": (1, lambda net, y, t: F.gaussian_kl_divergence(y, y)),
    "unigram samples": (
        1, lambda net, y, t: F.negative_sampling(
            y, t.clip(0), F.transpose(net.second.W), lambda shape: np.ones(shape, "i"), 2
        )
    ),
    "a sum and a penalty": (
        1, lambda net, y, t: F.sum(y**2) + 0.1 * F.sum(net.first.W**2)
    ),
    "a penalty for leaving 0.1": (
        samples, lambda net, y, t: F.mean(y**2) + F.sum((net.first.W - ones(net.first.W) / 10) ** 2)
    ),
    "a mean and a sum": (1, lambda net, y, t: F.mean(y) - F.sum(y**2)),
    "a mean and a sum of rows": (
        1, lambda net, y, t: F.mean(y**2) + 0.1 * F.sum(net.second.W[t.clip(0)] ** 2)
    ),
}  # fmt: skip
"""Losses that need ``weight=``, with that."""
LOSSES = KNOWN | {name: loss for name, (_, loss) in SAID.items()}
WEIGHTS = {name: weight for name, (weight, _) in SAID.items()}
