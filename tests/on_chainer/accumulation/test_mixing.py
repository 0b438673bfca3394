"""Functions that mix samples: found by the comparison, or refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import apart, gradients, labelled, optimizer_of, refuse, refused, samples

from umem.errors import AccumulationError

accumulate = umem.chainer.accumulate


MIXING: dict[str, Any] = {
    "normalising over the batch": lambda net, y, t: F.mean(F.normalize(y, axis=0) ** 3),
    "a mean over the batch, by hand": lambda net, y, t: F.mean(
        (y - F.broadcast_to(F.mean(y, axis=0), y.shape)) ** 2
    ),
    "similarities in the batch": lambda net, y, t: F.softmax_cross_entropy(
        F.matmul(y, y, transb=True), np.arange(len(y.array), dtype="i")
    ),
    "a softmax over the batch": lambda net, y, t: F.mean(F.softmax(y, axis=0) ** 2),
    "attention over the batch": lambda net, y, t: F.mean(
        F.matmul(F.softmax(F.matmul(y, y, transb=True)), y) ** 2
    ),
    "samples in another order": lambda net, y, t: F.mean(y * F.flip(y, axis=0)),
    "the place in the part": lambda net, y, t: F.mean(
        F.sum(y, axis=1) * np.arange(1.0, len(y) + 1)
    ),
    "weights by their maximum": lambda net, y, t: F.mean(y * (t + 2.0)[:, None] / (t + 2).max()),
    "beside a penalty": lambda net, y, t: (
        F.sum(net.first.W**2) + F.mean(F.softmax(y, axis=0) ** 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"micro_batch": 1}, {"steps": 2}])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_refused(name: str, how: Any) -> None:
    refuse(
        MIXING[name], r"of its norm from.*umem\.chainer\.Recompute|computes with", ratio=0.3, **how
    )


@pytest.mark.parametrize("name", MIXING)
def test_no_weight_makes_it_right(name: str) -> None:
    told = "of its norm from|leave it out|add up|for its parts|gives 0 for some samples"
    for weight in (1, samples, labelled):
        refuse(MIXING[name], told, weight=weight)


@pytest.mark.parametrize("name", ["decov", "cross_covariance"])
@pytest.mark.parametrize("check", [True, False])
def test_functions_of_the_whole_batch_are_refused_by_name(name: str, check: bool) -> None:
    losses = {
        "decov": lambda net, y, t: F.mean(y) + F.decov(y),
        "cross_covariance": lambda net, y, t: F.cross_covariance(y, y * 2),
    }
    told = r"'\w+' computes with all samples .*umem\.chainer\.Recompute"
    refuse(losses[name], told, check=check, weight=1)


class Normalised(chainer.Chain):
    """A network with a normalisation, an image a sample."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.norm = L.Convolution2D(2, 6, 3), norm

    def __call__(self, x: Any, t: Any) -> Any:
        return F.mean(self.norm(self.first(x)) ** 3)


def images() -> tuple[Any, Any]:
    return np.random.RandomState(2).randn(6, 2, 5, 5).astype("f"), np.zeros(6, "i")


@pytest.mark.parametrize("how", [{"micro_batch": 1}, {"micro_batch": 2}, {"steps": 2}])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: L.BatchNormalization(6),
        lambda: L.BatchNormalization(6, use_gamma=False, use_beta=False),
        lambda: L.BatchRenormalization(6),
        lambda: L.DecorrelatedBatchNormalization(6, groups=1),
    ],
)
def test_batch_normalisation_is_refused_by_name_and_its_statistics_stay(
    norm: Callable[[], Any], check: bool, how: Any
) -> None:
    net = Normalised(norm())
    optimizer = optimizer_of(net)
    told = r"ormalization.*computes with all.*umem\.chainer\.Recompute"
    with accumulate(optimizer, check=check, **how), refused(optimizer, told):
        optimizer.update(net, *images())


def test_the_link_is_named() -> None:
    optimizer = optimizer_of(net := Normalised(L.BatchNormalization(6)))
    with accumulate(optimizer, steps=2):
        with pytest.raises(AccumulationError, match="'BatchNormalization' of /norm computes"):
            net(*images())


def instance_norm(x: Any) -> Any:
    n, c, h, w = x.shape
    one = np.ones(n * c, x.dtype)
    y = F.batch_normalization(F.reshape(x, (1, n * c, h * w)), one, 0 * one)
    return F.reshape(y, x.shape)


@pytest.mark.parametrize(
    "norm", [lambda: L.GroupNormalization(3), lambda: instance_norm], ids=["group", "instance"]
)
@pytest.mark.parametrize("size", [1, 4])
def test_normalisations_of_a_sample_are_not_refused(norm: Callable[[], Any], size: int) -> None:
    np.random.seed(0)
    net = Normalised(norm())
    optimizer = optimizer_of(net, lambda: chainer.optimizers.SGD(0))
    optimizer.update(net, *images())
    whole = gradients(net)
    with accumulate(optimizer, micro_batch=size):
        optimizer.update(net, *images())
    assert apart(whole, gradients(net)) < 1e-5


def test_batch_normalisation_that_is_not_trained_is_no_matter() -> None:
    net = Normalised(L.BatchNormalization(6))
    optimizer = optimizer_of(net)
    with chainer.using_config("train", False), accumulate(optimizer, micro_batch=2):
        optimizer.update(net, *images())
    assert optimizer.t == 1
