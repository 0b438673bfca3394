"""U-Net (Ronneberger and others, 2015): down and up again, with a skip at each level."""

from __future__ import annotations

import itertools
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Parts, Region, call, maps


class TwoConvolutions(chainer.Chain):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(channels, out, 3, pad=1)
            self.first_norm = L.BatchNormalization(out)
            self.second = L.Convolution2D(out, out, 3, pad=1)
            self.second_norm = L.BatchNormalization(out)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)))


def padded(levels: int, pixels: int = 64, base: int = 16) -> Model:
    """With padding and batch normalisation; one channel in, two classes out."""
    widths = [base << level for level in range(levels)]
    down = [TwoConvolutions(a, b) for a, b in itertools.pairwise([1, *widths])]
    lift = [L.Deconvolution2D(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])]
    up = [TwoConvolutions(2 * w, w) for w in reversed(widths[:-1])]
    score = L.Convolution2D(base, 2, 1)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        """Compute the loss of all pixels."""
        y, skips = x, []
        for level, part in enumerate(down):
            y = region(part, F.max_pooling_2d(y, 2) if level else y)
            skips.append(y)
        for raised, part in zip(lift, up, strict=True):
            skip = skips[-2]
            del skips[-1]
            y = region(lambda a, b, r=raised, p=part: p(F.concat((b, r(a)))), y, skip)
        skips.clear()
        return F.softmax_cross_entropy(score(y), t)

    link = chainer.ChainList(*down, *lift, *up, score)
    return Model(link, maps(pixels, 2, channels=1), loss, "Adam")


def published() -> Model:
    """One channel in, two classes out, convolutions without padding, crops at the skips."""
    m, width = Parts(), (64, 128, 256, 512, 1024)
    down = [
        (m.conv(low, high, 3), m.conv(high, high, 3))
        for low, high in zip((1, *width[:-1]), width, strict=True)
    ]
    up = []
    for low, high in zip(width[-2::-1], width[:0:-1], strict=True):
        grow = m.add(L.Deconvolution2D(high, low, 2, stride=2))
        up.append((grow, m.conv(high, low, 3), m.conv(low, low, 3)))
    last = m.conv(64, 2, 1)

    def loss(x: Any, t: Any) -> Any:
        """Compute the loss of all pixels."""
        h, skips = x, []
        for level, (first, second) in enumerate(down):
            if level:
                h = F.max_pooling_2d(h, 2)
            h = F.relu(second(F.relu(first(h))))
            if level >= 3:
                h = F.dropout(h)
            skips.append(h)
        skips.pop()
        for deconv, first, second in up:
            h = F.relu(deconv(h))
            skip = skips.pop()
            edge = (skip.shape[2] - h.shape[2]) // 2
            h = F.concat((skip[:, :, edge : edge + h.shape[2], edge : edge + h.shape[3]], h))
            h = F.relu(second(F.relu(first(h))))
        return F.softmax_cross_entropy(last(h), t)

    return Model(m, maps(572, 2, channels=1, cropped=184), loss)


MODELS = {
    "U-Net": {
        "4 levels": lambda: padded(4),
        "5 levels": lambda: padded(5),
        "as published, 572 px": published,
    }
}
