"""A batch in micro-batches: the first is compared, and one that does not fit is halved."""

from __future__ import annotations

import gc
from typing import Any

from umem.chainer.accumulation.loss_weight import Weight
from umem.chainer.accumulation.part_comparison import Compared, PartComparison
from umem.chainer.accumulation.splitting import Batch, part_sizes, positive_count, slices
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.step_state import StepState
from umem.errors import StateError, UnsupportedError


class MicroBatches:
    """Computes the gradient of an optimizer's batches in micro-batches.

    Attributes:
        size: samples of a micro-batch; less than requested after running out of memory.
        gradient: computes the gradients.
    """

    def __init__(
        self, optimizer: Any, size: int, weight: Weight, *, check: bool, survive: bool
    ) -> None:
        self.size = positive_count(size, "micro_batch")
        self._model = model_of(optimizer)
        self._optimizer = optimizer
        self.gradient = WholeGradient(self._model, weight)
        self._survive = survive
        self._comparison = PartComparison(self.gradient, self._model, is_on=check)

    def serialize(self, serializer: Any) -> None:
        """Save or load the micro-batch size, reduced after an out-of-memory error."""
        self.size = serializer("size", self.size)

    def compute_gradient(self, lossfun: Any, batch: Batch) -> None:
        """Compute a batch's gradient into the parameters' ``grad``.

        Raises:
            AccumulationError: micro-batches cannot give it.
            MemoryError: it does not fit; if it may be halved, not even in micro-batches of 1.
            The loss function's errors. Gradients are then cleared; random generators and the state
                of links are as before.
        """
        while not self._fits(lossfun, batch):
            self.size = -(-min(self.size, batch.size) // 2)
            gc.collect()

    def _fits(self, lossfun: Any, batch: Batch) -> bool:
        """Try a micro-batch size; tells whether it fits. The traceback is dropped, because it holds
        arrays.
        """
        try:
            with self.gradient.undone_by_errors() as state:
                self._compute(lossfun, batch, state)
        except MemoryError:
            if not self._survive or min(self.size, batch.size) == 1:
                raise
            return False
        return True

    def _compute(self, lossfun: Any, batch: Batch, state: StepState) -> None:
        """Compute the gradient in parts of the present size, and have it compared when that is
        due.
        """
        is_ready = all(p.array is not None for p in self._model.params())
        sizes = part_sizes(batch.size, self.size)
        scale = loss_scale_of(self._optimizer)
        facts = self.gradient.gradient_in_parts(lossfun, batch, sizes, scale)
        if len(sizes) > 1:
            parts = [range(part.start, part.stop) for part in slices(sizes)]
            before = state if is_ready else StepState(self._model)
            self._comparison.compare_if_due(Compared(lossfun, batch, parts, facts, before, scale))


def model_of(optimizer: Any) -> Any:
    """Return the link that an optimizer updates.

    Raises:
        StateError: it was not set up.
        UnsupportedError: its updates do not use gradients as Chainer's do.
    """
    from chainer.optimizer import GradientMethod

    if not isinstance(optimizer, GradientMethod):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not a chainer.GradientMethod: umem does not know how "
            "its update uses a gradient"
        )
    if optimizer.target is None:
        raise StateError("the optimizer has no model yet: call optimizer.setup(model) first")
    return optimizer.target


def loss_scale_of(optimizer: Any) -> Any:
    """Return the factor by which Chainer multiplies an optimizer's loss; None if there is none."""
    return optimizer._loss_scale  # Chainer has no public name for it
