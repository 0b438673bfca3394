"""What a plan must not change: functions that do more than compute, several graphs, failures."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from random_programs import Counting, Inner, Old, Runs
from recompute_cases import rows, same, train

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.errors import RecomputeError

Apply = Callable[[Any, Any], Any]
"""Applies a function of interest to a value, with a link that is also used elsewhere."""


class Net(chainer.Chain):
    """A function of interest on one branch, the link that it uses on the other, layers after."""

    def __init__(self, apply: Apply) -> None:
        super().__init__()
        self.apply = apply
        with self.init_scope():
            self.first = L.Linear(16, 16)
            self.shared = L.Linear(16, 16)
            self.layers = chainer.ChainList(*(L.Linear(16, 16) for _ in range(4)))

    def loss(self, x: Any, t: Any) -> Any:
        h = self.apply(self.shared, self.first(x)) + self.shared(chainer.Variable(x))
        for layer in self.layers:
            h = F.tanh(layer(F.sigmoid(h))) + h
        return F.softmax_cross_entropy(h, t)


def forgotten(link: Any, h: Any) -> Any:
    return F.forget(lambda z: F.tanh(link(z)), h)


def checkpointed(link: Any, h: Any) -> Any:
    return umem.chainer.checkpoint(lambda z: F.dropout(F.tanh(link(z)), 0.2), h)


def zoned_out(link: Any, h: Any) -> Any:
    return F.zoneout(h, F.tanh(link(h)), 0.3)


def counted(link: Any, h: Any) -> Any:
    return Old()(Counting().apply((link(h),))[0], h)


def gone_backward_inside(link: Any, h: Any) -> Any:
    return Inner(link).apply((h,))[0]


def renormalised(link: Any, h: Any) -> Any:
    one, zero = np.ones(16, "f"), np.zeros(16, "f")
    return F.batch_renormalization(link(h), one, zero, 1.5, 0.5, running_mean=zero, running_var=one)


class Scaled(chainer.FunctionNode):
    """Multiplies by an array of the configuration, as it is when it runs."""

    def forward(self, inputs: Any) -> Any:
        self.scale = float(chainer.config.scale_of_test[0])
        return (inputs[0] * np.float32(self.scale),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        return (gradients[0] * self.scale,)


def configured(link: Any, h: Any) -> Any:
    for scale in (0.5, 0.75):
        chainer.global_config.scale_of_test = np.array([scale, 1.0])
        (h,) = Scaled().apply((F.tanh(link(h)),))
    with chainer.using_config("scale_of_test", np.array([0.25, 1.0])):
        return Scaled().apply((F.tanh(link(h)),))[0]


APPLIES = (
    forgotten, checkpointed, zoned_out, counted, gone_backward_inside, renormalised, configured
)  # fmt: skip
KINDS = {apply.__name__: apply for apply in APPLIES}


def three_graphs_in_another_order(model: Any, x: Any, t: Any) -> Any:
    losses = [model.loss(x, t) for _ in range(3)]
    model.cleargrads()
    for loss in (losses[1], losses[0], losses[2], losses[1]):
        loss.backward()
    return losses[0]


def once(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward()
    return loss


def in_test_mode_and_then_in_training(model: Any, x: Any, t: Any) -> Any:
    with chainer.using_config("train", False):
        a = model.loss(x, t)
    b = model.loss(x, t)
    model.cleargrads()
    a.backward()
    b.backward()
    return a


STEPS = {step.__name__: step for step in (once, three_graphs_in_another_order)}


def run(apply: Apply, step: Any, memory: Any = None, **options: Any) -> dict[str, Any]:
    Runs.counts = {"forward": 0, "backward": 0, "old": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train(lambda: Net(apply), memory, step=step, data=rows, **options)
    return found | {name: np.array(count) for name, count in Runs.counts.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_does_more_than_compute_is_exact(kind: str, step: str) -> None:
    expected = run(KINDS[kind], STEPS[step])
    for budget in ("min", "80%"):
        memory = umem.chainer.Recompute(budget)
        same(run(KINDS[kind], STEPS[step], memory), expected)
        assert memory.planned_count


class Normal(Net):
    def __init__(self) -> None:
        super().__init__(lambda link, h: F.tanh(link(h)))
        with self.init_scope():
            self.norm = L.BatchNormalization(16)
            self.renorm = L.BatchRenormalization(16)

    def loss(self, x: Any, t: Any) -> Any:
        h = F.sigmoid(self.norm(self.shared(x)))
        h = F.tanh(self.layers[0](self.renorm(h)))
        for layer in self.layers:
            h = F.tanh(layer(h))
        return F.softmax_cross_entropy(h, t)


@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_a_graph_in_test_mode_reads_its_statistics_as_they_were() -> None:
    step = in_test_mode_and_then_in_training
    for budget in ("min", "80%"):
        memory = umem.chainer.Recompute(budget)
        same(train(Normal, memory, step=step), train(Normal, step=step))
        assert memory.planned_count


class Cut(chainer.Chain):
    """Two recurrent states that are cut; the ranks of one overtake those of the other."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a, self.b = L.LSTM(16, 16), L.StatefulGRU(16, 16)
            self.layer = L.Linear(16, 16)

    def loss(self, x: Any, t: Any) -> Any:
        for state in (self.a.h, self.a.c, self.b.h):
            if state is not None:
                state.unchain_backward()
        left, right = self.a(self.layer(x)), self.layer(x)
        for _ in range(30):
            left = F.tanh(self.layer(left))
        for _ in range(3):
            right = self.b(right)
        return F.softmax_cross_entropy(left * right, t)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_ranks_that_order_backward_otherwise_are_noticed() -> None:
    memory = umem.chainer.Recompute("min")
    same(train(Cut, memory, steps=12), train(Cut, steps=12))
    assert memory.planned_count
    assert "in another order" in memory.report()


