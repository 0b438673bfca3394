"""Chainer's Adam, AdamW and MomentumSGD, but that they keep their states in 8 bits."""

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

    Its arguments are those of Chainer's optimizer, and those by keyword of `Adam8bit`.

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
            ValueError: a name in ``keep`` is that of no parameter; nothing has changed.
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
                `umem.chainer.half_precision` is there to skip the step; nothing has changed.
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
        )  # it shows hooks gradients of its own, once it has judged them
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

    Hooks, `use_fp32_update`, loss scaling, rules of single parameters and serializers work as with
    Chainer's. Parameters of fewer than ``least_size`` elements, and those of `EmbedID`, keep states
    of 32 bits. NumPy and CuPy arrays of 16, 32 or 64 bits; what is computed is float32, and a
    parameter of 64 bits is changed in 64. See docs/reference/optimizer-states.md.

    Cost: with Numba less time than Chainer's own update for large parameters, and more for small
    ones (bench/updates.py); one look at all gradients is in it. Thread-safety: as Chainer's.

    Args:
        alpha: as in Chainer, and so are the other hyper-parameters.
        amsgrad: there is no 8-bit form of it.
        adabound: nor of it.
        keep: names of parameters that keep states of 32 bits, as ``namedparams`` has them, or
            patterns such as ``"/head/*"``.
        least_size: parameters with fewer elements keep states of 32 bits.
        embeddings: whether parameters of `EmbedID` get states of 8 bits too.
        paged: on a GPU, keep 8-bit states in managed memory, and prefetch each before its update;
            with NumPy arrays it does nothing.

    Raises:
        UnsupportedError: ``amsgrad`` or ``adabound``.
        GradientError: by ``update``, where a gradient has NaN, infinity, or a value beyond 1.8e19;
            no parameter and no state has changed. Under ``loss_scaling()`` the step is skipped.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; there
    blocks have 2048 values.
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
    """AdamW with 8-bit states; its arguments are those of Chainer's AdamW and of `Adam8bit`.

    Raises:
        GradientError: see `Adam8bit`.
    """


class MomentumSGD8bit(QuantizedOptimizer, optimizers.MomentumSGD):
    """Momentum SGD with an 8-bit velocity, which takes 1.02 bytes an element instead of 4.

    Its arguments are those of Chainer's MomentumSGD, and those by keyword of `Adam8bit`.

    Raises:
        GradientError: see `Adam8bit`.
    """
