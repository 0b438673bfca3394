"""Random training programs: a model, a loop, and what programs do around it.

A program is a function of its seed. Run with plain Chainer it is the oracle for the same program
under `umem.chainer.Recompute`: every number that it leaves has to be the same, bit for bit.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.link_hooks
import chainer.links as L

from umem.errors import BudgetError, RecomputeError

WIDTH, CLASSES = 12, 5
Memory = Callable[[int], AbstractContextManager[Any]]
"""Makes the block for the n-th time that a program enters one."""


# -- functions of a user's own -----------------------------------------------------------------


class Runs:
    """How often functions that change something have run."""

    counts: dict[str, int]


class Pure(chainer.FunctionNode):
    """Retains an input and an output, keeps an array, and may run again."""

    umem_recomputable = True

    def forward(self, inputs: Any) -> Any:
        self.kept = np.cos(inputs[0])
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return (np.sin(inputs[0]),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        assert self.get_retained_inputs()[0].shape == self.get_retained_outputs()[0].shape
        return (grads[0] * self.kept,)


class Counting(chainer.FunctionNode):
    """Changes something with every run, and draws random numbers: it must not run twice."""

    def forward(self, inputs: Any) -> Any:
        Runs.counts["forward"] += 1
        self.scale = np.float32(1 + 0.1 * np.random.rand())
        return (inputs[0] * self.scale,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        Runs.counts["backward"] += 1
        return (grads[0] * self.scale,)


class Old(chainer.Function):
    """A function as of Chainer 1, which keeps an array and counts its runs."""

    def forward(self, inputs: Any) -> Any:
        Runs.counts["old"] += 1
        self.y = np.exp(-(inputs[0] ** 2))
        return (self.y * inputs[1],)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return -2 * inputs[0] * self.y * inputs[1] * grads[0], grads[0] * self.y


class View(chainer.FunctionNode):
    """Returns a view of its input, and says nothing about running again."""

    def forward(self, inputs: Any) -> Any:
        return inputs[0][:, ::-1], inputs[0][:, :1]

    def backward(self, indexes: Any, grads: Any) -> Any:
        first = F.flip(grads[0], 1) if grads[0] is not None else 0
        if grads[1] is None:
            return (first,)
        width = grads[0].shape[1] if grads[0] is not None else WIDTH
        return (first + F.pad(grads[1], ((0, 0), (0, width - 1)), "constant"),)


class Inner(chainer.FunctionNode):
    """Goes backward by itself within its backward, through a link that it was given."""

    def __init__(self, link: Any) -> None:
        self.link = link

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        with chainer.no_backprop_mode():
            return (F.tanh(self.link(inputs[0])).array,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        x = chainer.Variable(self.get_retained_inputs()[0].array)
        with chainer.force_backprop_mode():
            y = F.tanh(self.link(x))
        y.grad = grads[0].array
        y.backward()
        return (x.grad_var,)


class Failing(chainer.FunctionNode):
    """Raises where it is told to, in forward or in backward."""

    countdown: ClassVar[dict[str, int]] = {"forward": -1, "backward": -1}

    def forward(self, inputs: Any) -> Any:
        self._count("forward")
        return (inputs[0].copy(),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        self._count("backward")
        return grads

    def _count(self, where: str) -> None:
        self.countdown[where] -= 1
        if self.countdown[where] == 0:
            raise ArithmeticError(where)


class FailingHook(chainer.FunctionHook):
    """Raises at the n-th function of a forward or a backward."""

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


# -- models ------------------------------------------------------------------------------------


class Model(chainer.Chain):
    """A random graph of links and functions; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(WIDTH, WIDTH) for _ in range(4)))
            self.embed = L.EmbedID(CLASSES, WIDTH)
            self.out = L.Linear(WIDTH, CLASSES)
            self.conv = L.Convolution2D(3, 3, 3, pad=1)
            self.batch = L.BatchNormalization(WIDTH)
            self.renorm = L.BatchRenormalization(WIDTH)
            self.decorrelated = L.DecorrelatedBatchNormalization(WIDTH, groups=3)
            self.group = L.GroupNormalization(3, WIDTH)
            self.layer = L.LayerNormalization(WIDTH)
            self.lstm = L.LSTM(WIDTH, WIDTH)
            self.gru = L.StatefulGRU(WIDTH, WIDTH)
            self.zoneout = L.StatefulZoneoutLSTM(WIDTH, WIDTH, c_ratio=0.3, h_ratio=0.2)
            self.peephole = L.StatefulPeepholeLSTM(WIDTH, WIDTH)
            self.drop = L.SimplifiedDropconnect(WIDTH, WIDTH, ratio=0.3)
            self.highway = L.Highway(WIDTH)
            self.maxout = L.Maxout(WIDTH, WIDTH, 2)
        choice = random.Random(seed)
        self.kinds = choice.sample(KINDS, choice.randint(3, 8))
        self.stateful = choice.sample(STATEFUL, choice.choice((0, 0, 1, 2)))
        self.steps = choice.choice((1, 1, 1, 2, 3)) if self.stateful else 1
        self.length = choice.randint(2, 14)
        if choice.random() < 0.1:
            self.layers[0].add_hook(chainer.link_hooks.SpectralNormalization())
        if choice.random() < 0.1:
            self.conv.add_hook(chainer.link_hooks.WeightStandardization())

    def recurrent(self) -> tuple[Any, ...]:
        return self.lstm, self.gru, self.zoneout, self.peephole

    def reset(self, how: str) -> None:
        """Forget or cut the state of the recurrent links; ``goes on`` leaves it."""
        for link in self.recurrent():
            if how == "reset":
                link.reset_state()
            elif how == "cut" and link.h is not None:
                link.h.unchain_backward()
                if getattr(link, "c", None) is not None:
                    link.c.unchain_backward()

    def values(self, x: Any, t: Any, more: int = 0) -> list[Any]:
        """What a forward makes, the logits last."""
        made = [chainer.as_variable(x)]
        if any(link.h is not None and len(link.h) != len(x) for link in self.recurrent()):
            self.reset("reset")
        for _ in range(self.steps):
            choice = random.Random(self.seed)
            for _ in range(self.length + more):
                kind = choice.choice(self.kinds)
                a, b = choice.choice(made[-3:]), choice.choice(made)
                link = choice.choice(list(self.layers))
                made.append(KIND[kind](self, a, b, link))
            for kind in self.stateful:
                made.append(getattr(self, kind)(made[-1]))
        total = self.layers[0](x) + self.embed(t)
        for value in made[-choice.randint(1, 4) :]:
            total = total + value
        return [*made, Failing().apply((self.out(total),))[0]]

    def loss(self, x: Any, t: Any, more: int = 0) -> Any:
        logits = self.values(x, t, more)[-1]
        return F.mean(F.square(logits)) if self.seed % 2 else F.softmax_cross_entropy(logits, t)


