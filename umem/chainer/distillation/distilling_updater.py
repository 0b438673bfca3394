"""A Trainer's updater whose model also learns from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chainer.dataset import convert
from chainer.training import updaters

from umem.chainer.accumulation.splitting import arguments_of
from umem.chainer.distillation.distilling_loss import DistillingLoss, Loss
from umem.chainer.distillation.labels import without_label
from umem.errors import StateError


class DistillingUpdater(updaters.StandardUpdater):
    """A `StandardUpdater` whose model, the student, learns from labels and from a teacher's output.

    The loss, its options and its errors are those of `DistillingLoss`. Pass the arguments of
    ``chainer.training.StandardUpdater`` by keyword, except ``loss_func``: give ``lossfun``, a
    function of scores and labels as in ``chainer.links.Classifier``. With a weight of 0 an update
    is StandardUpdater's, to the bit.

    Args:
        iterator: gives the batches; among several, the one named "main".
        optimizer: the student's; among several, the one named "main".
        teacher: a trained network; see `DistillingLoss`.
        unlabelled: an iterator over inputs without labels. Each of its batches is added to one of
            the main iterator's, with labels of -1; its items are the main one's without their
            label. Or name it "unlabelled" in a dictionary of iterators. It is not read if the
            weight is 0.

    `StandardUpdater` can read its serialised state. The teacher is not saved: give the same one to
    a resumed run.

    Raises:
        As `DistillingLoss`. StateError in an update: items of ``unlabelled`` have a label, or it
            has ended.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        teacher: Any,
        *,
        temperature: float = 4.0,
        weight: float = 0.5,
        unlabelled: Any = None,
        lossfun: Loss | None = None,
        distance: Loss | None = None,
        label_key: Any = "own",
        teacher_precision: str = "float32",
        teacher_memory: str | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        if "loss_func" in kwargs:
            raise TypeError(
                "DistillingUpdater takes lossfun, a function of scores and labels, not loss_func"
            )
        main = optimizer["main"] if isinstance(optimizer, dict) else optimizer
        self.loss = DistillingLoss(
            main,
            teacher,
            temperature=temperature,
            weight=weight,
            lossfun=lossfun,
            distance=distance,
            label_key=label_key,
            teacher_precision=teacher_precision,
            teacher_memory=teacher_memory,
            device=device,
        )
        iterators = dict(iterator) if isinstance(iterator, Mapping) else {"main": iterator}
        if unlabelled is not None:
            iterators["unlabelled"] = unlabelled
        super().__init__(iterators, optimizer, device=device, **kwargs)

    def update_core(self) -> None:
        """Update the student with the next batch, and the next unlabelled one."""
        iterator, optimizer = self.get_iterator("main"), self.get_optimizer("main")
        more = self._unlabelled()
        samples = iterator.next()
        if more:
            samples = [*samples, *(without_label(x, samples[0], self.loss.label_key) for x in more)]
        # Chainer's own call of a converter: old ones take a number for the device.
        converted = convert._call_converter(self.converter, samples, self.input_device)
        given = arguments_of(converted)
        optimizer.update(self.loss, *given.args, **given.kwargs)
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _unlabelled(self) -> list[Any]:
        """Return the next unlabelled batch. It is drawn before the labelled one, so that an error
        loses none.
        """
        # get_iterator would raise if there is none.
        if "unlabelled" not in self._iterators or not self.loss.weight:
            return []
        try:
            return list(self.get_iterator("unlabelled").next())
        except StopIteration:
            raise StateError(
                f"the unlabelled iterator has ended after {self.iteration} updates, and each takes "
                "one of its batches: make it with repeat=True"
            ) from None
