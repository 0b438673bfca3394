"""Chainer's Adam, AdamW and MomentumSGD with states in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chainer import optimizers
from chainer.optimizer import GradientMethod

from umem.chainer.agreement import raise_on_all
from umem.chainer.optimizers import paths
from umem.chainer.optimizers.rules import NO_VARIANTS, QuantizedRule, plain, quantize, refuse_unsafe
from umem.chainer.optimizers.state_policy import LEAST_SIZE, StatePolicy, kept_in_32_bits
from umem.chainer.precision.half_precision import masters_of
from umem.errors import GradientError, StateError, UnsupportedError


class QuantizedOptimizer(GradientMethod):
    """Mixin that gives Chainer's optimizers 8-bit states.

    Takes the arguments of Chainer's optimizer, and `Adam8bit`'s keyword arguments.

    Attributes:
        policy: decides which states have 8 bits, and their memory.
    """

    policy = StatePolicy()

    def __init__(
        self,
        *hyperparameters: float,
        keep: Sequence[str] = (),
        least_size: int = LEAST_SIZE,
        embeddings: bool = False,
        paged: bool = False,
        **named: float,
    ) -> None:
        super().__init__(*hyperparameters, **named)
        self.policy = StatePolicy(keep, least_size, embeddings, paged)

    def create_update_rule(self) -> Any:
        """Create an update rule with 8-bit states."""
        rule = super().create_update_rule()
        quantize(rule, self.policy)
        return rule

    def setup(self, link: Any) -> Any:
        """Set up for a model as in Chainer, and compile the update loops if Numba is installed.

        Raises:
            ValueError: a name in ``keep`` matches no parameter; nothing has changed.
        """
        kept = kept_in_32_bits(self.policy, link)
        super().setup(link)
        for param in kept:
            plain(param.update_rule, param)
        paths.prepare(link, self.create_update_rule().step)
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwargs: Any) -> None:
        """Update the parameters as in Chainer, after checking gradients.

        Raises:
            StateError: there is no model yet.
            GradientError, UnsupportedError, ValueError: see `check_nan_in_grads`.
        """
        if self.target is None:
            raise StateError("the optimizer is not set up: call its setup(model) first")
        super().update(lossfun, *args, **kwargs)

    def check_nan_in_grads(self) -> None:
        """Check all gradients before hooks, which would spread NaN, and before any update.

        Raises:
            GradientError: a gradient would spoil a state, and neither dynamic loss scaling nor
                `umem.chainer.half_precision` can skip the step; nothing has changed.
            UnsupportedError, ValueError, StateError: see `QuantizedRule.check`.
        """
        for rule, param in self._quantized():
            rule.check(param)
        super().check_nan_in_grads()
        # Chainer has no public way to ask whether it scales the loss by itself.
        if not (self._loss_scaling_is_dynamic or masters_of(self) is not None):
            raise_on_all(self, lambda: refuse_unsafe(self._gradients(), self.t + 1))

    def is_safe_to_update(self) -> bool:
        """Check all gradients again after hooks or a loss scale may have changed them.

        Raises:
            GradientError: see `check_nan_in_grads`; hooks have changed gradients.
        """
        # Chainer has no public list of hooks.
        has_hooks = bool(self._hookable._pre_update_hooks)
        in_half = (
            masters_of(self) is not None
        )  # it shows hooks its own gradients, once it has checked them
        if not super().is_safe_to_update():
            return False
        if not in_half and (has_hooks or self._loss_scaling_is_dynamic):
            if not self._is_safe_by_now():
                return False
        for rule, _ in self._quantized():
            rule.vet(by_optimizer=not (in_half and has_hooks))
        return True

    def _is_safe_by_now(self) -> bool:
        """Check the gradients on all ranks; tells whether to update.

        Raises:
            GradientError: a gradient is unsafe, and Chainer does not scale the loss; the count of
                updates is as before.
        """
        try:
            raise_on_all(self, lambda: refuse_unsafe(self._gradients(), self.t))
        except GradientError:
            if self._loss_scaling_is_dynamic:
                self._loss_scaling_isnan = self._loss_scaling_isnan_ever = True
                return False
            self.t -= 1  # `update` has counted it
            raise
        return True

    def _quantized(self) -> Iterator[tuple[QuantizedRule, Any]]:
        for _, param in self._updated():
            if isinstance(param.update_rule, QuantizedRule):
                yield param.update_rule, param

    def _updated(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that an update changes, by name."""
        for name, param in self.target.namedparams(include_uninit=False):
            if param.update_rule is not None and param.update_rule.enabled:
                yield name, param

    def _gradients(self) -> Iterator[tuple[str, Any]]:
        return ((name, p.grad) for name, p in self._updated() if p.grad is not None)


class Adam8bit(QuantizedOptimizer, optimizers.Adam):
    """Adam with 8-bit moments, which take 2.03 bytes an element instead of 8; otherwise Chainer's.

    Hooks, `use_fp32_update`, loss scaling, rules of single parameters and serializers work as in
    Chainer. Parameters with fewer than ``least_size`` elements, and the parameters of `EmbedID`,
    keep 32-bit states. NumPy and CuPy arrays may have 16, 32 or 64 bits. The arithmetic is float32;
    a 64-bit parameter is changed in 64 bits. See docs/small-states.md.

    Cost: with Numba less time than Chainer's own update for large parameters, and more for small
    ones (bench/updates.py), including one check of all gradients. Thread-safety: as Chainer's.

    Args:
        alpha: as in Chainer, like the other hyper-parameters.
        amsgrad: has no 8-bit form.
        adabound: has no 8-bit form.
        keep: names of parameters that keep 32-bit states, as in ``namedparams``, or patterns such
            as ``"/head/*"``.
        least_size: parameters with fewer elements keep 32-bit states.
        embeddings: whether parameters of `EmbedID` get 8-bit states too.
        paged: on a GPU, keep 8-bit states in managed memory, and prefetch each before its update;
            has no effect on NumPy arrays.

    Raises:
        UnsupportedError: ``amsgrad`` or ``adabound``.
        GradientError: by ``update``, if a gradient has NaN, infinity, or a value beyond 1.8e19; no
            parameter and no state has changed. Under ``loss_scaling()`` the step is skipped.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, which
    uses blocks of 2048 values.
    """

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        eta: float = 1.0,
        weight_decay_rate: float = 0,
        amsgrad: bool = False,
        adabound: bool = False,
        *,
        keep: Sequence[str] = (),
        least_size: int = LEAST_SIZE,
        embeddings: bool = False,
        paged: bool = False,
    ) -> None:
        if amsgrad or adabound:
            raise UnsupportedError(NO_VARIANTS)
        super().__init__(alpha, beta1, beta2, eps, eta, weight_decay_rate)
        self.policy = StatePolicy(keep, least_size, embeddings, paged)


class AdamW8bit(QuantizedOptimizer, optimizers.AdamW):
    """AdamW with 8-bit states; takes the arguments of Chainer's AdamW and of `Adam8bit`.

    Raises:
        GradientError: see `Adam8bit`.
    """


class MomentumSGD8bit(QuantizedOptimizer, optimizers.MomentumSGD):
    """Momentum SGD with an 8-bit velocity, which takes 1.02 bytes an element instead of 4.

    Takes the arguments of Chainer's MomentumSGD, and `Adam8bit`'s keyword arguments.

    Raises:
        GradientError: see `Adam8bit`.
    """
