"""Functions of Chainer whose result for one sample depends on the others: refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
from chainer.functions.loss import cross_covariance, decov
from chainer.functions.normalization import (
    batch_normalization,
    batch_renormalization,
    decorrelated_batch_normalization,
)

from umem.chainer.function_facts import owner_of
from umem.errors import AccumulationError

MIXING = (
    batch_normalization.BatchNormalization,
    batch_renormalization.BatchRenormalizationFunction,
    decorrelated_batch_normalization.DecorrelatedBatchNormalization,
    decov.DeCov,
    cross_covariance.CrossCovariance,
)
"""Functions whose result for one sample depends on other samples."""


class OneSampleNormalised(AccumulationError):
    """Batch normalisation of one sample alone, which may be instance normalisation."""


class Mixing:
    """Refuses functions whose result for one sample depends on other samples. One for each model.

    Attributes:
        has_instances: instance normalisation was seen, of several samples.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.has_instances = False

    def refuse(self, func: Any, inputs: Sequence[Any]) -> None:
        """Raise an error for a function that mixes samples; see `MIXING`.

        Raises:
            AccumulationError: it is one; names it, and the link it belongs to.
        """
        if not isinstance(owner_of(func), MIXING) or self._is_by_sample(inputs):
            return
        mine = {id(x) for x in inputs}
        names = (name for name, p in self._model.namedparams() if id(p) in mine)
        link = next(names, "").rpartition("/")[0]
        may_be_instances = inputs[0].shape[0] == 1 and not self.has_instances
        raise (OneSampleNormalised if may_be_instances else AccumulationError)(
            f"'{func.label}'{f' of {link}' if link else ''} computes with all samples of a batch "
            "at once, so parts cannot give the gradient of the whole. umem.chainer.Recompute saves "
            "memory and gives it exactly, on the whole batch"
        )

    def _is_by_sample(self, inputs: Sequence[Any]) -> bool:
        """Tell whether batch normalisation is used as instance normalisation: all samples' channels
        in one image.

        Chainer's instance normalisation is made so. With one sample it looks like any other batch
        normalisation, unless it was seen with several.
        """
        x, *others = inputs
        if x.shape[0] != 1 or any(isinstance(y, chainer.Parameter) for y in others):
            return False
        made_by = getattr(getattr(x, "creator_node", None), "label", None)
        self.has_instances |= made_by == "Reshape"
        return self.has_instances
