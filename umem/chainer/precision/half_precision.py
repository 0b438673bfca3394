"""`half_precision`: a model in float16 with float32 masters and a loss scale, until undone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import chainer
from chainer import configuration

from umem.chainer.agreement import of_all_ranks
from umem.chainer.precision.floats import HALF, all_finite, is_finite
from umem.chainer.precision.loss_scale import LossScale, ScaleState
from umem.chainer.precision.masters import Masters, MastersView, serialize
from umem.chainer.precision.terms import check, chosen, halves, is_of_halves
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import StateError

LARGEST_OF_HALF = 32768.0
"""The largest power of two that a loss in float16 can be scaled by."""


def half_precision(
    model: Any,
    optimizer: Any,
    *,
    dtype: str = "float16",
    keep: Iterable[str] = (),
    scale: float = 65536.0,
    interval: int = 2000,
) -> HalfPrecision:
    """Train a model in half precision from now on: float16 parameters and activations.

    The optimizer updates float32 masters of the parameters, and its state is float32. Normalising
    links keep float32 parameters and statistics; losses and sums are float32. Nothing of the
    program changes: it may give float32 arrays, and call ``loss.backward()`` as ever, which scales
    the loss. The scale doubles after ``interval`` good steps. A step whose gradients are not all
    finite is skipped, with the optimizer's hooks and its count of steps, and halves the scale.

    ``undo()`` of what is returned, or the end of ``with`` it, gives the float32 parameters back.

    Differs from Chainer's ``mixed16`` with ``use_fp32_update`` and ``loss_scaling``: hooks such as
    clipping and weight decay see float32 gradients without the scale, masters and scale are saved
    by ``optimizer.serialize``, gradients are checked by one kernel and one wait, and NumPy computes
    halves as float32 in parts. See Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

    Args:
        model: a link; parameters without an array yet become halves when they get one.
        optimizer: a `chainer.GradientMethod` that is set up with the model, or with what holds it.
        dtype: "float16"; no other.
        keep: names of parameters and links, as in ``namedparams``, that stay float32.
        scale: the loss scale to start with.
        interval: good steps in a row after which it doubles.

    Cost: two bytes a parameter more than float32 where it keeps a master, two fewer a gradient, and
    half of the activations; where the optimizer has hooks, a float32 gradient of every parameter
    while it updates. Gradients that are there are cleared. Thread-safety: for the process; train
    a model in one thread.

    Raises:
        StateError: the optimizer is not set up, scales losses itself, is set up with another model,
            or has its state in shards on several ranks; the model is in half precision already, or
            on several devices.
        UnsupportedError: another dtype, ChainerX arrays, or an optimizer that is no GradientMethod.
        PrecisionError: from an update, where gradients are not finite at a scale of 1.

    After each of these nothing has changed.
    """
    check(model, optimizer, dtype, scale, interval)
    return HalfPrecision(optimizer, chosen(model, keep), LossScale(float(scale), int(interval)))


class HalfPrecision(Subscriber):
    """A model in half precision, while it is; see `half_precision`.

    Attributes:
        optimizer: the one that updates the masters.
    """

    place = -1

    def __init__(self, optimizer: Any, parameters: list[Any], scale: LossScale) -> None:
        self.optimizer = optimizer
        self._scale = scale
        self._used: set[float] = set()
        self._here = threading.local()
        self._masters = Masters(parameters)
        self._updates = Updates(optimizer, self._masters, self._used)
        self._is_on = True
        _on.append(self)
        for subscriber in (self, self._updates):
            subscribe(subscriber)
        halves.hold(self._masters)
        optimizer.__deepcopy__ = _no_copy

    # -- what is asked -----------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """What losses are scaled by in the next step."""
        return self._scale.scale

    @property
    def skipped_steps(self) -> int:
        """The steps that were skipped for an overflow so far."""
        return self._scale.skipped_steps

    def state(self) -> ScaleState:
        """The loss scale, its good steps and the skipped ones, as JSON can hold it.

        The masters are with the optimizer's state: ``optimizer.serialize`` has both.
        """
        return self._scale.state()

    def restore(self, state: ScaleState) -> None:
        """Go on from what `state` returned."""
        self._scale.restore(state)

    def undo(self) -> None:
        """Give the model its float32 parameters back, and Chainer its functions.

        The optimizer's state stays as it is; gradients are cleared.

        Raises:
            StateError: it was undone before; nothing has changed.
        """
        if not self._is_on:
            raise StateError("half precision was undone already: the model is in float32")
        self._is_on = False
        vars(self.optimizer).pop("__deepcopy__", None)
        _on.remove(self)
        halves.let_go(self._masters)
        for subscriber in (self, self._updates):
            unsubscribe(subscriber)
        self._masters.join()

    def __enter__(self) -> HalfPrecision:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_on:
            self.undo()

    # -- what Chainer tells ------------------------------------------------------------------

    def backward(
        self, proceed: Proceed, outputs: Any, retain_grad: Any = False, loss_scale: Any = None
    ) -> None:
        """Scale the gradients that a backward starts from, unless it is inside of another."""
        is_inside = getattr(self._here, "is_backward", False)
        if is_inside or self is not _on[0] or not any(is_of_halves(y) for y, _ in outputs):
            proceed(outputs, retain_grad, loss_scale)
            return
        if loss_scale is None:
            loss_scale = _scale_for([gy for _, gy in outputs])
            outputs = [(y, _scaled(gy, loss_scale)) for y, gy in outputs]
        for one in _on:
            one._used.add(float(loss_scale))
        self._here.is_backward = True
        try:
            proceed(outputs, retain_grad, loss_scale)
        finally:
            self._here.is_backward = False

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Have one step judged by its gradients, and the scale follow."""
        if method is not self.optimizer:
            proceed(method, *args, **kwargs)
            return
        with self._updates.one_step() as judgement:
            proceed(method, *args, **kwargs)
        if judgement.is_bad:
            method.t -= 1
            self._scale.overflowed(judgement.names)
        elif judgement.is_bad is not None:
            self._scale.went_well()

    def serialize_optimizer(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Save or load masters and scale with the optimizer."""
        proceed(owner, serializer)
        if owner is self.optimizer:
            serialize(serializer["half_precision"], owner.target, self._masters, self._scale)


_on: list[HalfPrecision] = []


def _no_copy(memo: dict[int, Any]) -> Any:
    """Refuse to copy an optimizer: its masters and its scale are found by the very object."""
    raise StateError(
        "an optimizer that trains halves cannot be copied: undo half_precision first, or copy the "
        "model and set up a new optimizer for it"
    )


def masters_of(optimizer: Any) -> Masters | None:
    """Return an optimizer's masters; None where half precision does not judge its gradients."""
    return next((one._masters for one in _on if one.optimizer is optimizer), None)


def _scale_for(gradients: list[Any]) -> float:
    """The scale of a backward: of several models the smallest, and no more than a half can be."""
    scale = min(one.scale for one in _on)
    if any(gy is not None and gy.dtype == HALF for gy in gradients):
        scale = min(scale, LARGEST_OF_HALF)
    return scale


def _scaled(gy: Any, scale: float) -> Any:
    if configuration.config.enable_backprop:
        raise StateError(
            "half precision scales the gradients of a backward, so that gradients of them would "
            "be scaled too: take chainer.grad(..., enable_double_backprop=True) in the place of "
            "backward(enable_double_backprop=True)"
        )
    if gy is None:
        return None
    array = gy.array.copy()  # the program's own gradient stays as it is
    array *= array.dtype.type(scale)
    return chainer.Variable(array)


# -- a step of the optimizer -----------------------------------------------------------------------


class Judgement:
    """What is found of one step's gradients.

    Attributes:
        is_bad: whether one is not finite; None before it was asked.
        divisor: the scale that they have.
        names: the parameters whose gradients are not finite, once the step is over.
    """

    def __init__(self) -> None:
        self.is_bad: bool | None = None
        self.divisor = 1.0
        self.names: list[str] = []
        self.unscaled: list[Any] = []
        self.has_updated = False


class Updates(Subscriber):
    """Has an optimizer update masters; innermost, so that all others see the parameters.

    Args:
        used: the scales of backward passes since the last step; more than one cannot be divided by,
            and count as an overflow.
    """

    place = 3

    def __init__(self, optimizer: Any, masters: Masters, used: set[float]) -> None:
        self._optimizer, self._masters, self._used = optimizer, masters, used
        self._now: Judgement | None = None

    @contextmanager
    def one_step(self, is_whole: bool = True) -> Iterator[Judgement]:
        """One call of the optimizer's update; scales are known until a whole one is over."""
        self._now = judgement = Judgement()
        try:
            yield judgement
        finally:
            self._now = None
            self._masters.let_gradients_go()
            for parameter in judgement.unscaled:
                parameter.grad *= parameter.dtype.type(judgement.divisor)
                parameter._loss_scale = judgement.divisor
            if is_whole and judgement.is_bad is not None:
                self._used.clear()
            if judgement.is_bad:
                named = self._parameters().items()
                here = [name for name, one in named if not is_finite(one.grad)]
                every = of_all_ranks(self._optimizer, here)
                judgement.names = [name for theirs in every for name in theirs]

    def call_hook(self, proceed: Proceed, method: Any, hook: Any) -> None:
        """Show masters to a hook, with gradients in float32 and without the scale."""
        now = self._now
        if method is not self._optimizer or now is None:
            proceed(method, hook)
            return
        if self._is_bad(now):
            return
        if not now.has_updated:
            for parameter, _ in self._masters:
                self._masters.take_gradient(parameter, now.divisor)
        target, method.target = method.target, MastersView(method.target, self._masters)
        try:
            proceed(method, hook)
        finally:
            method.target = target
            for parameter, _ in self._masters:
                self._masters.round(parameter)

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Update the master in the parameter's place."""
        now = self._now
        master = self._masters.of(parameter)
        if now is None:
            if master is not None and rule.enabled:
                self._update_alone(proceed, rule, parameter)
            else:
                proceed(rule, parameter)
        elif self._is_bad(now):
            return
        elif master is None or not rule.enabled:
            proceed(rule, parameter)
        else:
            now.has_updated = True
            is_last = not self._optimizer._post_update_hooks
            self._masters.update(lambda one: proceed(rule, one), parameter, now.divisor, is_last)

    def _update_alone(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """``parameter.update()``, by no optimizer: a step of its own, and others may follow."""
        with self.one_step(is_whole=False):
            self.update(proceed, rule, parameter)

    def _is_bad(self, now: Judgement) -> bool:
        """Judge the gradients once a step; make masters and gradients ready for a good one."""
        if now.is_bad is None:
            parameters = list(self._parameters().values())
            now.divisor = max(self._used, default=1.0)
            is_bad = len(self._used) > 1 or not all_finite([one.grad for one in parameters])
            now.is_bad = any(of_all_ranks(self._optimizer, is_bad))
            if not now.is_bad:
                self._masters.catch_up()
                now.unscaled = [one for one in parameters if self._masters.of(one) is None]
                for parameter in now.unscaled:
                    parameter.grad /= parameter.dtype.type(now.divisor)
                    parameter._loss_scale = None  # Chainer would divide by it once more
        return now.is_bad

    def _parameters(self) -> dict[str, Any]:
        """The parameters that are to be updated and have a gradient, each once."""
        seen: dict[int, tuple[str, Any]] = {}
        for name, parameter in self._optimizer.target.namedparams(False):
            rule = parameter.update_rule
            if rule is not None and rule.enabled and parameter.grad is not None:
                seen.setdefault(id(parameter), (name, parameter))
        return dict(seen.values())
