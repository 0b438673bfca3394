"""Update rules whose states have 8 bits: Chainer's own rules, with another storage of states."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.optimizer import UpdateRule
from chainer.optimizers import adam, momentum_sgd
from chainer.serializer import Deserializer

from umem.chainer.finite import SQUARED, first_beyond, why
from umem.chainer.optimizers import paths
from umem.chainer.optimizers.dynamic_map import dynamic_map
from umem.chainer.optimizers.quantized_state import (
    CODES,
    SCALES,
    QuantizedState,
    dequantized,
    quantized,
    zeros,
)
from umem.chainer.optimizers.saving import load, save
from umem.chainer.optimizers.state_policy import StatePolicy
from umem.chainer.optimizers.steps import (
    DECAYS,
    HYPERPARAMETERS,
    SIGNS,
    AdamStep,
    MomentumStep,
    Step,
    is_sound,
)
from umem.errors import GradientError, StateError, UnsupportedError
from umem.memory import managed, prefetch


class QuantizedRule(UpdateRule):
    """Mixin that gives Chainer's update rules 8-bit states.

    Attributes:
        policy: see `StatePolicy`.
        is_vetted: the optimizer has just checked the gradient.
    """

    step: ClassVar[type[AdamStep] | type[MomentumStep]]
    policy = StatePolicy()
    is_vetted = False
    t: int

    def vet(self, by_optimizer: bool) -> None:
        """Set whether the optimizer has checked the gradient, and no hook of this rule can change
        it.
        """
        # Chainer has no public list of hooks.
        self.is_vetted = by_optimizer and not self._hookable._pre_update_hooks

    @property
    def is_quantized(self) -> bool:
        """Tell whether the rule has an 8-bit state."""
        return any(key.endswith(CODES) for key in self.state or ())

    def choose_bits(self, size: int) -> None:
        """Choose the bits of states from the size of the whole parameter, also for a shard of
        it.
        """
        is_small = size < self.policy.least_size
        self.policy = replace(self.policy, least_size=sys.maxsize if is_small else 0)

    def init_state(self, param: Any) -> None:
        """Create a parameter's state, all 0: in 8 bits unless the parameter is small."""
        if param.size < self.policy.least_size:
            super().init_state(param)
            return
        for name, signed in SIGNS[self.step].items():
            made = zeros(param.device.xp, param.shape, signed)
            self.state[name + CODES], self.state[name + SCALES] = made

    def _init_states(self, param: Any) -> None:
        """Create missing states, and move states to the parameter's device; called by Chainer."""
        is_cupy = param.device.xp is not np and param.array is not None
        if self.policy.paged and is_cupy and self._lacks_states():
            with managed():
                super()._init_states(param)
        else:
            super()._init_states(param)

    def _lacks_states(self) -> bool:
        """Tell whether states are missing or on the host."""
        return self.state is None or any(isinstance(v, np.ndarray) for v in self.state.values())

    def update_core_cpu(self, param: Any) -> None:
        """Update a NumPy parameter."""
        if self._is_ready(param):
            paths.update(*self._arguments(param))
        else:
            super().update_core_cpu(param)

    def update_core_gpu(self, param: Any) -> None:
        """Update a CuPy parameter."""
        if self._is_ready(param):
            if self.policy.paged:
                prefetch(list(self.state.values()))
            paths.update(*self._arguments(param))
        else:
            super().update_core_gpu(param)

    def serialize(self, serializer: Any) -> None:
        """Save or load the count of updates and the state; see `saving`.

        Raises:
            DataError: see `saving.load`; the rule is as before.
            KeyError: there is no state, but there were updates, as in Chainer.
        """
        if not isinstance(serializer, Deserializer):
            save(serializer, self.t, self.state)
            return
        updates = serializer("t", self.t)
        state = load(serializer, SIGNS[self.step], self.policy.least_size)
        strict = getattr(serializer, "strict", True)
        if state is None and updates and self.enabled and strict:
            raise KeyError(f"no state {', '.join(SIGNS[self.step])} after {updates} updates")
        if state is not None or (strict and not updates):
            self._state = state
        self.t = updates

    def states(self) -> list[QuantizedState]:
        """Return the states, flattened, in the order of `SIGNS`."""
        return [
            QuantizedState(
                self.state[name + CODES].reshape(-1), self.state[name + SCALES], dynamic_map(signed)
            )
            for name, signed in SIGNS[self.step].items()
        ]

    def _arguments(self, param: Any) -> tuple[Step, Any, Any, list[QuantizedState]]:
        return self.step.of(self), param.array, param.grad, self.states()

    def check(self, param: Any) -> None:
        """Raise unless hyper-parameters and state keep the state finite.

        Raises:
            UnsupportedError: amsgrad or adabound.
            ValueError: a hyper-parameter is not a number, not finite, or out of range.
            StateError: the state belongs to a parameter of another shape.
        """
        if has_variant(self):
            raise UnsupportedError(NO_VARIANTS)
        hp = self.hyperparam.get_dict()
        names = HYPERPARAMETERS[self.step]
        if wrong := {name: hp[name] for name in names if not is_sound(name, hp[name])}:
            raise ValueError(
                f"hyper-parameters would spoil the state: {wrong}. They must be numbers that are "
                f"finite in float32, {', '.join(DECAYS)} from 0 to 1, beta1 below 1, and eps no "
                "less than 1e-45, or 0"
            )
        shapes = {value.shape for key, value in (self.state or {}).items() if key.endswith(CODES)}
        if shapes - {param.shape}:
            raise StateError(
                f"the state of {param.name} has the shape {shapes.pop()}, but the parameter has "
                f"{param.shape}: set the optimizer up again"
            )

    def _is_ready(self, param: Any) -> bool:
        """Tell whether there is a gradient and an 8-bit state, after checking both.

        Raises:
            GradientError, and the errors of `check`: nothing has changed.
        """
        vetted, self.is_vetted = self.is_vetted, False
        if param.grad is None:
            return False
        if not vetted:
            try:
                self.check(param)
                refuse_unsafe([(param.name or "a parameter", param.grad)], self.t)
            except Exception:
                self.t -= 1  # `update` has counted it
                raise
        return self.is_quantized


