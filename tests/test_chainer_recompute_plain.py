"""Recomputation where a plain step fits the budget: left alone, and not lost sight of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from recompute_cases import MODELS, Mlp, Residual, backward, larger, planned, rows, same, train

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F

from umem.chainer.recompute import RecomputeWarning
from umem.chainer.tape import Call
from umem.errors import RecomputeError

ROOMY = "1GiB"


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls were followed, in all passes."""
    labels: list[str] = []
    original = Call.__init__

    def watched(call: Call, number: int, index: int, func: Any, *args: Any) -> None:
        labels.append(func.label)
        original(call, number, index, func, *args)

    monkeypatch.setattr(Call, "__init__", watched)
    return labels


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("budget", [ROOMY, "100%"])
def test_it_is_exact_and_only_learning_follows_calls(
    name: str, budget: str, followed: list[str]
) -> None:
    memory = umem.chainer.Recompute(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecomputeWarning)
        found = train(name, memory)
    learning = len(followed)
    same(found, train(name))
    (learned,) = planned(memory)
    seen = [len(known.observed) for known in memory._course.learned]  # a state's first step differs
    assert learned.fits and learning == sum(seen) + len(learned.observed)


def test_what_a_plain_step_takes_is_predicted_measured_and_reported() -> None:
    memory = umem.chainer.Recompute("100%")
    train(Residual, memory, data=larger, steps=4)
    assert memory.measured_bytes == pytest.approx(memory.predicted_bytes, rel=0.02)
    report = memory.report()
    assert "a plain step fits, and is left as it is" in report
    assert "0% measured" in report and "run again: nothing" in report


def test_between_what_a_plan_and_what_a_plain_step_keeps_saved_arrays_go_early() -> None:
    whole = umem.chainer.Recompute("100%")
    train(Residual, whole, data=larger, steps=4)
    assert whole.measured_bytes is not None
    budget = round(0.985 * whole.measured_bytes)
    memory = umem.chainer.Recompute(budget)
    same(train(Residual, memory, data=larger, steps=4), train(Residual, data=larger, steps=4))
    (learned,) = planned(memory)
    assert not learned.fits and memory.measured_bytes <= 1.02 * budget


def tiled(rng: Any) -> Any:
    return np.tile(rows(rng), (40, 1))


class Grows:
    """Batches that do not fit follow some that do."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, rng: Any) -> Any:
        self.count += 1
        return (rows if self.count < 5 else tiled)(rng)


def test_a_larger_batch_is_planned_for() -> None:
    least = umem.chainer.Recompute("min")
    train("mlp", least, data=tiled)
    assert least.predicted_bytes is not None
    memory = umem.chainer.Recompute(round(1.1 * least.predicted_bytes))
    same(train("mlp", memory, steps=9, data=Grows()), train("mlp", steps=9, data=Grows()))
    small, large = sorted(planned(memory), key=lambda learned: learned.keep_all_bytes)
    assert small.fits and not large.fits and large.measured_bytes < 0.8 * large.keep_all_bytes


class Longer(Mlp):
    """A step has more layers or fewer than those before."""

    def __init__(self, times: list[int]) -> None:
        super().__init__()
        self.times = list(times)

    def loss(self, x: Any, t: Any) -> Any:
        for _ in range(self.times.pop(0)):
            for layer in self:
                x = F.tanh(layer(x))
        return F.softmax_cross_entropy(x, t)


@pytest.mark.parametrize(
    ("times", "said"),
    [([2, 2, 2, 3, 3, 3, 3, 2, 3], "call 32 .* is not what was planned"),
     ([2, 2, 2, 1, 1, 1, 1, 2, 1], "call 16 .* is not what was planned")],
)  # fmt: skip
def test_another_graph_is_exact_said_once_and_planned_when_it_comes_back(
    times: list[int], said: str
) -> None:
    memory = umem.chainer.Recompute(ROOMY)
    steps = len(times)
    with pytest.warns(RecomputeWarning, match=said) as caught:
        found = train(lambda: Longer(times), memory, steps=steps)
    assert len(caught) == len({str(w.message) for w in caught})
    same(found, train(lambda: Longer(times), steps=steps))
    assert len(planned(memory)) == 2


def test_a_pass_that_ends_early_is_said_once() -> None:
    def bare(model: Any, x: Any, t: Any) -> Any:
        for layer in model:
            x = F.tanh(layer(x))
        model.steps = getattr(model, "steps", 0) + 1
        if model.steps < 4 or model.steps > 5:
            x = F.sum(x)
        else:
            x.grad = np.ones_like(x.array)
        model.cleargrads()
        x.backward()
        return x

    memory = umem.chainer.Recompute(ROOMY)
    with pytest.warns(RecomputeWarning, match="a pass ended before its plan did") as caught:
        found = train("mlp", memory, step=bare)
    assert len(caught) == 1
    same(found, train("mlp", step=bare))


@pytest.mark.parametrize("lost", ["raises", "is dropped"])
def test_a_forward_that_is_lost_is_no_part_of_the_next_pass(lost: str) -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        if lost == "raises":
            with pytest.raises(ArithmeticError):
                raise ArithmeticError(F.tanh(model[0](x)).shape)
        else:
            float(model.loss(x, t).array)
        return backward(model, x, t)

    memory = umem.chainer.Recompute(ROOMY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecomputeWarning)
        found = train("mlp", memory, step=step)
    same(found, train("mlp", step=step))
    assert planned(memory)[0].fits


def test_backward_twice_goes_as_without() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        loss = model.loss(x, t)
        model.cleargrads()
        loss.backward(retain_grad=True)
        loss.backward()
        return loss

    memory = umem.chainer.Recompute(ROOMY)
    same(train("mlp", memory, step=step), train("mlp", step=step))


def test_differentiating_twice_is_exact() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        h = model[1](F.tanh(model[0](x)))
        loss = F.mean(h * h)
        model.cleargrads()
        weights = [model[0].W, model[1].W]
        grads = chainer.grad([loss], weights, enable_double_backprop=True)
        penalised = loss + sum(F.sum(g * g) for g in grads)
        penalised.backward()
        return penalised

    def sometimes(model: Any, x: Any, t: Any) -> Any:
        model.steps = getattr(model, "steps", 0) + 1
        if model.steps in (4, 6):
            return step(model, x, t)
        h = model[1](F.tanh(model[0](x)))
        loss = F.mean(h * h)
        model.cleargrads()
        loss.backward()
        return loss

    for one in (step, sometimes):
        memory = umem.chainer.Recompute(ROOMY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputeWarning)
            found = train("mlp", memory, step=one, steps=8)
        same(found, train("mlp", step=one, steps=8))


def test_an_update_between_two_backwards_changes_what_it_changes_without() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        h = F.tanh(model[0](x))
        first, second = F.sum(h * h), F.sum(model[1](h))
        model.cleargrads()
        first.backward()
        for p in model.params():
            if p.grad is not None:
                p.update()
        second.backward()
        return second

    memory = umem.chainer.Recompute(ROOMY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        found = train("mlp", memory, step=step)
    same(found, train("mlp", step=step))


def test_debug_mode_looks_all_the_same() -> None:
    np.random.seed(0)
    model, t = Mlp(), np.zeros(12, np.int32)
    with umem.chainer.Recompute(ROOMY, debug=True):
        for _ in range(4):
            backward(model, rows(np.random.default_rng(0)), t)
        x = rows(np.random.default_rng(0))
        loss = model.loss(x, t)
        x += 1
        with pytest.raises(RecomputeError, match="'LinearFunction' was edited in place"):
            loss.backward()