def _images(model: Model, a: Any, b: Any, link: Any) -> Any:
    h = model.conv(F.reshape(a, (-1, 3, 2, 2)))
    return F.reshape(F.relu(h), a.shape)


def _pooled(model: Model, a: Any, b: Any, link: Any) -> Any:
    h = F.max_pooling_2d(F.reshape(a, (-1, 3, 2, 2)), 2)
    return F.reshape(F.unpooling_2d(h, 2, cover_all=False), a.shape)


def _split(model: Model, a: Any, b: Any, link: Any) -> Any:
    left, right = F.split_axis(a, 2, 1)
    return F.concat([F.sigmoid(left) * right, right])


def _attention(model: Model, a: Any, b: Any, link: Any) -> Any:
    q, k = F.reshape(a, (-1, 3, 4)), F.reshape(b, (-1, 3, 4))
    return F.reshape(F.matmul(F.softmax(F.matmul(q, k, transb=True), 2), k), a.shape)


def _forgotten(model: Model, a: Any, b: Any, link: Any) -> Any:
    return F.forget(lambda z: F.tanh(link(F.sigmoid(z))), a)


def _checkpointed(model: Model, a: Any, b: Any, link: Any) -> Any:
    return umem.chainer.checkpoint(lambda z: F.tanh(link(F.dropout(z, 0.2))) + b, a)


def _lstm(model: Model, a: Any, b: Any, link: Any) -> Any:
    c, h = F.lstm(b, F.concat([a, b, a, b]))
    return c + h


def _where(model: Model, a: Any, b: Any, link: Any) -> Any:
    return F.where(a.array > 0, F.clip(b, -1.0, 1.0), F.maximum(a, b))


def _view(model: Model, a: Any, b: Any, link: Any) -> Any:
    flipped, first = View().apply((a,))
    return flipped + F.broadcast_to(first, a.shape)