class Adam8bitRule(QuantizedRule, adam.AdamRule):
    """Adam's update rule with 8-bit moments."""

    is_elementwise = True
    step = AdamStep


class MomentumSGD8bitRule(QuantizedRule, momentum_sgd.MomentumSGDRule):
    """Momentum SGD's update rule with an 8-bit velocity."""

    is_elementwise = True
    step = MomentumStep


QUANTIZED = {adam.AdamRule: Adam8bitRule, momentum_sgd.MomentumSGDRule: MomentumSGD8bitRule}
"""For each of Chainer's update rules, the one with 8-bit states."""
PLAIN_RULES = {small: one for one, small in QUANTIZED.items()}
NO_VARIANTS = (
    "amsgrad and adabound have no form with 8-bit states: use Adam without them, or Chainer's own"
)


def has_variant(owner: Any) -> bool:
    """Tell whether a rule or optimizer computes a variant without an 8-bit form."""
    hp = owner.hyperparam.get_dict()
    return bool(hp.get("amsgrad") or hp.get("adabound"))


def quantize(rule: Any, policy: StatePolicy) -> None:
    """Convert a rule of Chainer's in place to one with 8-bit states, keeping its state.

    It stays the same object, which hooks and parameters refer to.
    """
    state = rule.state
    rule.__class__, rule.policy = QUANTIZED[type(rule)], policy
    for name, signed in SIGNS[rule.step].items() if state else ():
        value = state[name]
        if value.size >= policy.least_size:
            made = quantized(cuda.to_cpu(value), signed)
            send = chainer.backend.get_device_from_array(value).send
            with managed() if policy.paged and not isinstance(value, np.ndarray) else nullcontext():
                state[name + CODES], state[name + SCALES] = map(send, made)
            del state[name], value


def plain(rule: Any, param: Any) -> None:
    """Convert a rule with 8-bit states in place to Chainer's, with the dequantised state."""
    state = rule.state
    for name, signed in SIGNS[rule.step].items() if rule.is_quantized else ():
        # The float32 copy of use_fp32_update has no public name.
        dtype = (param if rule._fp32_param is None else rule._fp32_param).dtype
        codes, scales = state.pop(name + CODES), state.pop(name + SCALES)
        values = dequantized(cuda.to_cpu(codes), cuda.to_cpu(scales), signed, dtype)
        state[name] = chainer.backend.get_device_from_array(codes).send(values)
    rule.__class__ = PLAIN_RULES[type(rule)]
    vars(rule).pop("policy", None)
    vars(rule).pop("is_vetted", None)


def refuse_unsafe(gradients: Any, updates: int) -> None:
    """Raise GradientError for the first gradient that would make a state infinite or NaN.

    Args:
        gradients: arrays by the names of their parameters.
        updates: the number of their update.

    Raises:
        GradientError: one has values that are not finite, or too large; it names the first.
    """
    found = first_beyond(gradients, SQUARED)
    if found is not None:
        name, grad = found
        raise GradientError(
            f"the gradient of {name} would spoil the optimizer's state for good, in update "
            f"{updates}: {why(grad, SQUARED)}. No parameter and no state was changed. Skip the "
            "step, or use optimizer.loss_scaling(), which skips such steps"
        )
