"""The models of bench/prediction.py: each trains on a batch of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import umem.chainer

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L
from recompute_parts.networks import DenseLayer, ResidualBlock, TransformerLayer, TwoConvolutions

assert umem.chainer

Step = Callable[[int], None]
LossOf = Callable[[int], Any]


@dataclass(frozen=True)
class Model:
    """A model of the benchmark; ``make`` gives a function that trains on a batch of a size."""

    name: str
    optimizer: str
    make: Callable[[], Step]


def trained(model: Any, optimizer: Any, loss_of: LossOf) -> Step:
    """A step of forward, gradients cleared, backward, update."""
    optimizer.setup(model)

    def step(size: int) -> None:
        optimizer.update(lambda: loss_of(size))

    return step


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def labels(*shape: int, classes: int) -> Any:
    return np.random.default_rng(1).integers(0, classes, shape, dtype=np.int32)


def momentum() -> Any:
    return chainer.optimizers.MomentumSGD(lr=1e-4)


def adam() -> Any:
    return chainer.optimizers.Adam(alpha=1e-4)


# -- images ------------------------------------------------------------------------------------


def residual(blocks: int = 12, channels: int = 32, pixels: int = 32) -> Step:
    model = chainer.Sequential(*[ResidualBlock(channels, 0.0) for _ in range(blocks)])

    def loss(size: int) -> Any:
        y = model(normal(size, channels, pixels, pixels))
        return F.mean(y * y)

    return trained(model, momentum(), loss)


def resnet50(pixels: int = 64) -> Step:
    model = L.ResNet50Layers(pretrained_model=None)

    def loss(size: int) -> Any:
        y = model(normal(size, 3, pixels, pixels), layers=["fc6"])["fc6"]
        return F.softmax_cross_entropy(y, labels(size, classes=1000))

    return trained(model, momentum(), loss)


def vgg16(pixels: int = 32) -> Step:
    model = L.VGG16Layers(pretrained_model=None)
    del model.fc6
    with model.init_scope():
        model.fc6 = L.Linear(512 * (pixels // 32) ** 2, 4096)  # not for 224 pixels

    def loss(size: int) -> Any:
        y = model(normal(size, 3, pixels, pixels), layers=["fc8"])["fc8"]
        return F.softmax_cross_entropy(y, labels(size, classes=1000))

    return trained(model, momentum(), loss)


def unet(pixels: int = 64, base: int = 16) -> Step:
    widths = [base << level for level in range(4)]
    down = [TwoConvolutions(a, b) for a, b in zip([1, *widths], widths, strict=False)]
    lift = [L.Deconvolution2D(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])]
    up = [TwoConvolutions(2 * w, w) for w in reversed(widths[:-1])]
    score = L.Convolution2D(base, 2, 1)
    model = chainer.ChainList(*down, *lift, *up, score)

    def loss(size: int) -> Any:
        y, skips = normal(size, 1, pixels, pixels), []
        for level, part in enumerate(down):
            y = part(F.max_pooling_2d(y, 2) if level else y)
            skips.append(y)
        for raised, part, skip in zip(lift, up, reversed(skips[:-1]), strict=True):
            y = part(F.concat((skip, raised(y))))
        return F.softmax_cross_entropy(score(y), labels(size, pixels, pixels, classes=2))

    return trained(model, adam(), loss)


def densenet(pixels: int = 32, growth: int = 12, layers: int = 6) -> Step:
    channels = 24
    first = L.Convolution2D(3, channels, 3, pad=1, nobias=True)
    parts = []
    for stage in range(3):
        for _ in range(layers):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if stage < 2:
            parts.append(L.Convolution2D(channels, channels // 2, 1, nobias=True))
            channels //= 2
    last = L.Linear(channels, 10)
    model = chainer.ChainList(first, *parts, last)

    def loss(size: int) -> Any:
        y = first(normal(size, 3, pixels, pixels))
        for part in parts:
            dense = isinstance(part, DenseLayer)
            y = F.concat((y, part(y))) if dense else F.average_pooling_2d(part(y), 2)
        return F.softmax_cross_entropy(last(F.mean(y, axis=(2, 3))), labels(size, classes=10))

    return trained(model, momentum(), loss)


def gan(pixels: int = 32, width: int = 64) -> Step:
    """DCGAN: a generator and a discriminator, each with its optimizer."""
    side = pixels // 8
    make = chainer.Sequential(
        L.Linear(100, 4 * width * side**2),
        lambda x: F.reshape(x, (-1, 4 * width, side, side)),
        L.BatchNormalization(4 * width),
        F.relu,
        L.Deconvolution2D(4 * width, 2 * width, 4, 2, 1),
        L.BatchNormalization(2 * width),
        F.relu,
        L.Deconvolution2D(2 * width, width, 4, 2, 1),
        L.BatchNormalization(width),
        F.relu,
        L.Deconvolution2D(width, 3, 4, 2, 1),
        F.tanh,
    )
    judge = chainer.Sequential(
        L.Convolution2D(3, width, 4, 2, 1),
        F.leaky_relu,
        L.Convolution2D(width, 2 * width, 4, 2, 1),
        L.BatchNormalization(2 * width),
        F.leaky_relu,
        L.Convolution2D(2 * width, 4 * width, 4, 2, 1),
        L.BatchNormalization(4 * width),
        F.leaky_relu,
        L.Linear(4 * width * side**2, 1),
    )
    optimizers = adam().setup(make), adam().setup(judge)

    def step(size: int) -> None:
        fake = make(normal(size, 100))
        judged = judge(fake)
        optimizers[0].update(lambda: F.mean(F.softplus(-judged)))
        fake.unchain_backward()
        real = judge(normal(size, 3, pixels, pixels))
        optimizers[1].update(lambda: F.mean(F.softplus(judge(fake))) + F.mean(F.softplus(-real)))

    return step


def autoencoder(pixels: int = 32) -> Step:
    model = chainer.Sequential(
        L.Convolution2D(3, 32, 3, 2, 1),
        F.elu,
        L.Convolution2D(32, 64, 3, 2, 1),
        F.elu,
        L.Linear(64 * (pixels // 4) ** 2, 128),
        F.sigmoid,
        L.Linear(128, 64 * (pixels // 4) ** 2),
        F.elu,
        lambda x: F.reshape(x, (-1, 64, pixels // 4, pixels // 4)),
        L.Deconvolution2D(64, 32, 4, 2, 1),
        F.elu,
        L.Deconvolution2D(32, 3, 4, 2, 1),
    )

    def loss(size: int) -> Any:
        x = normal(size, 3, pixels, pixels)
        return F.mean_squared_error(model(x), x)

    return trained(model, chainer.optimizers.RMSprop(lr=1e-4), loss)


# -- sequences ---------------------------------------------------------------------------------


def transformer(layers: int = 4, width: int = 128, length: int = 64) -> Step:
    model = chainer.Sequential(
        *[TransformerLayer(width, 4) for _ in range(layers)],
        lambda x: F.reshape(x, (-1, width)),
        L.Linear(width, 100),
    )

    def loss(size: int) -> Any:
        y = model(normal(size, length, width))
        return F.softmax_cross_entropy(y, labels(size * length, classes=100))

    return trained(model, adam(), loss)


def recurrent(cell: Any, width: int = 256, length: int = 40) -> Step:
    model = chainer.Sequential(cell(width, width), L.Linear(width, 8))

    def loss(size: int) -> Any:
        model[0].reset_state()
        return sum(F.mean(model(x) ** 2) for x in normal(length, size, width))

    return trained(model, chainer.optimizers.SGD(lr=1e-4), loss)


def unrolled(length: int = 129, width: int = 128) -> Step:
    """An LSTM with a loss at each word: 3,224 operations."""
    cell, score = L.StatelessLSTM(width, width), L.Linear(width, 8)

    def loss(size: int) -> Any:
        c, h = normal(2, size, width)
        total: Any = 0
        for x in normal(length, size, width):
            c, h = cell(c, h, x)
            total += F.mean(score(h) ** 2)
        return total

    return trained(chainer.ChainList(cell, score), adam(), loss)


def language_model(words: int = 4000, width: int = 128, length: int = 32) -> Step:
    model = chainer.Sequential(
        L.EmbedID(words, width),
        F.dropout,
        lambda x: F.reshape(x, (-1, width)),
        L.Linear(width, words),
    )

    def loss(size: int) -> Any:
        text = labels(size, length + 1, classes=words)
        return F.softmax_cross_entropy(model(text[:, :-1]), text[:, 1:].ravel())

    return trained(model, adam(), loss)


def gelu(x: Any) -> Any:
    return x * F.sigmoid(1.702 * x)


class MixerLayer(chainer.Chain):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.wide1, self.narrow1 = L.Linear(patches, 128), L.Linear(128, patches)
            self.wide2, self.narrow2 = L.Linear(width, 256), L.Linear(256, width)

    def forward(self, x: Any) -> Any:
        rows = F.reshape(self.norm1(F.reshape(x, (-1, x.shape[2]))), x.shape)
        mixed = self.narrow1(gelu(self.wide1(F.swapaxes(rows, 1, 2), n_batch_axes=2)), 2)
        x = x + F.swapaxes(mixed, 1, 2)
        rows = F.reshape(self.norm2(F.reshape(x, (-1, x.shape[2]))), x.shape)
        return x + self.narrow2(gelu(self.wide2(rows, n_batch_axes=2)), n_batch_axes=2)


def mixer(patches: int = 64, width: int = 128) -> Step:
    model = chainer.Sequential(
        *[MixerLayer(patches, width) for _ in range(4)],
        lambda x: F.mean(x, axis=1),
        L.Linear(width, 10),
    )

    def loss(size: int) -> Any:
        return F.softmax_cross_entropy(
            model(normal(size, patches, width)), labels(size, classes=10)
        )

    return trained(model, chainer.optimizers.AdamW(alpha=1e-4), loss)


def mlp(width: int = 1024) -> Step:
    model = chainer.Sequential(
        L.Linear(784, width),
        F.relu,
        F.dropout,
        L.Linear(width, width),
        F.relu,
        F.dropout,
        L.Linear(width, 10),
    )

    def loss(size: int) -> Any:
        return F.softmax_cross_entropy(model(normal(size, 784)), labels(size, classes=10))

    return trained(model, adam(), loss)


MODELS = (
    Model("residual", "MomentumSGD", residual),
    Model("ResNet50", "MomentumSGD", resnet50),
    Model("VGG16", "MomentumSGD", vgg16),
    Model("U-Net", "Adam", unet),
    Model("DenseNet", "MomentumSGD", densenet),
    Model("DCGAN", "Adam, two", gan),
    Model("autoencoder", "RMSprop", autoencoder),
    Model("transformer", "Adam", transformer),
    Model("LSTM", "SGD", lambda: recurrent(L.LSTM)),
    Model("GRU", "SGD", lambda: recurrent(L.StatefulGRU)),
    Model("language model", "Adam", language_model),
    Model("mixer", "AdamW", mixer),
    Model("MLP", "Adam", mlp),
)
QUICK = (
    Model("small residual", "MomentumSGD", lambda: residual(3, 8, 16)),
    Model("small MLP", "Adam", lambda: mlp(256)),
)
LONG = Model("unrolled LSTM", "Adam", unrolled)
"""Not among `MODELS`: it is long, and there to be waited for."""
