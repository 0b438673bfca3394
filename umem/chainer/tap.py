"""The only place where umem changes Chainer: its functions report events to subscribers.

Chainer has no way to see gradients, updates of parameters or cuts of a graph (function hooks see
forward and little of backward), so the functions in `POINTS` are replaced while there are
subscribers. Each subscriber wraps Chainer's function and the subscribers inside of it, in the order
of `Subscriber.place`, whatever the order of subscribing. They may unsubscribe in any order: when a
point has no subscriber, Chainer's own function is restored, the very same object.

If other code later patches over umem's patch, that is kept and reported by an
`umem.errors.LeftOnWarning`. umem's patch below it then passes every call on to Chainer, for good.

Thread-safety: the functions are replaced for the process; a subscriber gets the events of every
thread and selects its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import chainer
from chainer import _backprop, _backprop_utils, function_node, link, optimizer, training, variable
from chainer.functions.math import basic_math
from chainer.functions.normalization import layer_normalization

from umem._common.locks import safe_lock
from umem.chainer.chunking.functions import RULES
from umem.chainer.chunking.normalizing import NORMALIZATION
from umem.errors import LeftOnWarning, StateError

Proceed = Callable[..., Any]
"""Calls the next function at a point: the next subscriber, and finally Chainer's own function."""


