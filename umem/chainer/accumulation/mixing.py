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
"""Functions whose result for one sample depends on the others."""


def refuse_mixing(func: Any, inputs: Sequence[Any], model: Any) -> None:
    """Refuse a function whose result for one sample depends on the others.

    Raises:
        AccumulationError: it is one; names it, and the link it belongs to.
    """
    if not isinstance(owner_of(func), MIXING) or _is_by_sample(inputs):
        return
    mine = {id(x) for x in inputs}
    link = next((n.rpartition("/")[0] for n, p in model.namedparams() if id(p) in mine), "")
    raise AccumulationError(
        f"'{func.label}'{f' of {link}' if link else ''} computes with all samples of a batch at "
        "once, so parts cannot give the gradient of the whole. umem.chainer.Recompute saves memory "
        "and gives it exactly, on the whole batch"
    )


def _is_by_sample(inputs: Sequence[Any]) -> bool:
    """Whether batch normalisation is applied to one image of all samples' channels.

    That is how instance and group normalisation are made of it.
    """
    x = inputs[0]
    made_by = getattr(getattr(x, "creator_node", None), "label", None)
    own = any(isinstance(y, chainer.Parameter) for y in inputs[1:])
    return len(x.shape) > 2 and x.shape[0] == 1 and made_by == "Reshape" and not own
