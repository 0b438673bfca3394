"""Planned recomputation where a pass is not the planned one, or something goes wrong."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recompute_cases import (
    Branching,
    Deep,
    Mlp,
    Residual,
    Shared,
    backward,
    images,
    larger,
    planned,
    rows,
    same,
    train,
)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.errors import (
    BudgetError,
    RecomputeError,
    RecomputeWarning,
    SizeError,
    StateError,
    UnsupportedError,
)

pytestmark = pytest.mark.thorough

quiet = pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")


class Sizes:
    """Batches, every third of which is small."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, rng: Any) -> Any:
        self.count += 1
        return rows(rng)[: 12 if self.count % 3 else 5]


def test_a_last_small_batch_is_planned_for_as_well() -> None:
    memory = umem.chainer.Recompute("min")
    same(train("mlp", memory, steps=12, data=Sizes()), train("mlp", steps=12, data=Sizes()))
    assert len(planned(memory)) == 2


@pytest.mark.parametrize("lengths", [[1, 1, 1, 2, 1, 2, 2, 1, 2], [2, 2, 2, 1, 2, 1, 2, 1]])
def test_a_graph_that_changes_is_exact_said_once_and_planned_when_it_comes_back(
    lengths: list[int],
) -> None:
    memory = umem.chainer.Recompute("min")
    steps = len(lengths)
    with pytest.warns(RecomputeWarning) as said:
        found = train(lambda: Branching(lengths), memory, steps=steps)
    same(found, train(lambda: Branching(lengths), steps=steps))
    assert len(said) == len({str(w.message) for w in said})
    assert len(planned(memory)) >= 1


def test_a_graph_that_never_comes_back_plans_nothing_and_says_so_once() -> None:
    lengths = list(range(1, 12))
    memory = umem.chainer.Recompute("min")
    with pytest.warns(RecomputeWarning, match="nothing is planned: the last 8 passes") as said:
        found = train(lambda: Branching(lengths), memory, steps=11)
    assert len(said) == 1
    same(found, train(lambda: Branching(lengths), steps=11))
    assert "nothing is planned" in memory.report()


