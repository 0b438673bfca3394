"""Under a budget the optimizer's update counts, and goes in chunks where its rule allows it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import optimizers

from umem.chainer.parameter_updates import CHUNK_BYTES
from umem.errors import BudgetError
from umem.units import MIB

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # of MSVAG's own
]

WIDTH = 512
OBJECTS = 200_000
"""Bytes of Python's own objects: functions, variables, caches."""


class _GreedyRule(type(optimizers.SGD().create_update_rule())):  # type: ignore[misc]
    def update_core_cpu(self, param: Any) -> None:
        copies = [param.grad * factor for factor in range(9)]
        param.data -= self.hyperparam.lr * copies[1]


class Greedy(optimizers.SGD):
    """SGD whose rule needs ten times the parameter while it runs, and is nobody's but its own."""

    def create_update_rule(self) -> Any:
        return _GreedyRule(self.hyperparam)


class Step:
    """A perceptron that takes steps, and what the last one took in all."""

    def __init__(self, optimizer: Any) -> None:
        np.random.seed(0)
        self.link = chainer.Sequential(L.Linear(WIDTH, WIDTH), F.relu, L.Linear(WIDTH, 8 * WIDTH))
        self.optimizer = optimizer.setup(self.link)
        self.x = np.random.standard_normal((4, WIDTH)).astype("float32")
        self.peak = 0

    def __call__(self) -> None:
        tracemalloc.reset_peak()
        self.optimizer.update(lambda: F.sum(self.link(self.x) ** 2) / 1e6)
        self.peak = tracemalloc.get_traced_memory()[1]

    @property
    def arrays(self) -> list[bytes]:
        found = [p.array for _, p in sorted(self.link.namedparams())]
        for _, p in sorted(self.link.namedparams()):
            found += [value for _, value in sorted((p.update_rule.state or {}).items())]
        return [array.tobytes() for array in found]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def taken(step: Step, passes: int = 4) -> int:
    """The most of the later steps."""
    most = 0
    for index in range(passes):
        step()
        if index >= 2:
            most = max(most, step.peak)
    return most


def taken_without_tracing(step: Step) -> None:
    for _ in range(4):
        step.optimizer.update(lambda: F.sum(step.link(step.x) ** 2) / 1e3)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("make", [Greedy, optimizers.Adam, optimizers.MSVAG, optimizers.SMORMS3])
def test_what_the_update_takes_is_in_the_prediction(make: Any) -> None:
    step = Step(make())
    with umem.chainer.Recompute("1GiB") as memory:
        peak = taken(step)
    (seen,) = memory.graphs
    assert seen.problem.update_bytes > (10 * 4 * 8 * WIDTH**2 if make is Greedy else 0)
    assert memory.predicted_bytes is not None and memory.measured_bytes is not None
    assert memory.predicted_bytes == pytest.approx(peak, rel=0.02, abs=OBJECTS)
    assert memory.measured_bytes == pytest.approx(peak, rel=0.02, abs=OBJECTS)
    assert "the optimizer's update" in memory.report()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("make", [optimizers.Adam, optimizers.MSVAG, optimizers.SMORMS3])
def test_a_plain_step_is_predicted_with_whole_updates(make: Any) -> None:
    peak = taken(Step(make()))
    gc.collect()
    with umem.chainer.Recompute("1GiB") as memory:
        taken(Step(make()))
    (seen,) = memory.graphs
    assert seen.problem.plain_bytes == pytest.approx(peak, rel=0.1)
    assert seen.problem.left_alone_bytes < seen.problem.plain_bytes


def test_what_a_hook_takes_is_not_taken_for_the_rules() -> None:
    """Weight decay makes an array as large as the parameter, in chunks or not."""
    optimizer = optimizers.SGD()
    step = Step(optimizer)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
    with umem.chainer.Recompute("1GiB") as memory:
        taken_without_tracing(step)
    (seen,) = memory.graphs
    largest = 4 * 8 * WIDTH**2
    assert seen.problem.update_bytes == pytest.approx(largest, rel=0.02)
    assert seen.problem.whole_update_bytes == pytest.approx(largest, rel=0.02)


def test_mixed_precision_counts_its_copies() -> None:
    with chainer.using_config("dtype", np.float16):
        optimizer = optimizers.SGD()
        optimizer.use_fp32_update()
        step = Step(optimizer)
    step.x = step.x.astype("float16")
    with umem.chainer.Recompute("1GiB") as memory:
        taken_without_tracing(step)
    (seen,) = memory.graphs
    count = 8 * WIDTH**2
    assert 4 * count < seen.problem.update_bytes < 7 * count
    assert 8 * count < seen.problem.whole_update_bytes < 9 * count
    assert seen.facts.state_bytes == pytest.approx(4 * 9 * WIDTH**2, rel=0.01)


def test_a_budget_that_the_update_alone_breaks_says_so() -> None:
    step = Step(Greedy())
    with umem.chainer.Recompute("60MiB"):
        step()
        step()
        with pytest.raises(
            BudgetError, match=r"which the optimizer's update forces.*while it runs"
        ):
            step()
    step()


def test_the_least_budget_is_never_below_what_the_update_takes() -> None:
    step = Step(Greedy())
    with umem.chainer.Recompute("min") as memory:
        taken(step)
    (seen,) = memory.graphs
    assert seen.plan is not None
    assert seen.plan.peak_bytes == seen.problem.update_peak_bytes == seen.problem.floor()[0]
    assert seen.plan.solution.plan.overhead == 0  # nothing is gained by running again
    with umem.chainer.Recompute(seen.plan.peak_bytes) as again:
        taken(step)
    assert again.graphs[0].plan is not None


@pytest.mark.parametrize(
    "make", [optimizers.Adam, optimizers.AMSBound, optimizers.MSVAG, optimizers.SMORMS3]
)
def test_updates_in_chunks_leave_the_bits_of_plain_training(make: Any) -> None:
    plain, step = Step(make()), Step(make())
    assert 4 * WIDTH**2 > CHUNK_BYTES
    tracemalloc.start(1)
    taken(plain)
    with umem.chainer.Recompute("min"):
        taken(step)
    tracemalloc.stop()
    assert step.arrays == plain.arrays


def test_a_step_that_fits_but_for_whole_updates_is_left_alone() -> None:
    with umem.chainer.Recompute("1GiB") as memory:
        tracemalloc.start(1)
        taken(Step(optimizers.MSVAG()))
        tracemalloc.stop()
    (seen,) = memory.graphs
    between = (seen.problem.left_alone_bytes + seen.problem.plain_bytes) // 2
    with umem.chainer.Recompute(between) as memory:
        tracemalloc.start(1)
        taken(Step(optimizers.MSVAG()))
        tracemalloc.stop()
    assert "a plain step fits" in memory.report()
    assert seen.problem.plain_bytes - seen.problem.left_alone_bytes > MIB