KIND: dict[str, Callable[[Model, Any, Any, Any], Any]] = {
    "linear": lambda m, a, b, link: link(a),
    "linear relu": lambda m, a, b, link: F.relu(link(a)),
    "tanh": lambda m, a, b, link: F.tanh(a),
    "sigmoid": lambda m, a, b, link: F.sigmoid(link(b)),
    "times": lambda m, a, b, link: a * b,
    "plus": lambda m, a, b, link: a + F.elu(b),
    "concat": lambda m, a, b, link: F.concat([a, b])[:, 6:18] + b,
    "mean": lambda m, a, b, link: F.broadcast_to(F.mean(F.relu(a), 0, keepdims=True), a.shape),
    "items": lambda m, a, b, link: F.get_item(a, (slice(None), [3, 1, 1, *range(9)])),
    "transpose": lambda m, a, b, link: F.transpose(F.transpose(a) * 0.5) + b,
    "cast": lambda m, a, b, link: F.cast(F.exp(-F.cast(a, np.float64) ** 2), np.float32),
    "images": _images, "pooled": _pooled, "split": _split, "attention": _attention,
    "lstm": _lstm, "where": _where, "view": _view,
    "dropout": lambda m, a, b, link: F.dropout(a, 0.3),
    "gaussian": lambda m, a, b, link: F.gaussian(a, F.clip(b, -3.0, 0.0)),
    "rrelu": lambda m, a, b, link: F.rrelu(a),
    "zoneout": lambda m, a, b, link: F.zoneout(a, b, 0.3),
    "dropconnect": lambda m, a, b, link: m.drop(a),
    "gumbel": lambda m, a, b, link: F.gumbel_softmax(a, 0.7),
    "batch": lambda m, a, b, link: m.batch(a),
    "renorm": lambda m, a, b, link: m.renorm(a),
    "decorrelated": lambda m, a, b, link: m.decorrelated(a),
    "group": lambda m, a, b, link: F.reshape(
        m.group(F.reshape(a, (*a.shape, 1))), a.shape),
    "layer": lambda m, a, b, link: m.layer(a),
    "normalize": lambda m, a, b, link: F.normalize(a),
    "highway": lambda m, a, b, link: m.highway(a),
    "maxout": lambda m, a, b, link: m.maxout(a),
    "forget": _forgotten, "checkpoint": _checkpointed,
    "pure": lambda m, a, b, link: Pure().apply((link(a),))[0],
    "counting": lambda m, a, b, link: Counting().apply((a,))[0],
    "old": lambda m, a, b, link: Old()(a, b),
    "inner": lambda m, a, b, link: Inner(link).apply((a,))[0],
    "failing": lambda m, a, b, link: Failing().apply((a,))[0],
}  # fmt: skip
KINDS = sorted(KIND)
STATEFUL = ("lstm", "gru", "zoneout", "peephole")

EVENTS = (
    "none", "large batch", "small batch", "more layers", "evaluation", "evaluation with a graph",
    "test mode", "forward fails", "backward fails", "function fails in forward",
    "function fails in backward", "loss is kept", "values are kept", "gradients are kept",
    "backward twice", "two graphs", "two graphs backwards", "three graphs", "one of two graphs",
    "several losses", "another loss", "accuracy", "unchain", "unchain before", "retain_grad",
    "chainer.grad", "chainer.backward", "double", "leave", "enter again", "serialise",
    "serialise between", "update between", "second optimizer between", "thread trains",
    "backward in a thread", "loss_scale", "lazy_grad_sum", "lost forward", "two lost forwards",
    "old graph again", "goes on", "accuracy of inputs", "load between", "copy between",
)  # fmt: skip


