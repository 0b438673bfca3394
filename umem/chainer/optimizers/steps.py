"""The constants of one update for each element, in float32.

The order of operations is the order of Chainer 7.8.1's `update_core_cpu`, the same on every path,
and every product is rounded before it is added: so all paths give the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.finite import LARGEST_SINGLE


class AdamStep(NamedTuple):
    """The float32 constants of one Adam step with decoupled weight decay.

    ``m += first_rate * (grad - m)``, ``v += second_rate * (grad * grad - v)``, ``x = decay * x +
    scale * (rate / (sqrt(v) + eps) * m)``.
    """

    first_rate: float
    second_rate: float
    rate: float
    eps: float
    scale: float
    decay: float

    @classmethod
    def of(cls, rule: Any) -> AdamStep:
        """Compute the constants from a rule's hyper-parameters and update count."""
        hp = rule.hyperparam
        decay = 1.0 - hp.eta * hp.weight_decay_rate
        numbers = (1.0 - hp.beta1, 1.0 - hp.beta2, rule.alpha_t, hp.eps, -hp.eta, decay)
        return cls(*map(float, numbers))  # NumPy would compute in 64 bits with an np.float64


class MomentumStep(NamedTuple):
    """The constants of one momentum SGD step: ``v = momentum * v - rate * grad``, ``x += v``."""

    momentum: float
    rate: float

    @classmethod
    def of(cls, rule: Any) -> MomentumStep:
        """Compute the constants from a rule's hyper-parameters."""
        return cls(float(rule.hyperparam.momentum), float(rule.hyperparam.lr))


Step = AdamStep | MomentumStep
SIGNS: dict[type[Step], dict[str, bool]] = {
    AdamStep: {"m": True, "v": False},
    MomentumStep: {"v": True},
}
"""For each step, its states by name, and whether they may be negative."""
HYPERPARAMETERS: dict[type[Step], tuple[str, ...]] = {
    AdamStep: ("alpha", "beta1", "beta2", "eps", "eta", "weight_decay_rate"),
    MomentumStep: ("lr", "momentum"),
}
"""For each step, the hyper-parameters that give its constants, by Chainer's names."""
DECAYS = ("beta1", "beta2", "momentum")
"""Hyper-parameters that are decay rates of averages."""


def is_sound(name: str, value: Any) -> bool:
    """Tell whether a hyper-parameter is a float32 number that keeps states finite.

    With a ``beta1`` of 1, Adam's correction of its first moment divides by 0, and with an ``eps``
    that is 0 in float32 the update would.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    if not abs(number) <= LARGEST_SINGLE or (name in DECAYS and not 0 <= number <= 1):
        return False
    if name == "beta1":
        return number < 1
    return name != "eps" or not number or bool(np.float32(number))
