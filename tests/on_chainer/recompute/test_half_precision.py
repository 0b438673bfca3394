"""Half precision under Recompute: what was drawn is the same when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import chainer.functions as F
import chainer.links as L

DRAWING: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "rrelu": lambda h: F.rrelu(h),
    "gaussian": lambda h: F.gaussian(h, 0.1 * h),
    "zoneout": lambda h: F.zoneout(h, F.tanh(h), 0.3),
}


def losses(draw: Callable[[Any], Any], context: Any) -> list[float]:
    np.random.seed(0)
    layers = [L.Linear(12, 24), F.relu, draw, L.Linear(24, 24), F.tanh, draw, L.Linear(24, 5)]
    model = L.Classifier(chainer.Sequential(*layers))
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = np.random.rand(16, 12).astype(np.float32)
    t = np.random.randint(0, 5, 16).astype(np.int32)
    found = []
    with umem.chainer.half_precision(model, optimizer), context:
        for _ in range(6):
            optimizer.update(model, x, t)
            found.append(float(model.loss.array))
    return found


@pytest.mark.parametrize("name", DRAWING)
def test_a_plan_changes_no_bit(name: str) -> None:
    plain = losses(DRAWING[name], nullcontext())
    assert losses(DRAWING[name], umem.chainer.Recompute("min")) == plain
    assert len(set(plain)) == 6
