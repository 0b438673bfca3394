"""A Trainer's updater that takes each batch in micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from chainer.dataset import convert
from chainer.training import updaters

from umem.chainer.accumulation.batch_parts import MicroBatches
from umem.chainer.accumulation.loss_weight import Weight
from umem.chainer.accumulation.splitting import SamplesBatch


class AccumulatingUpdater(updaters.StandardUpdater):
    """A `StandardUpdater` that computes each batch's gradient in micro-batches.

    The gradient equals the whole batch's; see `umem.chainer.accumulate`, also for ``weight``,
    ``check`` and ``survive``. Values that the loss function reports are reported for the whole
    batch: a loss by its share, other figures by samples. Pass the arguments of
    ``chainer.training.StandardUpdater`` by keyword.

    Args:
        iterator: gives the batches; among several, the one named "main".
        optimizer: the one that is accumulated; among several, the one named "main".
        micro_batch: samples of a part; the last may be shorter. More than the batch is the whole.

    A batch is converted at once, so that its padding is the whole batch's, and its arrays are cut.
    If the converter returns anything but arrays or lists of them, each part is converted by itself.
    `StandardUpdater` can read its serialised state, and the reverse.

    Raises:
        SizeError: ``micro_batch`` is not a whole number above zero; in update: an empty batch.
        StateError: the optimizer has no model.
        AccumulationError: in update, if the parts cannot give the gradient of the whole. No update
            was made, but the iterator has advanced.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        micro_batch: int,
        *args: Any,
        weight: Weight = None,
        check: bool = True,
        survive: bool = False,
        **kwargs: Any,
    ) -> None:
        main = optimizer["main"] if isinstance(optimizer, dict) else optimizer
        self._micro = MicroBatches(main, micro_batch, weight, check=check, survive=survive)
        super().__init__(iterator, optimizer, *args, **kwargs)

    @property
    def micro_batch(self) -> int:
        """Return the samples of a micro-batch, after any halving."""
        return self._micro.size

    def serialize_parts(self, serializer: Any) -> None:
        """Save or load the micro-batch size, which `StandardUpdater` does not."""
        self._micro.serialize(serializer)

    def update_core(self) -> None:
        """Update the model with the iterator's next batch."""
        iterator, optimizer = self.get_iterator("main"), self.get_optimizer("main")
        # Chainer's own call of a converter: old ones take a number for the device.
        converted = partial(convert._call_converter, self.converter, device=self.input_device)
        batch = SamplesBatch(iterator.next(), converted)
        self._micro.compute_gradient(self.loss_func or optimizer.target, batch)
        optimizer.update()
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)
