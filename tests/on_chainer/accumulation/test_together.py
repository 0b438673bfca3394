"""Accumulation with everything else that saves memory: the same step as on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import apart, gradients, parameters
from chainer import optimizers

ROWS = 22


class Deep(chainer.ChainList):
    """Six layers with dropout between them, and labels of which some are ignored."""

    def __init__(
        self, around: Callable[..., Any] = lambda func, x: func(x), ratio: float = 0.3
    ) -> None:
        super().__init__()
        self.around, self.ratio = around, ratio
        np.random.seed(0)
        for at in range(6):
            self.add_link(L.Linear(5 if at == 0 else 60, 60 if at < 5 else 4))

    def __call__(self, x: Any, t: Any) -> Any:
        for link in [*self][:-1]:
            x = self.around(lambda x, link=link: F.dropout(F.tanh(link(x)), self.ratio), x)
        return F.softmax_cross_entropy([*self][-1](x), t)


def some() -> tuple[Any, Any]:
    draw = np.random.RandomState(1)
    return draw.randn(ROWS, 5).astype("f"), draw.randint(-1, 4, ROWS).astype("i")


def trained(
    kind: Callable[[], Any],
    around: Callable[[Any, Any], AbstractContextManager[Any]],
    micro_batch: int | None,
    ratio: float = 0.3,
) -> tuple[Any, Any]:
    """Parameters after four updates, and the optimizer."""
    net = Deep(ratio=ratio)
    optimizer = kind().setup(net)
    np.random.seed(3)
    parts: Any = nullcontext()
    if micro_batch is not None:
        parts = umem.chainer.accumulate(optimizer, micro_batch=micro_batch)
    with around(net, optimizer), parts:
        for _ in range(4):
            optimizer.update(net, *some())
    return parameters(net).astype("d"), optimizer


WITH: dict[str, Callable[[Any, Any], AbstractContextManager[Any]]] = {
    "nothing": lambda net, optimizer: nullcontext(),
    "Recompute, least": lambda net, optimizer: umem.chainer.Recompute("min"),
    "Recompute, a share": lambda net, optimizer: umem.chainer.Recompute("90%"),
    "workspace": lambda net, optimizer: umem.chainer.workspace("64KiB"),
    "chunked updates": lambda net, optimizer: umem.chainer.chunked_updates(),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
@pytest.mark.parametrize("size", [8, 11])
@pytest.mark.parametrize("name", WITH)
def test_it_changes_no_bit_of_what_accumulation_gives(name: str, size: int) -> None:
    def adam() -> Any:
        return optimizers.Adam(0.01)

    plain, _ = trained(adam, WITH["nothing"], size)
    found, optimizer = trained(adam, WITH[name], size)
    assert np.array_equal(plain, found) and optimizer.t == 4
    whole, _ = trained(adam, WITH[name], None, ratio=0)
    found, _ = trained(adam, WITH[name], size, ratio=0)
    assert apart(whole, found) < 1e-4


EIGHT_BITS = {
    "Adam8bit": lambda: umem.chainer.optimizers.Adam8bit(0.01),
    "AdamW8bit": lambda: umem.chainer.optimizers.AdamW8bit(0.01),
    "MomentumSGD8bit": lambda: umem.chainer.optimizers.MomentumSGD8bit(0.1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_states_of_8_bits_are_updated_once(name: str) -> None:
    whole, _ = trained(EIGHT_BITS[name], WITH["nothing"], None, ratio=0)
    found, optimizer = trained(EIGHT_BITS[name], WITH["nothing"], 8, ratio=0)
    assert optimizer.t == 4 and apart(whole, found) < 2e-3


def test_the_comparison_waits_for_a_scale_at_which_sums_over_parts_are_finite() -> None:
    net = L.Linear(8, 2, initialW=0)
    optimizer = optimizers.SGD(1e-9).setup(net)
    x, t = np.ones((6, 16, 8), np.float32), np.zeros((6, 16), np.int32)
    t[:4, 1:] = -1  # one label in each of the first samples: the sum grows over its first parts

    def loss(x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(net(x.reshape(-1, 8)), t.ravel())

    with (
        umem.chainer.half_precision(net, optimizer) as half,
        umem.chainer.accumulate(optimizer, micro_batch=4),
    ):
        for _ in range(8):  # each gradient is half of the scale
            optimizer.update(loss, x, t)
        assert 0 < optimizer.t < 8 and half.scale < 65504


@pytest.mark.parametrize("micro_batch", [8, 22])
def test_regions_of_checkpoint_are_run_again_part_by_part(micro_batch: int) -> None:
    found = []
    for around in (lambda func, x: func(x), umem.chainer.checkpoint):
        net = Deep(around)
        optimizer = optimizers.SGD(0).setup(net)
        np.random.seed(3)
        with umem.chainer.accumulate(optimizer, micro_batch=micro_batch, check=False):
            optimizer.update(net, *some())
        found.append(gradients(net))
    assert np.array_equal(*found)


def test_a_dynamic_loss_scale_that_overflows_skips_the_step_once() -> None:
    net = Deep()
    optimizer = optimizers.SGD(0.1).setup(net)
    optimizer.loss_scaling()
    optimizer._loss_scale = 4.0
    before = parameters(net)
    x, t = some()
    x[-1] = np.inf
    with (
        umem.chainer.accumulate(optimizer, micro_batch=8),
        np.errstate(all="ignore"),
        pytest.warns(UserWarning, match="Non finite number found in param.grad"),
    ):
        optimizer.update(net, x, t)
    assert np.array_equal(parameters(net), before) and optimizer._loss_scale == 2.0
