"""Planned recomputation in random programs: every number is that of plain Chainer, to the bit."""

from __future__ import annotations

import random
import tracemalloc
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from recompute_cases import same

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.recompute import RecomputeWarning
from umem.errors import BudgetError, RecomputeError

pytestmark = pytest.mark.thorough

WIDTH = 16
EVENTS = (
    "none", "large batch", "small batch", "more layers", "evaluation", "evaluation with a graph",
    "forward fails", "backward fails", "loss is kept", "gradients are kept", "twice", "accuracy",
    "accuracy of inputs", "unchain", "retain_grad", "another loss", "chainer.grad", "double",
    "leave",
)  # fmt: skip
UPDATED = "an optimizer has changed its parameters since"


class Fails(chainer.FunctionHook):
    """Raises at the n-th function, in forward or in backward."""

    def __init__(self, count: int, backward: bool) -> None:
        self.count, self.backward = count, backward

    def _count(self) -> None:
        self.count -= 1
        if self.count < 0:
            raise ArithmeticError

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        if not self.backward:
            self._count()

    def backward_preprocess(self, function: Any, in_data: Any, grads: Any) -> None:
        if self.backward:
            self._count()


class Model(chainer.Chain):
    """A random graph of layers; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(WIDTH, WIDTH) for _ in range(4)])
            self.norm = L.BatchNormalization(WIDTH)
            self.embed = L.EmbedID(WIDTH, WIDTH)

    def apply_one(self, choice: random.Random, made: list[Any]) -> Any:
        kind, a, b = choice.randrange(9), choice.choice(made[-4:]), choice.choice(made)
        if kind <= 1:
            return choice.choice(list(self.layers))(a)
        if kind == 2:
            return F.tanh(a)
        if kind == 3:
            return a * b
        if kind == 4:
            return F.concat([a, b])[:, 8:24] + b
        if kind == 5:
            return F.broadcast_to(F.mean(F.relu(a), axis=0, keepdims=True), a.shape)
        if kind == 6:
            return F.dropout(a, 0.3)
        if kind == 7:
            return self.norm(a)
        left, right = F.split_axis(a, 2, 1)
        return F.concat([F.sigmoid(left) * right, right])

    def values(self, x: Any, t: Any, more: int = 0) -> list[Any]:
        choice = random.Random(self.seed)
        made = [chainer.as_variable(x)]
        for _ in range(choice.randint(3, 14) + more):
            made.append(self.apply_one(choice, made))
        total = self.layers[0](x) + self.embed(t)
        for value in made[-choice.randint(1, 4) :]:
            total = total + value
        return [*made, total]

    def loss(self, x: Any, t: Any, more: int = 0) -> Any:
        total = self.values(x, t, more)[-1]
        return F.mean(F.square(total)) if self.seed % 2 else F.softmax_cross_entropy(total, t)


def program(seed: int, memory: AbstractContextManager[Any], steps: int = 10) -> dict[str, Any]:
    """Losses, gradients, parameters and statistics of a random training run."""
    choice = random.Random(seed)
    np.random.seed(seed)
    model = Model(seed)
    rules = chainer.optimizers
    rule = choice.choice([rules.Adam, rules.MomentumSGD, rules.SGD])(0.001).setup(model)
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((40, WIDTH)).astype(np.float32), rng.integers(0, WIDTH, 40, "i")
    likely = [choice.choice(EVENTS) for _ in range(3)]
    often, late = choice.choice([0.2, 0.5, 0.9]), choice.randint(0, 4)
    clears_late, binds = choice.random() < 0.4, choice.random() < 0.3
    found: dict[str, Any] = {}
    kept: list[Any] = []
    loss = None
    memory.__enter__()
    try:
        for number in range(steps):
            event = choice.choice(likely) if choice.random() < often else "none"
            at = choice.randint(0, 15)
            x, t = data
            if event == "large batch":
                x, t = np.tile(x, (5, 1)), np.tile(t, 5)
            if event == "small batch":
                x, t = x[:7], t[:7]
            if not clears_late and event != "gradients are kept":
                model.cleargrads()
            before_forward(event, at, model, x, t)
            if event == "leave":
                memory.__exit__(None, None, None)
                try:
                    if loss is not None:
                        model.cleargrads()
                        loss.backward()
                finally:
                    memory.__enter__()
            loss = forward(event, model, x, t, kept)
            if clears_late and event != "gradients are kept":
                model.cleargrads()
            loss = backward(event, at, model, x, t, loss)
            if event == "accuracy of inputs":
                kept.append(F.accuracy(chainer.Variable(x), t))
            if event == "loss is kept":
                kept.append(loss)
            found[f"loss {number}"] = np.array(loss.array)
            for key, p in sorted(model.namedparams()):
                found[f"{key}.grad {number}"] = None if p.grad is None else p.grad.copy()
            if number >= late and event != "gradients are kept":
                rule.update()
            if not binds:
                loss = None
    finally:
        memory.__exit__(None, None, None)
    found |= {key: p.array.copy() for key, p in sorted(model.namedparams())}
    return found | {"mean": model.norm.avg_mean.copy(), "random": np.array(np.random.rand())}


def before_forward(event: str, at: int, model: Model, x: Any, t: Any) -> None:
    if event == "evaluation":
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            model.loss(x, t)
    if event == "evaluation with a graph":
        with chainer.using_config("train", False):
            model.loss(x, t)
    if event == "forward fails":
        try:
            with Fails(at, backward=False):
                model.loss(x, t)
        except ArithmeticError:
            pass


def forward(event: str, model: Model, x: Any, t: Any, kept: list[Any]) -> Any:
    if event == "another loss":
        values = model.values(x, t)
        F.sum(F.square(values[len(values) // 2])).backward()
        return F.mean(F.square(values[-1]))
    if event == "accuracy":
        total = model.values(x, t)[-1]
        kept.append(F.accuracy(total, t))
        return F.softmax_cross_entropy(total, t)
    return model.loss(x, t, more=5 if event == "more layers" else 0)


def backward(event: str, at: int, model: Model, x: Any, t: Any, loss: Any) -> Any:
    if event == "backward fails":
        try:
            with Fails(at, backward=True):
                loss.backward()
        except ArithmeticError:
            pass
        model.cleargrads()
        loss = model.loss(x, t)
    if event == "chainer.grad":
        chainer.grad([loss], [model.layers[0].W])
    if event == "double" and model.seed % 2:
        loss.backward(enable_double_backprop=True)
        gradients = [p.grad_var for p in model.params() if p.grad_var is not None]
        model.cleargrads()
        sum(F.sum(g * g) for g in gradients).backward()
        return loss
    loss.backward(retain_grad=event == "retain_grad")
    if event == "twice":
        loss.backward()
    if event == "unchain":
        loss.unchain_backward()
    return loss


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_has_the_numbers_of_plain_chainer(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = program(seed, nullcontext())
    least = None
    for budget in ("min", "100%", "1GiB", None):
        if budget is None and least is None:
            continue
        memory = umem.chainer.Recompute(budget or round(1.1 * (least or 0)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = program(seed, memory)
            except RecomputeError as error:  # a backward after an update, for the first time
                assert UPDATED in str(error)
                continue
            except BudgetError:  # a step was larger than what "min" has planned
                assert budget is None
                continue
        same(found, expected)
        least = least or memory.predicted_bytes
        texts = [str(one.message) for one in said if issubclass(one.category, RecomputeWarning)]
        assert len(texts) == len(set(texts)), "each is said once"
        assert not tracemalloc.is_tracing() and memory._course.plain is None
