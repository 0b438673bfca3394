"""An optimizer's step on float32 masters, skipped if gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from umem.chainer.agreement import of_all_ranks
from umem.chainer.finite import all_finite, is_finite
from umem.chainer.parameters_once import ModelView
from umem.chainer.precision.masters import Masters
from umem.chainer.tap import Proceed, Subscriber


class Judgement:
    """The result of checking one step's gradients.

    Attributes:
        is_bad: whether a gradient is not finite; None before the check.
        divisor: the loss scale of the gradients.
        names: the parameters whose gradients are not finite, on all ranks, once the step is over.
        unscaled: the parameters without a master whose gradients were divided by the scale.
        has_updated: whether a master was updated in the step.
    """

    def __init__(self) -> None:
        self.is_bad: bool | None = None
        self.divisor = 1.0
        self.names: list[str] = []
        self.unscaled: list[Any] = []
        self.has_updated = False


class Updates(Subscriber):
    """Makes an optimizer update masters; innermost, so that other subscribers see the parameters.

    Args:
        optimizer: the optimizer.
        masters: the masters of its float16 parameters.
        used: the loss scales of backward passes since the last step; if there are several, no
            single division undoes them, and the step counts as an overflow.
    """

    place = 3

    def __init__(self, optimizer: Any, masters: Masters, used: set[float]) -> None:
        self._optimizer, self._masters, self._used = optimizer, masters, used
        self._now: Judgement | None = None

    @contextmanager
    def one_step(self, is_whole: bool = True) -> Iterator[Judgement]:
        """Yield the judgement of a step; at its end clear float32 gradients, rescale others.

        Args:
            is_whole: whether this is ``optimizer.update``, after which the scales of backward
                passes are forgotten, and not the update of a single parameter.
        """
        self._now = judgement = Judgement()
        try:
            yield judgement
        finally:
            self._now = None
            self._masters.clear_gradients()
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
        """Run a hook on the masters, with unscaled float32 gradients; not in a skipped step."""
        now = self._now
        if method is not self._optimizer or now is None:
            proceed(method, hook)
            return
        if self._is_bad(now):
            return
        if not now.has_updated:
            for parameter, _ in self._masters:
                self._masters.take_gradient(parameter, now.divisor)
        target, method.target = method.target, ModelView(method.target, self._masters.stand_in)
        try:
            proceed(method, hook)
        finally:
            method.target = target
            for parameter, _ in self._masters:
                self._masters.round(parameter)

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Run an update rule on a parameter's master, if it has one; not in a skipped step."""
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
        """Handle ``parameter.update()`` outside of an optimizer's step as its own step."""
        with self.one_step(is_whole=False):
            self.update(proceed, rule, parameter)

    def _is_bad(self, now: Judgement) -> bool:
        """Tell whether to skip the step on all ranks; checks gradients once a step.

        In a good step masters adopt edits of their parameters, and the gradients of parameters
        without masters are divided by the scale.
        """
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
                    parameter._loss_scale = None  # otherwise Chainer would divide by it again
        return now.is_bad

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters with a gradient and an enabled rule by name, each once."""
        seen: dict[int, tuple[str, Any]] = {}
        for name, parameter in self._optimizer.target.namedparams(False):
            rule = parameter.update_rule
            if rule is not None and rule.enabled and parameter.grad is not None:
                seen.setdefault(id(parameter), (name, parameter))
        return dict(seen.values())