class Program:
    """A training loop in which things happen."""

    def __init__(self, seed: int, memory: Memory | None, device: str = "@numpy") -> None:
        self.seed, self.memory = seed, memory or (lambda number: nullcontext())
        self.device = chainer.get_device(device)
        self.choice = random.Random(seed)
        self.numbers: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.last: Any = None
        self.entered = 0
        self.blocks: list[Any] = []

    def run(self, steps: int = 9) -> dict[str, Any]:
        """Everything that the program leaves."""
        Runs.counts = {"forward": 0, "backward": 0, "old": 0}
        Failing.countdown = {"forward": -1, "backward": -1}
        np.random.seed(self.seed)
        if self.device.xp is not np:
            self.device.xp.random.seed(self.seed)
        choice = self.choice
        self.model = Model(self.seed).to_device(self.device)
        self._set_up(choice)
        self.enter()
        try:
            for number in range(steps):
                self.number = number
                event = choice.choice(self.likely) if choice.random() < self.often else "none"
                self.step(event)
        finally:
            self.leave()
        self._note_end()
        return self.numbers

    def _set_up(self, choice: random.Random) -> None:
        """Draw optimizers, data, likely events and habits of a program, and save its model."""
        rules = chainer.optimizers
        rule = choice.choice([rules.Adam, rules.MomentumSGD, rules.SGD])
        self.rule = rule(0.002).setup(self.model)
        self.other = rules.SGD(0.01).setup(self.model.layers[0])
        if choice.random() < 0.3:
            self.rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
        rng = np.random.default_rng(self.seed)
        self.x = self.device.send(rng.standard_normal((20, WIDTH)).astype(np.float32))
        self.t = self.device.send(rng.integers(0, CLASSES, 20, "i"))
        self.likely = [choice.choice(EVENTS) for _ in range(choice.randint(1, 3))]
        self.often = choice.choice([0.0, 0.2, 0.5, 0.9])
        self.late = choice.randint(0, 3)
        self.clears_late, self.binds = choice.random() < 0.4, choice.random() < 0.3
        file = io.BytesIO()
        self.model.loss(self.x, self.t)  # makes parameters that wait for their shape
        self.model.reset("reset")
        chainer.serializers.save_npz(file, self.model)
        self.saved = file.getvalue()
        self.state = choice.choice(("reset", "reset", "cut", "cut", "goes on"))

    # -- blocks ----------------------------------------------------------------------------

    def enter(self) -> None:
        self.block = self.memory(self.entered)
        self.blocks.append(self.block)
        self.entered += 1
        self.block.__enter__()

    def leave(self) -> None:
        if self.block is not None:
            block, self.block = self.block, None
            block.__exit__(None, None, None)

    # -- one step --------------------------------------------------------------------------

    def step(self, event: str) -> None:
        """Run one step with an event in it: forward, backward, and an update."""
        model, at = self.model, self.choice.randint(1, 15)
        x, t = self.x, self.t
        if event == "large batch":
            x, t = self.device.xp.tile(x, (3, 1)), self.device.xp.tile(t, 3)
        if event == "small batch":
            x, t = x[:7], t[:7]
        model.reset("goes on" if event == "goes on" else self.state)
        clears = event != "gradients are kept"
        if clears and not self.clears_late:
            model.cleargrads()
        self.before(event, at, x, t)
        loss = self.forward(event, x, t)
        if clears and self.clears_late:
            model.cleargrads()
        loss = self.backward(event, at, x, t, loss)
        self.note("step", loss)
        if self.number >= self.late and clears:
            self.rule.update()
        self.after(event, loss)
        if event == "loss is kept":
            self.kept.append(loss)
        self.last = loss if self.binds or event == "old graph again" else None

    def before(self, event: str, at: int, x: Any, t: Any) -> None:
        """Do what the event does before the forward of a step."""
        model = self.model
        if event == "evaluation":
            with chainer.using_config("train", False), chainer.no_backprop_mode():
                self.note("evaluation", model.loss(x, t))
        elif event == "evaluation with a graph":
            with chainer.using_config("train", False):
                self.note("evaluation", model.loss(x, t))
        elif event == "forward fails":
            self.fails(lambda: model.loss(x, t), FailingHook(at, backward=False))
        elif event == "function fails in forward":
            Failing.countdown["forward"] = at % 3 + 1
            self.fails(lambda: model.loss(x, t))
            Failing.countdown["forward"] = -1
        elif event == "leave":
            self.leave()
            if self.last is not None:
                model.cleargrads()
                self.go_backward(self.last)
                self.note("outside", self.last)
            self.enter()
        elif event == "enter again":
            self.leave()
            self.enter()
        elif event == "serialise":
            self.serialise()
        elif event == "thread trains":
            self.in_thread(train_another)
        elif event in ("lost forward", "two lost forwards"):
            for _ in range(1 + (event == "two lost forwards")):
                model.loss(x, t)
                model.reset(self.state)

    def forward(self, event: str, x: Any, t: Any) -> Any:
        """Run the forward of a step as the event has it; return the loss."""
        model = self.model
        if event == "more layers":
            return model.loss(x, t, more=3)
        if event == "test mode":
            with chainer.using_config("train", False):
                return model.loss(x, t)
        if event == "lazy_grad_sum":
            with chainer.using_config("lazy_grad_sum", True):
                return model.loss(x, t)
        if event == "another loss":
            values = model.values(x, t)
            self.go_backward(F.sum(F.square(values[len(values) // 2])))
            return F.mean(F.square(values[-1]))
        if event == "values are kept":
            values = model.values(x, t)
            self.kept.append(values[self.seed % len(values)])
            return F.mean(F.square(values[-1]))
        if event == "several losses":
            values = model.values(x, t)
            losses = [F.mean(F.square(value)) for value in values[-3:]]
            for loss in losses[:-1]:
                self.go_backward(loss)
            return losses[-1]
        if event == "accuracy":
            logits = model.values(x, t)[-1]
            self.kept.append(F.accuracy(logits, t))
            return F.softmax_cross_entropy(logits, t)
        return model.loss(x, t)

    def backward(self, event: str, at: int, x: Any, t: Any, loss: Any) -> Any:
        """Run the backward of a step as the event has it; return the loss that was last."""
        model = self.model
        if event in ("backward fails", "function fails in backward"):
            hook: Any = nullcontext()
            if event == "backward fails":
                hook = FailingHook(at, backward=True)
            else:
                Failing.countdown["backward"] = at % 3 + 1
            self.fails(loss.backward, hook)
            Failing.countdown["backward"] = -1
            self.note("failed", loss)
            if at % 2:
                model.cleargrads()
                loss = model.loss(x, t)
        elif event in ("two graphs", "two graphs backwards", "three graphs", "one of two graphs"):
            losses = [loss]
            for _ in range(1 + (event == "three graphs")):
                model.reset(self.state)
                losses.append(model.loss(x[::2], t[::2]) if at % 2 else model.loss(x, t))
            if event == "two graphs backwards":
                losses.reverse()
            for one in losses[:-1]:
                if event == "one of two graphs":
                    continue
                self.go_backward(one)
                self.note("one of several", one)
            loss = losses[-1]
        elif event == "chainer.grad":
            found = chainer.grad([loss], [model.layers[0].W, model.out.W])
            arrays = [None if g is None else _copy(g.array) for g in found]
            self.numbers[f"{self.number} grad"] = arrays
        elif event == "unchain before":
            loss.unchain_backward()
        elif event == "load between":
            chainer.serializers.load_npz(io.BytesIO(self.saved), model)
        elif event == "copy between":
            model.layers[2].copyparams(model.layers[3])
        if event == "double" and at % 2:
            self.double(loss)
        elif event == "backward in a thread":
            self.in_thread(lambda: self.go_backward(loss))
        elif event == "chainer.backward":
            loss.grad = self.device.xp.ones_like(loss.array)
            self.go_backward(loss, lambda: chainer.backward([loss]))
        elif event == "loss_scale":
            self.go_backward(loss, lambda: loss.backward(loss_scale=8.0))
        elif event == "retain_grad":
            self.go_backward(loss, lambda: loss.backward(retain_grad=True))
        else:
            self.go_backward(loss)
        if event == "backward twice":
            self.note("first", loss)
            self.go_backward(loss)
        elif event in ("update between", "second optimizer between"):
            (self.rule if event == "update between" else self.other).update()
            model.cleargrads()
            self.go_backward(loss)
        elif event == "serialise between":
            self.serialise()
        elif event == "old graph again" and self.last is not None:
            self.go_backward(self.last)
        return loss

    def double(self, loss: Any) -> None:
        """Backpropagate through the gradients' squares; what refuses that is noted by name."""
        try:
            loss.backward(enable_double_backprop=True)
            gradients = [p.grad_var for p in self.model.params() if p.grad_var is not None]
            self.model.cleargrads()
            self.go_backward(sum(F.sum(g * g) for g in gradients))
        except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            if isinstance(error, RecomputeError):
                raise
            self.numbered("double", type(error).__name__)  # forget, user functions
            self.model.cleargrads()

    def after(self, event: str, loss: Any) -> None:
        if event == "unchain":
            loss.unchain_backward()
        if event == "retain_grad":
            self.kept.append(loss)
        if event == "accuracy of inputs":
            inputs = chainer.Variable(self.x[:, :CLASSES])
            self.kept.append(F.accuracy(inputs, self.t))

    def go_backward(self, loss: Any, how: Callable[[], None] | None = None) -> None:
        """Backward; where it is refused, nothing has changed."""
        before = self._gradients()
        try:
            (how or loss.backward)()
        except RecomputeError:
            after = self._gradients()
            assert [g is None for g in before] == [g is None for g in after], "a gradient went"
            for old, new in zip(before, after, strict=True):
                assert old is None or old.tobytes() == new.tobytes(), "a gradient changed"
            raise

    def _gradients(self) -> list[Any]:
        return [None if p.grad is None else p.grad.copy() for p in self.params()]

    def params(self) -> list[Any]:
        return [p for _, p in sorted(self.model.namedparams())]

    def fails(self, do: Callable[[], Any], hook: Any = None) -> None:
        try:
            with hook or nullcontext():
                do()
        except ArithmeticError as error:
            self.numbered("failed", str(error))

    def serialise(self) -> None:
        file = io.BytesIO()
        chainer.serializers.save_npz(file, self.model)
        file.seek(0)
        chainer.serializers.load_npz(file, self.model)

    def in_thread(self, do: Callable[[], Any]) -> None:
        """Run something in a thread of its own, and raise what it raises."""
        raised: list[BaseException] = []

        def target() -> None:
            try:
                do()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    # -- what it leaves --------------------------------------------------------------------

    def numbered(self, what: str, value: Any) -> None:
        self.numbers[f"{self.number} {what} {len(self.numbers)}"] = value

    def note(self, what: str, loss: Any) -> None:
        self.numbered(f"{what} loss", _copy(loss.array))
        for key, p in sorted(self.model.namedparams()):
            self.numbered(f"{what} {key}.grad", None if p.grad is None else _copy(p.grad))

    def _note_end(self) -> None:
        """Note all that is left: parameters, statistics, kept values, runs, random state."""
        for key, p in sorted(self.model.namedparams()):
            self.numbered(key, None if p.array is None else _copy(p.array))
        for key, link in sorted(self.model.namedlinks()):
            for name in sorted(link._persistent):
                self.numbered(f"{key}.{name}", _copy(getattr(link, name)))
        for value in self.kept:
            self.numbered("kept", _copy(value.array))
        for name, count in Runs.counts.items():
            self.numbered(f"runs {name}", count)
        self.numbered("random", np.array(np.random.rand()))


def _copy(value: Any) -> Any:
    """Copy an array, or a number, to the host."""
    return value.get() if hasattr(value, "get") else np.array(value)


def train_another() -> None:
    """A training of its own, in a thread."""
    layer = L.Linear(4, 4, initialW=np.eye(4, dtype=np.float32))
    rule = chainer.optimizers.SGD(0.1).setup(layer)
    for _ in range(3):
        rule.update(lambda: F.sum(F.tanh(layer(F.tanh(layer(np.ones((3, 4), np.float32)))))))


def beside_plain(
    seed: int, memory: Memory, device: str = "@numpy"
) -> tuple[Program, list[str], Exception | None]:
    """Run a program under a memory, and the same with plain Chainer.

    Returns the program, what of it is not as plain Chainer has it, and the error that refused it.
    """
    plain, program, error = Program(seed, None, device), Program(seed, memory, device), None
    try:
        plain.run()
    except Exception as raised:  # where training diverges, a norm may find no eigenvalues
        error = raised
    try:
        program.run()
    except (RecomputeError, BudgetError) as refused:
        return program, differences_so_far(program.numbers, plain.numbers), refused
    except Exception as raised:
        wrong = differences(program.numbers, plain.numbers)
        return program, wrong + ([] if type(raised) is type(error) else [repr(raised)]), None
    wrong = differences(program.numbers, plain.numbers)
    return program, wrong + ([f"plain Chainer raises {error!r}"] if error else []), None


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not the same to the bit, of what a program that went on to its end leaves."""
    if list(found) != list(expected):
        return [f"keys: {sorted(set(found) ^ set(expected))[:4]}"]
    return list(_different(found, expected))


def differences_so_far(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The same of a program that was refused on its way."""
    if list(found) != list(expected)[: len(found)]:
        return ["keys"]
    return list(_different(found, expected))


def _different(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    for key, value in found.items():
        if _bits(value) != _bits(expected[key]):
            yield key


def _bits(value: Any) -> Any:
    if isinstance(value, list):
        return [_bits(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value
