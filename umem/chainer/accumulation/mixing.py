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


class Mixing:
    """Refuses functions whose result for one sample depends on others. One for each model."""

    def __init__(self, model: Any) -> None:
        self._model, self._has_instances = model, False

    def refuse(self, func: Any, inputs: Sequence[Any]) -> None:
        """Raise an error for a function that mixes samples; see `MIXING`.

        Raises:
            AccumulationError: it mixes them; names it, and its link.
        """
        if not isinstance(owner_of(func), MIXING) or self._is_by_sample(inputs):
            return
        mine = {id(x) for x in inputs}
        names = (name for name, p in self._model.namedparams() if id(p) in mine)
        link = next(names, "").rpartition("/")[0]
        raise AccumulationError(
            f"'{func.label}'{f' of {link}' if link else ''} computes with all samples of a batch "
            "at once, so parts cannot give the gradient of the whole. umem.chainer.Recompute saves "
            "memory and gives it exactly, on the whole batch"
        )

    def _is_by_sample(self, inputs: Sequence[Any]) -> bool:
        """Tell whether batch normalisation is used as instance or group normalisation.

        Chainer's are: they reshape all samples' channels into one image, without parameters. One
        sample alone may need no reshaping.
        """
        x, *others = inputs
        if x.shape[0] != 1 or any(isinstance(y, chainer.Parameter) for y in others):
            return False
        made_by = getattr(getattr(x, "creator_node", None), "label", None)
        self._has_instances |= made_by == "Reshape"
        return self._has_instances
