"""Networks at small sizes, up to what a loss is given, such that onnx_chainer can export them.

`F.softmax_cross_entropy` and `F.mean_squared_error` give back their first argument meanwhile: the
graph ends before the loss, as it does in what other frameworks export. onnx_chainer has no LSTM,
no layer normalisation and no stateful links: those are written in elementary functions. A linear
link without a bias it writes with one of zeros for each use, so that all of them have one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
from models.catalogue import build
from models.model import labels, normal


class Network(chainer.Chain):
    """A link, and what is computed with it from arrays.

    Attributes:
        inputs: the arrays.
        optimizer: by Chainer's name.
    """

    def __init__(
        self, link: Any, run: Callable[..., Any], inputs: tuple[Any, ...], optimizer: str = "Adam"
    ) -> None:
        super().__init__()
        self.run, self.inputs, self.optimizer = run, inputs, optimizer
        with self.init_scope():
            self.link = link

    def forward(self, *inputs: Any) -> Any:
        with without_loss():
            return self.run(*inputs)


@contextmanager
def without_loss() -> Iterator[None]:
    """Losses give back their first argument."""

    def first(y: Any, t: Any) -> Any:
        return y

    with mock.patch.multiple(F, softmax_cross_entropy=first, mean_squared_error=first):
        yield


def known(name: str, size: str, batch: int) -> Network:
    """A network of bench/models/; its second input, a loss's target, is left out."""
    model = build(name, size)
    x, *targets = model.inputs(batch)
    return Network(model.link, lambda h: model.loss(h, *targets), (x,), model.optimizer)


def dcgan() -> Network:
    model = build("DCGAN", "32 px")
    noise, images = model.inputs(16)
    return Network(model.link, lambda h: model.loss(h, images), (noise,), model.optimizer)


def autoencoder() -> Network:
    model = build("autoencoder", "32 px")
    (x,) = model.inputs(16)
    return Network(model.link, model.loss, (x,))


# -- sequences -------------------------------------------------------------------------------------


def unrolled(cell: Any, score: Any, states: Callable[..., Any]) -> Network:
    """A cell through 20 words, and a score of the last."""

    def run(words: Any) -> Any:
        state: Any = None
        for x in F.separate(words, axis=0):
            state = states(x, state)
        return score(state[-1])

    return Network(chainer.ChainList(cell, score), run, (normal(20, 16, 64),), "MomentumSGD")


def gru() -> Network:

    wx, wh = L.Linear(64, 3 * 128), L.Linear(128, 3 * 128)

    def step(x: Any, state: Any) -> Any:
        h = (
            F.broadcast_to(chainer.Variable(normal(1, 128)), (16, 128))
            if state is None
            else state[0]
        )
        xr, xz, xn = F.split_axis(wx(x), 3, axis=1)
        hr, hz, hn = F.split_axis(wh(h), 3, axis=1)
        z = F.sigmoid(xz + hz)
        return ((1 - z) * F.tanh(xn + F.sigmoid(xr + hr) * hn) + z * h,)

    return unrolled(chainer.ChainList(wx, wh), L.Linear(128, 8), step)


def lstm() -> Network:
    wx, wh = L.Linear(64, 4 * 128), L.Linear(128, 4 * 128)

    def step(x: Any, state: Any) -> Any:
        gates = wx(x) if state is None else wx(x) + wh(state[1])
        a, i, f, o = F.split_axis(gates, 4, axis=1)
        c = F.tanh(a) * F.sigmoid(i)
        if state is not None:
            c += F.sigmoid(f) * state[0]
        return c, F.sigmoid(o) * F.tanh(c)

    return unrolled(chainer.ChainList(wx, wh), L.Linear(128, 8), step)


class Normalisation(chainer.Chain):
    """Layer normalisation in elementary functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.gamma = chainer.Parameter(1, (width,))
            self.beta = chainer.Parameter(0, (width,))

    def forward(self, x: Any) -> Any:
        d = x - F.broadcast_to(F.mean(x, axis=1, keepdims=True), x.shape)
        deviation = F.sqrt(F.mean(d * d, axis=1, keepdims=True) + 1e-5)
        y = d / F.broadcast_to(deviation, x.shape)
        return y * F.broadcast_to(self.gamma, x.shape) + F.broadcast_to(self.beta, x.shape)


def transformer() -> Network:
    with mock.patch.object(L, "LayerNormalization", Normalisation):
        return known("transformer", "4 layers", 4)


def language_model() -> Network:
    embed, score = L.EmbedID(4000, 128), L.Linear(128, 4000)

    def run(words: Any) -> Any:
        return score(F.reshape(F.dropout(embed(words)), (-1, 128)))

    return Network(chainer.ChainList(embed, score), run, (labels(8, 32, classes=4000),))


NETWORKS: dict[str, Callable[[], Network]] = {
    "MLP": lambda: known("MLP", "256 wide", 64),
    "residual": lambda: known("residual", "classifier of 4 blocks", 4),
    "ResNet50": lambda: known("ResNet50", "64 px", 4),
    "VGG16": lambda: known("VGG16", "32 px", 4),
    "GoogLeNet": lambda: known("GoogLeNet", "224 px", 2),
    "DenseNet": lambda: known("DenseNet", "18 layers", 4),
    "U-Net": lambda: known("U-Net", "4 levels", 2),
    "DCGAN": dcgan,
    "autoencoder": autoencoder,
    "transformer": transformer,
    "language model": language_model,
    "GRU": gru,
    "LSTM": lstm,
}
