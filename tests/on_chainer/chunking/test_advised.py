"""A cap on workspace is named where it leaves a step less."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.chunking.functions import RULES
from umem.trace.analysis import CAPPED, NORMALIZATIONS

pytestmark = pytest.mark.thorough


def test_the_functions_that_are_counted_are_those_that_a_cap_concerns() -> None:
    assert {kind.__name__ for kind in RULES} == CAPPED - NORMALIZATIONS


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_a_cap_that_recompute_names_leaves_less(budget: str) -> None:
    def trained(cap: str | None) -> umem.chainer.Recompute:
        np.random.seed(0)
        convolutions = (L.Convolution2D(None, 16, 3, pad=1) for _ in range(6))
        link = chainer.ChainList(*convolutions, L.Linear(None, 10))
        optimizer = chainer.optimizers.MomentumSGD(lr=1e-3).setup(link)
        x = np.random.rand(16, 8, 32, 32).astype("float32")

        def loss() -> Any:
            h = x
            for layer in link.children():
                h = F.relu(layer(h))
            return F.mean(h**2)

        block: AbstractContextManager[Any] = (
            nullcontext() if cap is None else umem.chainer.workspace(cap)
        )
        with block, umem.chainer.Recompute(budget) as memory:
            for _ in range(4):
                optimizer.update(loss)
        return memory

    plain, capped = trained(None), trained("1MiB")
    assert "of the peak is workspace of convolutions (columns by im2col in" in plain.report()
    assert plain.measured_bytes is not None and capped.measured_bytes is not None
    assert capped.measured_bytes < 0.7 * plain.measured_bytes
    assert "workspace of convolutions" not in capped.report()
