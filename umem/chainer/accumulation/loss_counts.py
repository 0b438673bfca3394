"""The divisors of Chainer's own loss functions, read from their nodes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from chainer.functions.loss import (
    contrastive,
    ctc,
    hinge,
    mean_absolute_error,
    mean_squared_error,
    negative_sampling,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    triplet,
)


def valid_labels(func: Any, node: Any) -> float | None:
    """Count the labels of a cross entropy that are not ignored; 1 if all are, as Chainer
    divides.
    """
    if func.reduce != "mean":
        return None
    x, t = node.inputs[0].shape, node.inputs[1]
    if getattr(func, "soft_target", False):
        return float(prod(x)) / float(x[1])
    if not func.normalize:
        return len_of(x)
    return float((t.data != getattr(func, "ignore_label", -1)).sum())


def _elements(func: Any, node: Any) -> float | None:
    return float(prod(node.inputs[0].shape))


def _samples(func: Any, node: Any) -> float | None:
    return len_of(node.inputs[-1].shape) if func.reduce == "mean" else None


def _labels(func: Any, node: Any) -> float | None:
    return len_of(node.inputs[2].shape) if func.reduce == "mean" else None


def len_of(shape: tuple[int, ...]) -> float:
    """Return the length of the first axis."""
    return float(shape[0]) if shape else 1.0


COUNTS: dict[type, Callable[[Any, Any], float | None]] = {
    softmax_cross_entropy.SoftmaxCrossEntropy: valid_labels,
    sigmoid_cross_entropy.SigmoidCrossEntropy: valid_labels,
    mean_squared_error.MeanSquaredError: _elements,
    mean_absolute_error.MeanAbsoluteError: _elements,
    hinge.Hinge: _samples,
    contrastive.Contrastive: _samples,
    triplet.Triplet: _samples,
    ctc.ConnectionistTemporalClassification: _labels,
    negative_sampling.NegativeSamplingFunction: lambda func, node: None,
}
"""For each of Chainer's loss functions: a function that reads the divisor from its node; None for a
sum."""
