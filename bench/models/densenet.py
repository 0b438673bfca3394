"""DenseNet (Huang and others, CVPR 2017): each layer reads what all before it made."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Parts, Region, call, images


class DenseLayer(chainer.Chain):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        with self.init_scope():
            self.norm1 = L.BatchNormalization(channels)
            self.conv1 = L.Convolution2D(channels, 4 * growth, 1, nobias=True)
            self.norm2 = L.BatchNormalization(4 * growth)
            self.conv2 = L.Convolution2D(4 * growth, growth, 3, pad=1, nobias=True)

    def forward(self, x: Any) -> Any:
        y = self.conv1(F.relu(self.norm1(x)))
        return F.concat((x, self.conv2(F.relu(self.norm2(y)))))


def small(layers: int, last_norm: bool, pixels: int = 32, growth: int = 12) -> Model:
    """Three stages for small images; ``last_norm`` normalises before the mean."""
    channels = 24
    first = L.Convolution2D(3, channels, 3, pad=1, nobias=True)
    parts: list[Any] = []
    for stage in range(3):
        for _ in range(layers):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if stage < 2:
            parts.append(L.Convolution2D(channels, channels // 2, 1, nobias=True))
            channels //= 2
    norm = [L.BatchNormalization(channels)] if last_norm else []
    last = L.Linear(channels, 10)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        y = first(x)
        for part in parts:
            dense = isinstance(part, DenseLayer)
            y = region(part, y) if dense else F.average_pooling_2d(part(y), 2)
        for link in norm:
            y = F.relu(link(y))
        return F.softmax_cross_entropy(last(F.mean(y, axis=(2, 3))), t)

    return Model(chainer.ChainList(first, *parts, *norm, last), images(pixels, 10), loss)


def densenet161() -> Model:
    """Build DenseNet-161."""
    m, growth, channels = Parts(), 48, 96
    stem = m.conv_norm(3, channels, 7, stride=2, pad=3)
    stages: list[Any] = []
    for stage, layers in enumerate((6, 12, 36, 24)):
        if stage:
            stages.append((m.norm_relu_conv(channels, channels // 2, 1), None))
            channels //= 2
        for _ in range(layers):
            narrow = m.norm_relu_conv(channels, 4 * growth, 1)
            stages.append((narrow, m.norm_relu_conv(4 * growth, growth, 3, pad=1)))
            channels += growth
    last, fc = m.add(L.BatchNormalization(channels)), m.add(L.Linear(channels, 1000))

    def loss(x: Any, t: Any) -> Any:
        h = F.max_pooling_2d(F.relu(stem(x)), 3, stride=2, pad=1)
        for first, second in stages:
            if second is None:
                h = F.average_pooling_2d(first(h), 2)
            else:
                h = F.concat((h, second(first(h))))
        h = F.relu(last(h))
        return F.softmax_cross_entropy(fc(F.average_pooling_2d(h, h.shape[2:])), t)

    return Model(m, images(224, 1000), loss)


MODELS = {
    "DenseNet": {
        "18 layers": lambda: small(6, last_norm=False),
        "24 layers": lambda: small(8, last_norm=True),
        "161, 224 px": densenet161,
    }
}
