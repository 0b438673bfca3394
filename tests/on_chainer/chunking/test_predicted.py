"""What a cap on workspace is said to leave of a peak is what it leaves."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.chunking.functions import RULES
from umem.trace.analysis.capping import CAPPED, NORMALIZATIONS, cap_advice, under_cap
from umem.trace.trace import Trace
from umem.units import parse_bytes

pytestmark = pytest.mark.thorough

CAP = "1MiB"


class Step:
    """A step of a small convolutional network, whose peak is a convolution's."""

    def __init__(self) -> None:
        np.random.seed(0)
        convolutions = (L.Convolution2D(None, 16, 3, pad=1) for _ in range(6))
        self.link = chainer.ChainList(*convolutions, L.BatchNormalization(16), L.Linear(None, 10))
        self.optimizer = chainer.optimizers.MomentumSGD(lr=1e-3).setup(self.link)
        self.x = np.random.rand(16, 8, 32, 32).astype("float32")

    def __call__(self) -> None:
        h = self.x
        *convolutions, norm, last = self.link
        for convolution in convolutions:
            h = F.relu(convolution(h))
        h = norm(h)
        h = last(F.max_pooling_2d(h, 2))
        self.optimizer.update(lambda: F.mean(h**2))


def recorded(cap: str | None) -> Trace:
    step = Step()
    block: AbstractContextManager[Any] = (
        nullcontext() if cap is None else umem.chainer.workspace(cap)
    )
    with block:
        step()
        with umem.record() as recorder:
            step()
        with umem.record(measure="workspace") as calibration:
            step()
    return recorder.trace.with_workspace(calibration.trace)


def test_normalisation_under_a_cap_needs_no_more_than_is_said() -> None:
    def inside(trace: Trace) -> int:
        found = [op.workspace_bytes or 0 for op in trace.ops if op.name in NORMALIZATIONS]
        assert len(found) == 2
        return max(found)

    plain, capped = recorded(None), recorded(CAP)
    assert inside(capped) <= inside(under_cap(plain, parse_bytes(CAP))) < inside(plain)


def test_the_functions_that_are_counted_are_those_that_a_cap_concerns() -> None:
    assert {kind.__name__ for kind in RULES} == CAPPED - NORMALIZATIONS


def test_a_trace_under_a_cap_is_that_of_a_step_under_it() -> None:
    plain = recorded(None)
    for cap in ("4MiB", CAP):
        predicted = under_cap(plain, parse_bytes(cap)).peak_bytes
        measured = recorded(cap).peak_bytes
        assert measured <= predicted * 1.01
        assert measured == pytest.approx(predicted, rel=0.15)  # poolings keep smaller indexes
    assert "workspace of convolutions" in str(cap_advice(plain))
    assert cap_advice(recorded(CAP)) is None


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_recompute_says_what_a_cap_would_leave_of_its_peak(budget: str) -> None:
    def trained(cap: str | None) -> umem.chainer.Recompute:
        step = Step()
        block: AbstractContextManager[Any] = (
            nullcontext() if cap is None else umem.chainer.workspace(cap)
        )
        with block, umem.chainer.Recompute(budget) as memory:
            for _ in range(4):
                step()
        return memory

    plain = trained(None)
    found = re.search(
        r"(\d+)% of the peak is workspace of convolutions \(columns by im2col in "
        r"'Convolution2DFunction'\): umem.chainer.workspace\('(.*)'\) "
        r"would leave (\d+)%",
        plain.report(),
    )
    assert found, plain.report()
    assert int(found[1]) > 40
    capped = trained(found[2])
    assert plain.measured_bytes is not None and capped.measured_bytes is not None
    share = capped.measured_bytes / plain.measured_bytes
    assert share <= int(found[3]) / 100 + 0.02  # a new plan under the cap may leave less
    assert "workspace of convolutions" not in capped.report()
