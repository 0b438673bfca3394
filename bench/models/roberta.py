"""RoBERTa in Chainer, with the functions of the published run's framework.

Source of the sizes: the model of Hugging Face's tutorial "How to train a new language model from
scratch" (RoBERTa: 6 layers, 12 heads, hidden 768, vocabulary 52,000, 514 positions, 84 million
parameters; lines of at most 128 tokens).

Automatic mixed precision is that framework's autocast: parameters stay in single precision,
products are taken in half precision, normalisation, softmax and loss in single.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import function_node
from scipy.special import erf

from models.model import Model, Region, call, labels


@dataclass(frozen=True)
class Sizes:
    """Of the network; the defaults are the published run's."""

    layers: int = 6
    width: int = 768
    heads: int = 12
    vocabulary: int = 52_000
    positions: int = 514
    length: int = 128


def by_rows(function: Callable[..., Any], *arrays: Any, rows: int = 64) -> Any:
    """A function of rows, some at a time: a fused kernel needs no memory on the way either."""
    made = np.empty_like(arrays[0])
    for low in range(0, len(made), rows):
        made[low : low + rows] = function(*(array[low : low + rows] for array in arrays))
    return made


class _Gelu(function_node.FunctionNode):
    """x times the normal distribution's probability below x; only x is kept."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        return (by_rows(lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))), *inputs),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        (x,) = self.get_retained_inputs()
        return _GeluGrad().apply((x, gradients[0]))


class _GeluGrad(function_node.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return (by_rows(self._of_rows, *inputs),)

    @staticmethod
    def _of_rows(x: Any, gy: Any) -> Any:
        density = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
        return (0.5 * (1 + erf(x / np.sqrt(2))) + x * density) * gy


def gelu(x: Any) -> Any:
    return _Gelu().apply((x,))[0]


class _LogSoftmax(function_node.FunctionNode):
    """Logarithms of probabilities, which are kept; Chainer's own takes more on the way back."""

    def forward(self, inputs: Any) -> Any:
        self.retain_outputs((0,))
        return (by_rows(self._of_rows, *inputs),)

    @staticmethod
    def _of_rows(x: Any) -> Any:
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    def backward(self, indexes: Any, gradients: Any) -> Any:
        (y,) = self.get_retained_outputs()
        return _LogSoftmaxGrad().apply((y, gradients[0]))


class _LogSoftmaxGrad(function_node.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return (by_rows(lambda y, gy: gy - np.exp(y) * gy.sum(axis=1, keepdims=True), *inputs),)


def cross_entropy(x: Any, targets: Any) -> Any:
    """The mean of what is chosen from the logarithms: two functions, with a gradient each."""
    return -F.mean(F.select_item(_LogSoftmax().apply((x,))[0], targets))


class Precision:
    """Casts, as autocast makes them; each weight is used, and so cast, once in a pass."""

    def __init__(self, autocast: bool) -> None:
        self.autocast = autocast

    def half(self, x: Any) -> Any:
        return F.cast(x, np.float16) if self.autocast else x

    def single(self, x: Any) -> Any:
        return F.cast(x, np.float32) if self.autocast else x

    def linear(self, link: Any, x: Any) -> Any:
        return F.linear(self.half(x), self.half(link.W), self.half(link.b))


class Layer(chainer.Chain):
    """Attention and two products, each followed by dropout, addition and normalisation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        width = sizes.width
        with self.init_scope():
            self.query, self.key = L.Linear(width, width), L.Linear(width, width)
            self.value, self.out = L.Linear(width, width), L.Linear(width, width)
            self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.wide, self.narrow = L.Linear(width, 4 * width), L.Linear(4 * width, width)

    def forward(self, precision: Precision, batch: int, x: Any) -> Any:
        attended = precision.linear(self.out, self._attend(precision, batch, x))
        x = self.norm1(precision.single(F.dropout(attended, 0.1)) + x)
        y = precision.linear(self.narrow, gelu(precision.linear(self.wide, x)))
        return self.norm2(precision.single(F.dropout(y, 0.1)) + x)

    def _attend(self, precision: Precision, batch: int, x: Any) -> Any:
        def heads(y: Any) -> Any:
            y = F.reshape(y, (batch, -1, self.heads, y.shape[1] // self.heads))
            return F.transpose(y, (0, 2, 1, 3))

        query, key, value = (
            heads(precision.linear(link, x)) for link in (self.query, self.key, self.value)
        )
        scores = F.matmul(query, key, transb=True) * query.shape[-1] ** -0.5
        weights = F.dropout(F.softmax(precision.single(scores), axis=3), 0.1)
        y = F.matmul(precision.half(weights), value)
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), x.shape)


class Roberta(chainer.Chain):
    """With the head of masked language modelling, whose weight is that of the words."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        with self.init_scope():
            self.words = L.EmbedID(sizes.vocabulary, width)
            self.places = L.EmbedID(sizes.positions, width)
            self.norm = L.LayerNormalization(width)
            self.layers = chainer.ChainList(*[Layer(sizes) for _ in range(sizes.layers)])
            self.dense, self.dense_norm = L.Linear(width, width), L.LayerNormalization(width)
            self.bias = chainer.Parameter(0, sizes.vocabulary)

    def loss(self, tokens: Any, targets: Any, region: Region = call, autocast: bool = False) -> Any:
        precision = Precision(autocast)
        batch, length = tokens.shape
        places = np.broadcast_to(np.arange(2, length + 2, dtype=np.int32), tokens.shape)
        x = F.reshape(self.words(tokens) + self.places(places), (batch * length, -1))
        x = F.dropout(self.norm(x), 0.1)
        for layer in self.layers:
            x = region(lambda h, layer=layer: layer(precision, batch, h), x)
        x = self.dense_norm(precision.single(gelu(precision.linear(self.dense, x))))
        return cross_entropy(precision.single(self._scores(precision, x)), targets)

    def _scores(self, precision: Precision, x: Any) -> Any:
        words, bias = precision.half(self.words.W), precision.half(self.bias)
        return F.linear(precision.half(x), words, bias)


def roberta(sizes: Sizes) -> Model:
    link = Roberta(sizes)

    def inputs(batch: int) -> tuple[Any, Any]:
        tokens = labels(batch, sizes.length, classes=sizes.vocabulary)
        return tokens, labels(batch * sizes.length, classes=sizes.vocabulary)

    return Model(link, inputs, link.loss, "Adam")


MODELS = {
    "RoBERTa": {
        "6 layers": lambda: roberta(Sizes()),
        "2 narrow layers": lambda: roberta(Sizes(2, 32, 2, 300, 40, 16)),
    }
}
