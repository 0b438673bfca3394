"""Gradients between calls of update that make one update, each with its loss scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from umem.chainer.finite import all_finite
from umem.chainer.parameters_once import parameters
from umem.chainer.precision.half_precision import half_of
from umem.errors import AccumulationError


class KeptGradient(NamedTuple):
    """A parameter's accumulated gradient and the loss scale in it; None: no scale."""

    parameter: Any
    array: Any
    scale: float | None


class KeptGradients:
    """Holds the gradients of an open group, so that ``cleargrads`` does not clear them.

    They are stored as backward computed them. If half precision or a loss scale was turned on or
    off since, they are restored in the type and with the scale that the next backward adds to.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.drop()

    def drop(self) -> None:
        """Drop all gradients."""
        self._kept: list[KeptGradient] = []
        self._terms: Any = None

    def take(self) -> None:
        """Move the gradients out of the model's parameters."""
        model = self._optimizer.target
        # Chainer notes a gradient's loss scale on its parameter, and has no public name for it.
        self._kept = [
            KeptGradient(p, p.grad, p._loss_scale)
            for p in parameters(model)
            if p.array is not None and p.grad is not None
        ]
        self._terms = self._terms_now()
        model.cleargrads()

    def restore(self) -> None:
        """Move the gradients back to the parameters, rescaled to the present loss scale.

        Raises:
            AccumulationError: they overflowed, and half precision, which would skip their step, was
                undone since; they are dropped.
        """
        kept, has_changed = self._kept, self._terms != self._terms_now()
        half, scale = half_of(self._optimizer), self._scale_now()
        self.drop()
        self._optimizer.target.cleargrads()
        if has_changed and half is None and not all_finite([one.array for one in kept]):
            raise AccumulationError(
                "the group's gradients so far are not finite at their loss scale, and "
                "half_precision, which would have skipped the step, was undone before the group "
                "was complete. Leave the block of half_precision after the block of accumulate"
            )
        for parameter, array, had in kept:
            if has_changed or array.dtype != parameter.dtype:
                array, had = _rescaled(array, had, parameter.dtype, scale), scale
            # Chainer's private: the scale in a gradient, by which the update divides it.
            parameter.grad, parameter._loss_scale = array, had
            if half is not None and had is not None:
                half.note_scale(had)

    def add(self, share: float) -> None:
        """Add the parameters' gradients, which the program's own backward computed, times a
        share.
        """
        kept = {id(one.parameter): one for one in self._kept}
        for parameter in parameters(self._optimizer.target):
            gradient = None if parameter.array is None else parameter.grad
            before = kept.get(id(parameter))
            if gradient is not None:
                gradient = times(gradient, share)
                if before is not None:
                    scale = parameter._loss_scale
                    gradient += _rescaled(before.array, before.scale, gradient.dtype, scale)
                parameter.grad = gradient
            elif before is not None:
                parameter.grad, parameter._loss_scale = before.array, before.scale
        self.take()

    def serialize(self, serializer: Any) -> None:
        """Save or load the gradients."""
        kept = {id(one.parameter): one for one in self._kept}
        self.drop()
        for name, parameter in self._optimizer.target.namedparams(False):
            before = kept.get(id(parameter))
            found = serializer["kept"](name, None if before is None else before.array)
            scale = serializer["scales"](name, None if before is None else before.scale)
            if found is not None:
                self._kept.append(KeptGradient(parameter, parameter.device.send(found), scale))
        self._terms = self._terms_now()

    def _terms_now(self) -> Any:
        return half_of(self._optimizer), self._optimizer._loss_scale

    def _scale_now(self) -> float | None:
        """Return the loss scale of the next backward; None if there is none."""
        # An optimizer's loss scale has a public setter, but only a private attribute to read.
        half, scale = half_of(self._optimizer), self._optimizer._loss_scale
        return scale if half is None else half.scale_in_force


def multiply(model: Any, factor: float) -> None:
    """Multiply the gradients of a link's parameters in place, one by one."""
    if factor == 1.0:
        return
    for parameter in parameters(model):
        if parameter.array is not None and parameter.grad is not None:
            parameter.grad = times(parameter.grad, factor)


def times(gradient: Any, factor: float) -> Any:
    """Return a gradient times a number, as an array even if it has no axes."""
    made = gradient.copy()
    made *= factor
    return made


def _rescaled(array: Any, had: float | None, dtype: Any, scale: float | None) -> Any:
    factor = (1.0 if scale is None else scale) / (1.0 if had is None else had)
    if factor == 1.0 and array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # an overflow of halves is detected, and the step skipped
        return times(array.astype(np.result_type(array.dtype, np.float32)), factor).astype(dtype)
