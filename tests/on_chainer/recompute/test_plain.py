"""Recomputation where a plain step fits the budget: left alone, and not lost sight of."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from recompute_cases import (
    MODELS,
    Branching,
    Residual,
    backward,
    larger,
    planned,
    rows,
    same,
    train,
)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F

from umem.chainer.recompute.tape import Call
from umem.errors import RecomputeWarning

pytestmark = pytest.mark.thorough

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
    seen = [len(known.tape.observed) for known in memory.graphs]  # a state's first step differs
    assert learned.plan.fits and learning == sum(seen) + len(learned.tape.observed)


def test_what_a_plain_step_takes_is_predicted_measured_and_reported() -> None:
    memory = umem.chainer.Recompute("100%")
    train(Residual, memory, data=larger, steps=4)
    assert memory.measured_bytes == pytest.approx(memory.predicted_bytes, rel=0.02)
    report = memory.report()
    assert "a plain step fits, and nothing is dropped" in report
    assert "0% measured" in report and "run again: nothing" in report


def test_between_what_a_plan_and_what_a_plain_step_keeps_saved_arrays_go_early() -> None:
    whole = umem.chainer.Recompute("100%")
    train(Residual, whole, data=larger, steps=4)
    assert whole.measured_bytes is not None
    budget = round(0.985 * whole.measured_bytes)
    memory = umem.chainer.Recompute(budget)
    same(train(Residual, memory, data=larger, steps=4), train(Residual, data=larger, steps=4))
    (learned,) = planned(memory)
    assert not learned.plan.fits and memory.measured_bytes <= 1.02 * budget


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
    small, large = sorted(planned(memory), key=lambda learned: learned.plan.plain_bytes)
    assert small.plan.fits and not large.plan.fits
    assert large.measured_bytes < 0.8 * large.plan.plain_bytes


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([2, 2, 2, 3, 3, 3, 3, 2, 3], "call 32 .* differs from the plan"),
        ([2, 2, 2, 1, 1, 1, 1, 2, 1], "call 16 .* differs from the plan"),
    ],
)
def test_another_graph_is_exact_said_once_and_planned_when_it_comes_back(
    times: list[int], said: str
) -> None:
    memory = umem.chainer.Recompute(ROOMY)
    steps = len(times)
    with pytest.warns(RecomputeWarning, match=said) as caught:
        found = train(lambda: Branching(times), memory, steps=steps)
    assert len(caught) == len({str(w.message) for w in caught})
    same(found, train(lambda: Branching(times), steps=steps))
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
    assert planned(memory)[0].plan.fits


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


# -- what a pass meets that is left alone ------------------------------------------------------


def quietly(step: Any, budget: Any = ROOMY, steps: int = 8) -> umem.chainer.Recompute:
    """Train with and without a budget, and compare; warnings are no matter."""
    memory = umem.chainer.Recompute(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        found = train("mlp", memory, step=step, steps=steps)
    same(found, train("mlp", step=step, steps=steps))
    return memory


def tanh_of(layers: Any, h: Any) -> Any:
    for layer in layers:
        h = F.tanh(layer(h))
    return h


def test_backward_goes_on_into_a_graph_whose_arrays_were_dropped() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        """Backward at every step; the state is cut at every second."""
        model.turn = getattr(model, "turn", -1) + 1
        state = x if model.turn % 2 == 0 else model.state
        model.state = tanh_of(model, state)
        model.cleargrads()
        loss = F.softmax_cross_entropy(model.state, t)
        loss.backward()
        return loss

    quietly(step)


def test_two_graphs_go_backward_in_turn_one_of_them_left_alone() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        model.cleargrads()
        large = F.sum(tanh_of(model, np.tile(x, (40, 1))))
        large.backward()
        small = F.sum(tanh_of(model, x))
        small.backward()
        large.backward()
        gradients = chainer.grad([large], [model[0].W])
        assert gradients[0] is not None
        return small

    least = quietly(step, "min")
    assert least.predicted_bytes is not None
    quietly(step, round(1.05 * least.predicted_bytes))


def test_sums_keep_their_order_where_the_inputs_come_from_a_graph_that_is_left_alone() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        model.turn = getattr(model, "turn", -1) + 1
        first = model[0](x)
        y = tanh_of(model[1:4], first)
        F.sum(y * y).backward()
        model.cleargrads()
        h, z = (v if model.turn > 6 else chainer.Variable(v.array.copy()) for v in (first, y))
        h, z = (F.tile(v, (40, 1)) for v in (h, z))
        u = h
        for layer in model[4:]:
            u = F.tanh(layer(u)) + h
        loss = F.sum(u * h * z + F.tanh(h) * z)
        loss.backward()
        return loss

    least = quietly(step, "min", steps=10)
    assert least.predicted_bytes is not None
    quietly(step, round(1.05 * least.predicted_bytes), steps=10)


def test_a_step_whose_graph_is_kept_over_the_next_is_followed(followed: list[str]) -> None:
    """As in the usual loop, where the loss is bound until the next one is."""

    def step(model: Any, x: Any, t: Any) -> Any:
        model.kept = backward(model, x, t)
        return model.kept

    whole = quietly(step, "100%")
    assert len(followed) == 8 * 17 and whole.predicted_bytes is not None
    followed.clear()
    quietly(step, 2 * whole.predicted_bytes)
    assert len(followed) == 2 * 17, "there is room for two"


@pytest.mark.parametrize("change", ["kernel", "words"])
def test_more_of_what_no_output_shows_is_seen(change: str) -> None:
    def convolve(model: Any, x: Any, t: Any) -> Any:
        wide = model.turn > 4
        weights = np.ones((4, 4, 7, 7) if wide else (4, 4, 1, 1), np.float32)
        images = F.tile(model[0](x)[:, :, None, None], (1, 1, 1, 16))[:, :4]
        y = F.convolution_2d(images, chainer.Parameter(weights), pad=3 if wide else 0)
        return F.sum(y)

    def look_up(model: Any, x: Any, t: Any) -> Any:
        table = chainer.Parameter(np.ones((50_000 if model.turn > 4 else 100, 16), np.float32))
        return F.sum(F.tanh(model[0](x)) * F.embed_id(t, table))

    def step(model: Any, x: Any, t: Any) -> Any:
        model.turn = getattr(model, "turn", 0) + 1
        loss = (convolve if change == "kernel" else look_up)(model, x, t)
        model.cleargrads()
        loss.backward()
        return loss

    memory = quietly(step, steps=10)
    assert len(planned(memory)) == 2


def test_a_first_call_that_fails_leaves_nothing_behind() -> None:
    class Fails(chainer.FunctionHook):
        def forward_preprocess(self, function: Any, in_data: Any) -> None:
            raise ArithmeticError

    def step(model: Any, x: Any, t: Any) -> Any:
        with pytest.raises(ArithmeticError), Fails():
            model[0](x)
        return backward(model, x, t)

    memory = umem.chainer.Recompute(ROOMY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecomputeWarning)
        found = train("mlp", memory, step=step)
    same(found, train("mlp", step=step))
    assert planned(memory)[0].is_left_alone


def test_calls_that_die_at_once_do_not_end_a_pass(followed: list[str]) -> None:
    def first(model: Any, x: Any) -> Any:
        h = F.sigmoid(chainer.Variable(x))
        return model[0](h.array)  # the first call's graph goes

    def step(model: Any, x: Any, t: Any) -> Any:
        h = tanh_of(model[1:4], first(model, x))
        float(F.accuracy(h, t).array)
        loss = F.softmax_cross_entropy(tanh_of(model[4:], h), t)
        model.cleargrads()
        loss.backward()
        return loss

    memory = quietly(step)
    assert len(followed) == 2 * len(planned(memory)[0].tape.observed)


def test_a_graph_that_came_once_is_not_waited_for_with_a_measurement_on() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        model.turn = getattr(model, "turn", 0) + 1
        loss = F.sum(tanh_of([*model, *model] if model.turn == 2 else model, x))
        model.cleargrads()
        measuring.append(tracemalloc.is_tracing())
        loss.backward()
        return loss

    measuring: list[bool] = []
    memory = quietly(step, steps=14)
    assert sum(measuring) == 1 and memory.measured_bytes is not None
    measuring.clear()
    memory = quietly(step, "min", steps=30)
    assert not any(measuring[15:]) and memory.measured_bytes is not None


def test_two_graphs_that_are_wired_otherwise_and_known_are_both_left_alone() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        model.turn = getattr(model, "turn", 0) + 1
        a, b, c, d = model[:4]
        loss = F.sum(b(b(a(x))) if model.turn % 2 else d(c(b(a(x)))))
        model.cleargrads()
        loss.backward()
        return loss

    memory = quietly(step, steps=12)
    assert [learned.is_left_alone for learned in planned(memory)] == [True, True]


def test_differentiating_twice_is_said() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        model.turn = getattr(model, "turn", 0) + 1
        loss = F.mean(tanh_of(model, x) ** 2)
        model.cleargrads()
        loss.backward(enable_double_backprop=model.turn == 5)
        return loss

    memory = umem.chainer.Recompute(ROOMY)
    with pytest.warns(RecomputeWarning, match="not planned.* it is differentiated twice"):
        found = train("mlp", memory, step=step)
    same(found, train("mlp", step=step))
