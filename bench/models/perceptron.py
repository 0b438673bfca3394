"""A perceptron of two hidden layers with dropout, on images of 784 pixels."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Region, call, labels, normal


def perceptron(width: int) -> Model:
    """Build a perceptron of two hidden layers, with dropout."""
    model = chainer.Sequential(
        L.Linear(784, width),
        F.relu,
        F.dropout,
        L.Linear(width, width),
        F.relu,
        F.dropout,
        L.Linear(width, 10),
    )

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(batch, 784), labels(batch, classes=10)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        return F.softmax_cross_entropy(region(model, x), t)

    return Model(model, inputs, loss, "Adam")


MODELS = {"MLP": {"1,024 wide": lambda: perceptron(1024), "256 wide": lambda: perceptron(256)}}