def params(model: Any) -> list[Any]:
    return [p for _, p in sorted(model.namedparams())]


def test_a_forward_that_goes_on_after_a_gradient_is_exact() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        a = model.loss(x, t)
        number[0] += 1
        if number[0] > 4:
            chainer.grad([a], [model.first.W])
        b = a + F.mean(F.tanh(model.first(x)) ** 2)
        model.cleargrads()
        b.backward()
        return b

    number = [0]
    expected = run(lambda link, h: F.tanh(link(h)), step, steps=8)
    number = [0]
    memory = umem.chainer.Recompute("min")
    same(run(lambda link, h: F.tanh(link(h)), step, memory, steps=8), expected)
    assert memory.planned_count == 2


@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_a_backward_that_cannot_be_is_refused_before_anything_changes() -> None:
    model = Net(lambda link, h: F.tanh(link(h)))
    rule = chainer.optimizers.SGD(0.1).setup(model)
    x, t = np.ones((8, 16), "f"), np.zeros(8, "i")
    with umem.chainer.Recompute("min"):
        for _ in range(5):
            loss = once(model, x, t)
            rule.update()
        model.cleargrads()
        before = model.first.W.grad = np.ones_like(model.first.W.array)
        with pytest.raises(RecomputeError, match="has changed its parameters since"):
            loss.backward()
        assert model.first.W.grad is before and model.layers[0].W.grad is None
        once(model, x, t)


def test_a_graph_that_is_left_behind_is_refused_once_what_it_reads_has_changed() -> None:
    model = Net(lambda link, h: F.tanh(link(h)))
    x, t = np.ones((8, 16), "f"), np.zeros(8, "i")
    with umem.chainer.Recompute("min"):
        for _ in range(4):
            loss, other = once(model, x, t), model.loss(x, t)
            model.cleargrads()
            other.backward()
    expected = model.first.W.grad.copy()
    model.cleargrads()
    loss.backward()
    assert np.array_equal(model.first.W.grad, expected)
    model.shared.W.array[...] += 1
    before = model.first.W.grad
    with pytest.raises(RecomputeError, match="changed after the block of Recompute"):
        other.backward()
    assert model.first.W.grad is before


