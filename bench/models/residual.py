"""Stacks of residual blocks of one width."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Region, call, grouped, images, normal


class ResidualBlock(chainer.Chain):
    """3x3 convolutions with batch normalisation, and the way around them.

    With ``sum_first`` the last relu comes after the sum (He and others, CVPR 2016).
    """

    def __init__(
        self, channels: int, convolutions: int = 1, dropout: float = 0.0, sum_first: bool = False
    ) -> None:
        super().__init__()
        self.dropout, self.sum_first = dropout, sum_first
        with self.init_scope():
            self.convs = chainer.ChainList(
                *[
                    L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
                    for _ in range(convolutions)
                ]
            )
            self.norms = chainer.ChainList(
                *[L.BatchNormalization(channels) for _ in range(convolutions)]
            )

    def forward(self, x: Any) -> Any:
        y, count = x, len(self.convs)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True), 1):
            y = norm(conv(y))
            if number < count or not self.sum_first:
                y = F.relu(y)
        if self.sum_first:
            return F.relu(y + x)
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


def stack(
    blocks: int, channels: int = 32, pixels: int = 32, dropout: float = 0.0, sum_first: bool = False
) -> Model:
    """Blocks of one convolution each, and the mean of squares."""
    parts = [ResidualBlock(channels, 1, dropout, sum_first) for _ in range(blocks)]

    def loss(x: Any, region: Region = call) -> Any:
        y = grouped(region, parts, round(blocks**0.5), x)
        return F.mean(y * y)

    def inputs(batch: int) -> tuple[Any]:
        return (normal(batch, channels, pixels, pixels),)

    return Model(chainer.ChainList(*parts), inputs, loss)


def classifier(blocks: int, channels: int, pixels: int) -> Model:
    """Blocks of two convolutions each between a convolution and a linear layer; 10 classes."""
    stem = L.Convolution2D(3, channels, 3, pad=1)
    parts = [ResidualBlock(channels, 2, sum_first=True) for _ in range(blocks)]
    last = L.Linear(channels, 10)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        y = grouped(region, parts, round(blocks**0.5), stem(x))
        return F.softmax_cross_entropy(last(F.mean(y, axis=(2, 3))), t)

    return Model(chainer.ChainList(stem, *parts, last), images(pixels, 10), loss)


MODELS = {
    "residual": {
        "12 blocks": lambda: stack(12),
        "24 blocks": lambda: stack(24),
        "24 blocks, dropout": lambda: stack(24, dropout=0.1),
        "24 blocks, sum first": lambda: stack(24, sum_first=True),
        "3 narrow blocks": lambda: stack(3, 8, 16),
        "6 narrow blocks": lambda: stack(6, 16, 16),
        "6 narrow blocks, dropout": lambda: stack(6, 16, 16, dropout=0.1),
        "classifier of 4 blocks": lambda: classifier(4, 64, 32),
        "classifier of 1 block": lambda: classifier(1, 8, 16),
    }
}
