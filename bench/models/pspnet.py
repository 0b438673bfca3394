"""PSPNet (Zhao and others, CVPR 2017), with its auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer.functions as F

from models.model import Model, Parts, maps


def pspnet() -> Model:
    """On ResNet101 whose last two stages are dilated; 19 classes."""
    m, classes = Parts(), 19
    stem = [
        m.conv_norm(3, 64, 3, stride=2, pad=1),
        m.conv_norm(64, 64, 3, pad=1),
        m.conv_norm(64, 128, 3, pad=1),
    ]
    stages, channels = [], 128
    for width, count, stride, dilate in (
        (64, 3, 1, 1),
        (128, 4, 2, 1),
        (256, 23, 1, 2),
        (512, 3, 1, 4),
    ):
        stages.append(
            [
                _bottleneck(
                    m,
                    channels if b == 0 else 4 * width,
                    width,
                    stride if b == 0 else 1,
                    dilate,
                    b == 0,
                )
                for b in range(count)
            ]
        )
        channels = 4 * width
    pyramid = [(bins, m.conv_norm(2048, 512, 1)) for bins in (1, 2, 3, 6)]
    head = m.conv_norm(4096, 512, 3, pad=1), m.conv(512, classes, 1)
    side = m.conv_norm(1024, 256, 3, pad=1), m.conv(256, classes, 1)

    def loss(h: Any, parts: Any, t: Any) -> Any:
        h = parts[1](F.dropout(F.relu(parts[0](h)), 0.1))
        return F.softmax_cross_entropy(F.resize_images(h, t.shape[1:]), t)

    def total(x: Any, t: Any) -> Any:
        """Compute the loss of all pixels, with that of the side branch."""
        h = x
        for layer in stem:
            h = F.relu(layer(h))
        h = F.max_pooling_2d(h, 3, stride=2, pad=1)
        for number, blocks in enumerate(stages):
            for block in blocks:
                h = block(h)
            if number == 2:
                extra = h
        size = h.shape[2]
        parts = [h]
        for bins, layer in pyramid:
            pooled = F.average_pooling_2d(h, size // bins, stride=size // bins)
            parts.append(F.resize_images(F.relu(layer(pooled)), h.shape[2:]))
        return loss(F.concat(parts), head, t) + 0.4 * loss(extra, side, t)

    return Model(m, maps(713, 19), total)


def _bottleneck(
    m: Parts, low: int, width: int, stride: int, dilate: int, projects: bool
) -> Callable[[Any], Any]:
    """Build a block of a residual network, whose convolution may be dilated."""
    narrow = m.conv_norm(low, width, 1)
    middle = m.conv_norm(width, width, 3, stride=stride, pad=dilate, dilate=dilate)
    wide = m.conv_norm(width, 4 * width, 1)
    project = m.conv_norm(low, 4 * width, 1, stride=stride) if projects else None

    def block(x: Any) -> Any:
        h = wide(F.relu(middle(F.relu(narrow(x)))))
        return F.relu(h + (x if project is None else project(x)))

    return block


MODELS = {"PSPNet": {"713 px": pspnet}}