class Pair(chainer.Chain):
    """A generator and a critic in turn, over one graph."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.generator, self.critic = Mlp(), Mlp()


def adversarial(model: Any, x: Any, t: Any) -> Any:
    fake = chainer.as_variable(x)
    for layer in model.generator:
        fake = F.tanh(layer(fake))
    first = model.critic.loss(fake, t)
    model.cleargrads()
    (model.critic.loss(x, t) - first).backward()
    model.generator.cleargrads()
    first.backward()
    return first


def in_turn(model: Any, x: Any, t: Any) -> Any:
    backward(model.generator, x, t)
    model.cleargrads()
    for part in (model.generator, model.critic):
        loss = part.loss(x, t)
        loss.backward()
    return loss


@quiet
@pytest.mark.parametrize("step", [adversarial, in_turn])
def test_two_models_in_turn(step: Any) -> None:
    memory = umem.chainer.Recompute("min")
    same(train(Pair, memory, step=step), train(Pair, step=step))
    assert planned(memory)


@pytest.mark.parametrize("steps", [0, 3])
def test_backward_after_the_block(steps: int) -> None:
    memory = umem.chainer.Recompute("min")
    gradients = []
    for inside in (True, False):
        np.random.seed(3)
        model = Residual()
        x, t = images(np.random.default_rng(0)), np.arange(6, dtype=np.int32)
        if inside:
            with memory:
                for _ in range(steps):
                    backward(model, x, t)
                loss = model.loss(x, t)
        else:
            for _ in range(steps):
                backward(model, x, t)
            loss = model.loss(x, t)
        model.cleargrads()
        loss.backward()
        gradients.append([p.grad for _, p in sorted(model.namedparams())])
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_block_is_entered_once() -> None:
    memory = umem.chainer.Recompute("min")
    before = chainer.FunctionNode.apply
    with memory:
        with pytest.raises(StateError, match="entered already"), memory:
            pass
        with pytest.raises(StateError, match="one step has one budget"):
            umem.chainer.Recompute("min").__enter__()
    assert chainer.FunctionNode.apply is before
    assert memory.report() == "no graph was seen yet"


def test_the_graph_dies_with_its_loss() -> None:
    memory = umem.chainer.Recompute("min")
    train("shared", memory, steps=4)
    gc.collect()
    kinds = [type(thing).__name__ for thing in gc.get_objects()]
    assert "Call" not in kinds


def test_recomputed_operations_are_seen_as_backward() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        with umem.record() as recorder:
            loss = backward(model, x, t)
        convolutions.append(
            [op.phase for op in recorder.trace.ops if op.name.startswith("Convolution2D")]
        )
        return loss

    convolutions: list[list[str]] = []
    same(
        train("residual", umem.chainer.Recompute("min"), step=step, steps=4),
        train("residual", step=step, steps=4),
    )
    assert convolutions[3].count("forward") == convolutions[7].count("forward")
    assert convolutions[3].count("backward") > convolutions[7].count("backward")


def test_the_virtual_gpu_sees_less_memory() -> None:
    peaks = []
    for memory in (None, umem.chainer.Recompute("min")):
        with umem.virtual_gpu("v100-16gb"), umem.statistics() as seen:
            train(Deep, memory, steps=5, data=larger)
        peaks.append(seen.peak_bytes)
    assert peaks[1] < 0.7 * peaks[0]


def test_hooks_of_the_user_see_every_call_once() -> None:
    class Counts(chainer.FunctionHook):
        def __init__(self) -> None:
            self.forward, self.backward = 0, 0

        def forward_preprocess(self, function: Any, in_data: Any) -> None:
            self.forward += chainer.config.enable_backprop

        def backward_postprocess(self, function: Any, in_data: Any, grads: Any) -> None:
            self.backward += 1

    counts = []
    for memory in (None, umem.chainer.Recompute("min")):
        with Counts() as hook:
            train("residual", memory)
        counts.append((hook.forward, hook.backward))
    assert counts[0] == counts[1]


class Draws(chainer.FunctionNode):
    """Draws anew in every forward."""

    def forward(self, inputs: Any) -> Any:
        self.noise = np.random.rand(*inputs[0].shape).astype(np.float32)
        return (inputs[0] * self.noise,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        return (grads[0] * self.noise,)


def test_a_function_that_cannot_run_again_is_kept_and_named() -> None:
    class Noisy(Mlp):
        def loss(self, x: Any, t: Any) -> Any:
            for layer in self:
                x = Draws().apply((F.tanh(layer(x)),))[0]
            return F.softmax_cross_entropy(x, t)

    memory = umem.chainer.Recompute("min")
    same(train(Noisy, memory), train(Noisy))
    assert "cannot run again, and are kept: 8 calls (Draws#" in memory.report()


# -- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, "0%", "120%", "-5%", "%", 0.5, True, "lots", -1, None])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises((SizeError, TypeError)):
        umem.chainer.Recompute(budget)


def test_too_small_a_budget_names_the_least_the_floor_and_what_forces_it() -> None:
    np.random.seed(0)
    model, x, t = Shared(), rows(np.random.default_rng(0)), np.zeros(12, np.int32)
    memory = umem.chainer.Recompute(1000)
    with pytest.raises(BudgetError, match=r"the least budget is .* floor of .*, which '.*' forces"):
        with memory:
            for _ in range(3):
                loss = backward(model, x, t)
    gradients = [p.grad for p in model.params()]
    assert float(backward(model, x, t).array) == float(loss.array)
    for a, b in zip(gradients, [p.grad for p in model.params()], strict=True):
        np.testing.assert_array_equal(a, b)
    assert "not planned: a budget of 1000" in memory.report()


@pytest.mark.parametrize(
    ("when", "budget"), [("planned", "min"), ("first", "min"), ("plain", "1GiB")]
)
def test_an_array_that_is_edited_is_found_in_debug_mode(when: str, budget: str) -> None:
    np.random.seed(0)
    model, t = Mlp(), np.zeros(12, np.int32)
    with umem.chainer.Recompute(budget, debug=True):
        for _ in range(0 if when == "first" else 4):
            backward(model, rows(np.random.default_rng(0)), t)
        x = rows(np.random.default_rng(0))
        loss = model.loss(x, t)
        x += 1
        with pytest.raises(RecomputeError, match="'LinearFunction' was edited in place"):
            loss.backward()


def test_debug_mode_changes_nothing() -> None:
    same(train("residual", umem.chainer.Recompute("min", debug=True)), train("residual"))


def test_a_static_graph_and_chainerx_arrays_are_refused() -> None:
    fake: Any = SimpleNamespace(_has_chainerx_array=True)
    x = np.zeros((2, 16), np.float32)
    with umem.chainer.Recompute("min"):
        with chainer.using_config("schedule_func", lambda: None):
            with pytest.raises(UnsupportedError, match="static_graph"):
                F.relu(x)
        with pytest.raises(UnsupportedError, match="ChainerX"):
            chainer.functions.activation.relu.ReLU().apply((fake,))
        assert L.Linear(16, 2)(x).shape == (2, 2)


def test_report_and_picture(tmp_path: Path) -> None:
    memory = umem.chainer.Recompute("min")
    with pytest.raises(StateError, match="no graph is planned yet"):
        memory.draw(tmp_path / "no.png")
    train("residual", memory)
    text = memory.report(picture=tmp_path / "memory.png")
    assert "predicted" in text and "measured" in text and "run again" in text
    assert "not measured yet" not in text
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