class Subscriber:
    """Base of subscribers; each method wraps one point of Chainer, and calls ``proceed``.

    A method that a class does not override costs nothing: its point is not replaced.

    Attributes:
        place: the order of subscribers at a point; the lowest is outermost.
    """

    place: float = 0

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Wrap the call of a function, in forward, and on gradients in backward."""
        return proceed(func, inputs)

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Wrap one function's step of backward."""
        proceed(func, *args)

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Wrap ``Variable.backward``; the first argument has the nodes with gradients."""
        proceed(*args, **kwargs)

    def grad(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Wrap ``chainer.grad``; the first argument has the variables."""
        return proceed(*args, **kwargs)

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Wrap an optimizer's update of one parameter."""
        proceed(rule, parameter)

    def update_core(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Wrap an update rule's computation, between its hooks, perhaps on a float32 copy."""
        proceed(rule, parameter)

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap an optimizer's update of all its parameters."""
        proceed(method, *args, **kwargs)

    def generate(self, proceed: Proceed, initializer: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the creation of a parameter's array, or of its gradient's."""
        return proceed(initializer, *args, **kwargs)

    def initialize(self, proceed: Proceed, initializer: Any, array: Any) -> None:
        """Wrap an initializer's filling of an array."""
        proceed(initializer, array)

    def make_parameter(self, proceed: Proceed, parameter: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap the creation of a parameter."""
        proceed(parameter, *args, **kwargs)

    def setup(self, proceed: Proceed, method: Any, link: Any) -> Any:
        """Wrap an optimizer's setup with a model."""
        return proceed(method, link)

    def call_hook(self, proceed: Proceed, method: Any, hook: Any) -> None:
        """Wrap an optimizer's call of one hook, for all parameters."""
        proceed(method, hook)

    def check_gradients(self, proceed: Proceed, method: Any) -> None:
        """Wrap an optimizer's check for NaN, if it scales the loss."""
        proceed(method)

    def unchain(self, proceed: Proceed, func: Any) -> None:
        """Wrap the removal of a function from its graph."""
        proceed(func)

    def unchain_variable(self, proceed: Proceed, y: Any) -> None:
        """Wrap the cutting of the graph behind a variable or its node."""
        proceed(y)

    def set_array(self, proceed: Proceed, y: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap the assignment of a variable's array."""
        proceed(y, *args, **kwargs)

    def serialize(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Wrap the saving or loading of a link."""
        proceed(owner, serializer)

    def copydata(self, proceed: Proceed, target: Any, source: Any) -> None:
        """Wrap the copying of another variable's array into one."""
        proceed(target, source)

    def train(self, proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap a trainer's run."""
        proceed(trainer, *args, **kwargs)

    def serialize_optimizer(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Wrap the saving or loading of an optimizer."""
        proceed(owner, serializer)

    def rerun(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Wrap the second run of a function's forward, on arrays, by umem's `rerun`."""
        return proceed(func, inputs)

    def evaluate(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Wrap the forward computation of Chainer's own functions, the first time or again."""
        return proceed(func, inputs)

    def compute(self, proceed: Proceed, func: Any, *arrays: Any) -> Any:
        """Wrap the forward or backward computation of a convolution or pooling by columns."""
        return proceed(func, *arrays)

    def operand(self, proceed: Proceed, x: Any, value: Any) -> Any:
        """Wrap the conversion of an array operand to a variable's type."""
        return proceed(x, value)

    def layer_norm_back(self, proceed: Proceed, func: Any, indexes: Any, gradients: Any) -> Any:
        """Wrap the backward computation of layer normalisation."""
        return proceed(func, indexes, gradients)

    def normalize(self, proceed: Proceed, norm: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the forward computation of batch normalisation without cuDNN or iDeep."""
        return proceed(norm, *args, **kwargs)

    def normalize_back(self, proceed: Proceed, norm: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the backward computation of batch normalisation without cuDNN or iDeep."""
        return proceed(norm, *args, **kwargs)


def rerun(func: Any, inputs: tuple[Any, ...]) -> Any:
    """Run a function's forward again on arrays, within backward; call it as ``tap.rerun``."""
    return func.forward(inputs)


class Point(NamedTuple):
    """A function that is replaced, Chainer's or `rerun`, and the subscriber method around it."""

    owner: Any
    name: str
    event: str


def _computing() -> Iterator[tuple[Any, str]]:
    """List Chainer's functions that compute by themselves: class and method.

    Functions that are reported as `compute` are omitted.
    """
    for kind in dict.fromkeys(_subclasses(function_node.FunctionNode)):
        if kind.__module__.startswith("chainer.functions.") and kind.__name__ != "Forget":
            told = RULES[kind].methods if kind in RULES else ()
            yield from (
                (kind, name) for name in ("forward", "forward_cpu")
                if name in vars(kind) and name not in told
            )  # fmt: skip


def _initializers() -> Iterator[Any]:
    """List Chainer's initializers that fill arrays by themselves."""
    for kind in dict.fromkeys(_subclasses(chainer.Initializer)):
        if kind.__module__.startswith("chainer.initializers.") and "__call__" in vars(kind):
            yield kind


def _subclasses(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


POINTS = (
    # Every call of a function passes through it, including Chainer's old-style functions.
    Point(function_node.FunctionNode, "apply", "apply"),
    # Variable.backward and chainer.grad both pass through it, function by function.
    Point(_backprop_utils, "backprop_step", "backprop_step"),
    # The loops over the graph begin here; function_node has imported the other by its name.
    Point(_backprop, "_backprop_to_all", "backward"),
    Point(function_node, "_backprop", "grad"),
    # Twice a parameter; then once a step, in every optimizer that uses gradients.
    Point(optimizer.UpdateRule, "update", "update"),
    Point(optimizer.UpdateRule, "update_core", "update_core"),
    Point(optimizer.GradientMethod, "update", "step"),
    Point(optimizer.Optimizer, "setup", "setup"),
    # The creation of parameters; variable looks the first up in its package at each call.
    Point(chainer.initializers, "generate_array", "generate"),
    *(Point(kind, "__call__", "initialize") for kind in _initializers()),
    Point(variable.Parameter, "__init__", "make_parameter"),
    Point(optimizer.GradientMethod, "call_hook", "call_hook"),
    Point(optimizer.Optimizer, "check_nan_in_grads", "check_gradients"),
    # Every way to cut a graph ends in one of the three; the graph itself does not record it.
    Point(function_node.FunctionNode, "unchain", "unchain"),
    Point(variable.Variable, "unchain", "unchain_variable"),
    Point(variable.VariableNode, "unchain", "unchain_variable"),
    # The setter of Variable.array, of Variable.data, and in-place loading of parameters.
    Point(variable.Variable, "_set_array", "set_array"),
    # Loading and copying write into existing arrays, which no setter sees.
    Point(link.Link, "serialize", "serialize"),
    Point(variable.Variable, "copydata", "copydata"),
    # The whole training of a script that has a trainer.
    Point(training.Trainer, "run", "train"),
    Point(optimizer.Optimizer, "serialize", "serialize_optimizer"),
    # Chainer has no function for it.
    Point(sys.modules[__name__], "rerun", "rerun"),
    # They compute if no library of NVIDIA's or Intel's does.
    *(Point(kind, name, "compute") for kind, rule in RULES.items() for name in rule.methods),
    *(Point(kind, name, "evaluate") for kind, name in _computing()),
    Point(basic_math, "_preprocess_rhs", "operand"),
    Point(layer_normalization.LayerNormalization, "backward", "layer_norm_back"),
    Point(NORMALIZATION, "forward", "normalize"),
    Point(NORMALIZATION, "backward", "normalize_back"),
)


class _Patch:
    """The replacement of one point; ``around`` may be replaced while it is in place."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.original = vars(point.owner)[point.name]
        self.around: Proceed = self.original
        self.function = self._replacement()

    def _replacement(self) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self.around(*args, **kwargs)

        replacement.__name__ = self.point.name
        return replacement

    def put(self) -> None:
        """Install the replacement."""
        setattr(self.point.owner, self.point.name, self.function)

    def take_back(self) -> str | None:
        """Restore Chainer's function; returns a later patch of other code, if there is one."""
        self.around = self.original
        owner, name, _ = self.point
        now = vars(owner)[name]
        if now is self.original:
            return None
        if now is not self.function:
            return f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        setattr(owner, name, self.original)
        return None


_subscribers: list[Subscriber] = []
_patches: dict[Point, _Patch] = {}
_lock = safe_lock()


def check_chainer() -> None:
    """Raise unless the loaded Chainer is the one that umem patches.

    Raises:
        StateError: Chainer was imported anew.
    """
    if sys.modules.get("chainer") is not chainer:
        raise StateError(
            "Chainer was imported anew after umem.chainer, which uses the earlier one: start "
            "Python again, or import umem.chainer after it"
        )


def subscribe(subscriber: Subscriber) -> None:
    """Add a subscriber until `unsubscribe`; adding it twice does nothing more.

    Raises:
        StateError: Chainer was imported anew; nothing has changed.
    """
    check_chainer()
    with _lock:
        if subscriber not in _subscribers:
            _subscribers.append(subscriber)
            _subscribers.sort(key=lambda one: one.place)
        _repatch()


def unsubscribe(subscriber: Subscriber) -> None:
    """Remove a subscriber, from any thread and in any order; no effect a second time."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
        left = _repatch()
    if left:
        warnings.warn(
            f"{', '.join(left)}: other code replaced umem's function, and its replacement stays; "
            "umem's, below it, passes calls on to Chainer's own",
            LeftOnWarning,
            stacklevel=3,
        )


class SharedSubscriber(Subscriber):
    """A subscriber that is active while there is a holder, in any thread.

    Attributes:
        holders: its holders, by id.
    """

    def __init__(self) -> None:
        self.holders: dict[int, Any] = {}

    def hold(self, holder: Any) -> None:
        """Subscribe for a holder, until `release`."""
        self.holders[id(holder)] = holder
        try:
            subscribe(self)
        except BaseException:
            self.release(holder)
            raise

    def release(self, holder: Any) -> None:
        """Forget a holder; unsubscribe after the last one."""
        self.holders.pop(id(holder), None)
        if not self.holders:
            unsubscribe(self)
        if self.holders:  # another thread has added one in between
            subscribe(self)


def is_subscribed(name: str) -> bool:
    """Tell whether a subscriber of a class of this name is active."""
    return bool(subscribers_named(name))


def subscribers_named(name: str) -> list[Subscriber]:
    """List the active subscribers of a class of this name."""
    return [one for one in [*_subscribers] if type(one).__name__ == name]


def _repatch() -> list[str]:
    """Install replacements at the points that subscribers use, and remove the others.

    Returns the points where another's patch is over ours. May be interrupted, and repeated.
    """
    left = []
    for point in POINTS:
        around = _around(point.event)
        patch = _patches.get(point)
        if around:
            if patch is None:
                patch = _patches[point] = _Patch(point)
            patch.around = _nested(around, patch.original)
            if patch.around is not None and vars(point.owner)[point.name] is patch.original:
                patch.put()
        elif patch is not None:
            over = patch.take_back()
            if over is not None:
                left.append(over)
            del _patches[point]
    return left


def _around(event: str) -> list[Callable[..., Any]]:
    """Return the subscribers' methods for a point, outermost first."""
    plain = getattr(Subscriber, event)
    return [getattr(s, event) for s in _subscribers if getattr(type(s), event) is not plain]


def _nested(around: Iterable[Callable[..., Any]], original: Proceed) -> Proceed:
    proceed = original
    for method in reversed(list(around)):
        proceed = partial(method, proceed)
    return proceed