def test_a_function_that_goes_backward_inside_under_a_flag_is_found_while_it_is_learned() -> None:
    class Flagged(Inner):
        umem_recomputable = True

    def apply(link: Any, h: Any) -> Any:
        return Flagged(link).apply((h,))[0]

    memory = umem.chainer.Recompute("min")
    same(run(apply, once, memory), run(apply, once))
    assert memory.planned_count


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
@pytest.mark.parametrize("cut_at", [0, 1, 2, 3])
def test_a_value_that_was_cut_in_one_pass_is_exact_in_the_next(cut_at: int) -> None:
    class Several(Normal):
        def loss(self, x: Any, t: Any) -> Any:
            a = self.norm(x)
            with chainer.using_config("train", False):
                b = self.norm(F.tanh(x))
            y = a + b + self.norm(b)
            steps.append(None)
            if len(steps) - 1 == cut_at:
                a.unchain()
            return F.softmax_cross_entropy(F.tanh(self.shared(y)), t)

    for budget in ("min", "80%", "100%"):
        steps: list[None] = []
        expected = train(Several)
        steps.clear()
        same(train(Several, umem.chainer.Recompute(budget)), expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_parameters_that_are_frozen_for_a_while_are_exact() -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__(lambda link, h: F.tanh(link(h)))

        def loss(self, x: Any, t: Any) -> Any:
            steps.append(None)
            for p in self.first.params():
                p._requires_grad = p.node._requires_grad = len(steps) not in (2, 3, 6)
            return super().loss(x, t)

    for budget in ("min", "80%"):
        steps: list[None] = []
        expected = train(Frozen, steps=9)
        steps.clear()
        same(train(Frozen, umem.chainer.Recompute(budget), steps=9), expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
@pytest.mark.parametrize("cut", ["unchain", "unchain_backward", "in a thread", "another array"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("again", [False, True])
def test_a_graph_that_is_changed_at_a_variable_goes_backward(
    cut: str, first: int, again: bool
) -> None:
    class Chained(Net):
        def __init__(self) -> None:
            super().__init__(lambda link, h: F.tanh(link(h)))

        def values(self, x: Any) -> list[Any]:
            made = [chainer.as_variable(x)]
            for layer in (*self.layers, self.first):
                made.append(F.tanh(F.sigmoid(layer(made[-1])) * 2))
            return made

    def change(held: Any) -> None:
        if cut == "another array":
            held.array = held.array * np.float32(0.5)
        elif cut == "in a thread":
            thread = threading.Thread(target=held.unchain)
            thread.start()
            thread.join()
        else:
            getattr(held, cut)()

    def step(model: Any, x: Any, t: Any) -> Any:
        steps.append(None)
        values = model.values(x)
        held, loss = values[2], F.softmax_cross_entropy(values[-1], t)
        del values
        model.cleargrads()
        if again:
            loss.backward()
        if len(steps) > first:
            change(held)
        loss.backward()
        return loss

    for budget in ("min", "80%", "100%"):
        steps: list[None] = []
        expected = train(Chained, step=step)
        steps.clear()
        same(train(Chained, umem.chainer.Recompute(budget), step=step), expected)


class Late(chainer.Chain):
    """A branch that one loss goes through alone, and from whose middle another loss goes on."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(16, 16) for _ in range(8)))

    def losses(self, x: Any, t: Any) -> tuple[Any, Any]:
        first, a, b, c, *rest = self.layers
        shared = deep = F.tanh(first(x))
        for _ in range(4):
            deep = F.sin(deep)
        middle = Counting().apply((F.tanh(a(shared * deep)),))[0]
        h = F.tanh(c(F.sigmoid(F.tanh(middle)))) * F.tanh(b(shared)) + F.tanh(shared)
        for layer in rest[:2]:
            h = F.tanh(layer(h))
        other = middle
        for layer in rest[2:]:
            other = F.tanh(layer(other))
        return F.softmax_cross_entropy(h, t), F.softmax_cross_entropy(other, t)


@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_an_order_that_must_stay_is_that_of_the_first_of_two_backwards() -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        losses = model.losses(x, t)
        model.cleargrads()
        for loss in losses:
            loss.backward()
        return losses[0]

    Runs.counts = {"forward": 0, "backward": 0, "old": 0}
    for budget in ("min", "80%"):
        memory = umem.chainer.Recompute(budget)
        same(train(Late, memory, step=step, data=rows), train(Late, step=step, data=rows))
        assert memory.planned_count
