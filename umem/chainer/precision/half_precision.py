"""`half_precision`: a model in float16 with float32 masters and a loss scale, until undone."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import chainer
from chainer import configuration

from umem._common.switch import Switch
from umem.chainer.precision.floats import HALF
from umem.chainer.precision.judged_updates import Updates
from umem.chainer.precision.loss_scale import LossScale, ScaleState
from umem.chainer.precision.masters import Masters, serialize
from umem.chainer.precision.terms import check, chosen, halves, is_of_halves
from umem.chainer.tap import Proceed, Subscriber, check_chainer, subscribe, unsubscribe
from umem.errors import StateError

LARGEST_OF_HALF = 32768.0
"""The largest power of two in float16, and the largest scale of a float16 loss."""


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
    links keep float32 parameters and statistics; losses and sums are float32. The program needs no
    change: its inputs may be float32, and ``loss.backward()`` scales the loss. The scale doubles
    after ``interval`` good steps. If not all gradients are finite, the step is skipped, including
    the optimizer's hooks and its count of steps, and the scale is halved.

    `HalfPrecision.undo`, or the end of the result's ``with`` block, restores float32 parameters.

    Differs from Chainer's ``mixed16`` with ``use_fp32_update`` and ``loss_scaling``: hooks such as
    clipping and weight decay see unscaled float32 gradients, ``optimizer.serialize`` saves masters
    and scale, one kernel and one wait check the gradients, and NumPy computes halves as float32.
    See Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

    Args:
        model: a link; an uninitialised parameter is rounded to float16 when it gets its array.
        optimizer: a `chainer.GradientMethod`, set up with the model or with a link around it.
        dtype: "float16"; no other.
        keep: names of parameters and links, as in ``namedparams``, that stay float32.
        scale: the first loss scale.
        interval: good steps in a row after which the scale doubles.

    Cost: compared with float32, two bytes more for each element of a parameter that has a master,
    two bytes less for each element of its gradient, and half of the activations. If the optimizer
    has hooks, the update takes a float32 gradient of every parameter. Present gradients are
    cleared. Thread-safety: in force for the process; train a model in one thread.

    Raises:
        StateError: the optimizer is not set up, scales losses itself, is set up with another model,
            or has its state in shards on several ranks; the model is in half precision already, or
            on several devices.
        UnsupportedError: another dtype, ChainerX arrays, or an optimizer that is not a
            GradientMethod.
        PrecisionError: from an update, if gradients are not finite at a scale of 1.

    After each of these errors nothing has changed.
    """
    check(model, optimizer, dtype, scale, interval)
    return HalfPrecision(optimizer, chosen(model, keep), LossScale(float(scale), int(interval)))


class HalfPrecision(Subscriber, Switch):
    """A model in half precision, until `undo`; see `half_precision`.

    Attributes:
        optimizer: the one that updates the masters.
    """

    place = -1
    undone = "half precision was undone already: the model is in float32"

    def __init__(self, optimizer: Any, parameters: list[Any], scale: LossScale) -> None:
        check_chainer()  # before a parameter changes
        self.optimizer = optimizer
        self._scale = scale
        self._used: set[float] = set()
        self._here = threading.local()
        self._masters = Masters(parameters)
        self._updates = Updates(optimizer, self._masters, self._used)
        _on.append(self)
        for subscriber in (self, self._updates):
            subscribe(subscriber)
        halves.hold(self._masters)
        optimizer.__deepcopy__ = _no_copy

    # -- the loss scale ----------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Return the loss scale of the next step."""
        return self._scale.scale

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps that were skipped for an overflow so far."""
        return self._scale.skipped_steps

    def state(self) -> ScaleState:
        """Return the loss scale with its counts of good and skipped steps, to be saved as JSON.

        ``optimizer.serialize`` saves that too, and the masters.
        """
        return self._scale.state()

    def restore(self, state: ScaleState) -> None:
        """Set the loss scale and its counts to a state that `state` returned.

        Raises:
            SizeError: the state is invalid; nothing has changed.
        """
        self._scale.restore(state)

    @property
    def scale_in_force(self) -> float:
        """Return the scale of a backward from a float32 loss: the least of all models'."""
        return min(one.scale for one in _on)

    def note_scale(self, scale: float) -> None:
        """Note the loss scale of gradients that no backward has computed since the last step."""
        self._used.add(scale)

    def _take_back(self) -> None:
        """Restore the model's float32 parameters from the masters, and Chainer's functions.

        The optimizer's state stays; gradients are cleared.
        """
        vars(self.optimizer).pop("__deepcopy__", None)
        _on.remove(self)
        halves.release(self._masters)
        for subscriber in (self, self._updates):
            unsubscribe(subscriber)
        self._masters.join()

    # -- Chainer's events --------------------------------------------------------------------

    def backward(
        self, proceed: Proceed, outputs: Any, retain_grad: Any = False, loss_scale: Any = None
    ) -> None:
        """Scale the gradients that a backward starts from, unless it runs inside another one.

        Raises:
            StateError: ``enable_double_backprop`` is on; nothing has run.
        """
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
        """Run an optimizer's step, or skip it if gradients are not finite, and adapt the scale.

        Raises:
            PrecisionError: gradients are not finite at a scale of 1; the step was skipped.
        """
        if method is not self.optimizer:
            proceed(method, *args, **kwargs)
            return
        with self._updates.one_step() as judgement:
            proceed(method, *args, **kwargs)
        if judgement.is_bad:
            method.t -= 1
            self._scale.overflowed(judgement.names)
        elif judgement.is_bad is not None:
            self._scale.succeeded()

    def serialize(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Round newly loaded parameters of a link to float16, and make their masters."""
        proceed(owner, serializer)
        self._masters.adopt(owner.params())

    def serialize_optimizer(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Save or load the masters and the loss scale with the optimizer."""
        proceed(owner, serializer)
        if owner is self.optimizer:
            serialize(serializer["half_precision"], owner.target, self._masters, self._scale)


_on: list[HalfPrecision] = []


def _no_copy(memo: dict[int, Any]) -> Any:
    """Raise StateError on copying an optimizer: the copy would lack masters and scale."""
    raise StateError(
        "an optimizer that trains halves cannot be copied: undo half_precision first, or copy the "
        "model and set up a new optimizer for it"
    )


def masters_of(optimizer: Any) -> Masters | None:
    """Return the masters that an optimizer updates; None where it is not in half precision."""
    half = half_of(optimizer)
    return None if half is None else half._masters


def half_of(optimizer: Any) -> HalfPrecision | None:
    """Return the `HalfPrecision` of an optimizer, or None."""
    return next((one for one in _on if one.optimizer is optimizer), None)


def _scale_for(gradients: list[Any]) -> float:
    """Return the scale of a backward: the least of all models', within float16 if a gradient is."""
    scale = _on[0].scale_in_force
    if any(gy is not None and gy.dtype == HALF for gy in gradients):
        scale = min(scale, LARGEST_OF_HALF)
    return scale


def _scaled(gy: Any, scale: float) -> Any:
    """Return a scaled copy of a gradient; None for None.

    Raises:
        StateError: double backprop is on, and the copy would not be part of the graph.
    """
    if configuration.config.enable_backprop:
        raise StateError(
            "half precision scales the gradients of a backward, which would also scale gradients "
            "of gradients: use chainer.grad(..., enable_double_backprop=True) instead of "
            "backward(enable_double_backprop=True)"
        )
    if gy is None:
        return None
    array = gy.array.copy()  # the program's own gradient stays as it is
    array *= array.dtype.type(scale)
    return chainer.Variable(array)
