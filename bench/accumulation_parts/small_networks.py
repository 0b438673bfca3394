"""Twenty-two small networks with the losses that programs train them by, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

CLASSES, WIDTH = 5, 12
Draw = np.random.RandomState
Loss = Callable[..., Any]


class Trained(NamedTuple):
    """A network, its loss, the arguments of that for one batch, and what ``weight=`` it needs."""

    model: Any
    loss: Loss
    batch: tuple[Any, ...]
    weight: Loss | None = None


class Network(NamedTuple):
    """Its name, what its loss is, and how it is made: of a generator, samples and a type."""

    name: str
    loss: str
    make: Callable[[Draw, int, Any], Trained]


def dense(*sizes: int, ratio: float = 0.0) -> Any:
    layers: list[Any] = []
    for a, b in pairwise(sizes):
        layers += [L.Linear(a, b), F.tanh]
        if ratio:
            layers.append(lambda x: F.dropout(x, ratio))
    return chainer.Sequential(*layers[:-1] if not ratio else layers[:-2])


def labels(draw: Draw, *shape: int, ignored: float = 0.0) -> Any:
    t = draw.randint(0, CLASSES, shape).astype("i")
    t[draw.rand(*shape) < ignored] = -1
    return t


def floats(draw: Draw, dtype: Any, *shape: int) -> Any:
    return draw.randn(*shape).astype(dtype)


# -- samples that are rows ------------------------------------------------------------------------


def perceptron(draw: Draw, n: int, dtype: Any, ratio: float = 0.0) -> Trained:
    model = dense(6, WIDTH, WIDTH, CLASSES, ratio=ratio)
    batch = floats(draw, dtype, n, 6), labels(draw, n, ignored=0.3)
    return Trained(model, lambda x, t: F.softmax_cross_entropy(model(x), t), batch)


def with_dropout(draw: Draw, n: int, dtype: Any) -> Trained:
    return perceptron(draw, n, dtype, 0.4)


def many_labels(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, CLASSES)
    t = draw.randint(-1, 2, (n, CLASSES)).astype("i")
    return Trained(
        model, lambda x, t: F.sigmoid_cross_entropy(model(x), t), (floats(draw, dtype, n, 6), t)
    )


def regression(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, 3)
    batch = floats(draw, dtype, n, 6), floats(draw, dtype, n, 3)
    return Trained(model, lambda x, y: F.mean(F.huber_loss(model(x), y, 1.0)), batch)


def margin(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, CLASSES)
    batch = floats(draw, dtype, n, 6), labels(draw, n)
    return Trained(model, lambda x, t: F.hinge(model(x), t, "L2"), batch)


def pairs(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, 4)
    batch = floats(draw, dtype, n, 6), floats(draw, dtype, n, 6), draw.randint(0, 2, n).astype("i")
    return Trained(model, lambda x, y, t: F.contrastive(model(x), model(y), t), batch)


def triplets(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, 4)
    batch = tuple(floats(draw, dtype, n, 6) for _ in range(3))
    return Trained(model, lambda a, p, q: F.triplet(model(a), model(p), model(q), 1.0), batch)


def several_tasks(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, CLASSES + 2)

    def loss(x: Any, t: Any, y: Any) -> Any:
        h = model(x)
        penalty = F.sum(model[0].W ** 2)
        return (
            F.softmax_cross_entropy(h[:, :CLASSES], t)
            + 0.3 * F.mean_squared_error(h[:, CLASSES:], y)
            + 0.01 * penalty
        )

    batch = floats(draw, dtype, n, 6), labels(draw, n, ignored=0.5), floats(draw, dtype, n, 2)
    return Trained(model, loss, batch)


def autoencoder(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(8, 4, 8)
    return Trained(
        model, lambda x: F.mean_absolute_error(model(x), x), (floats(draw, dtype, n, 8),)
    )


def variational(draw: Draw, n: int, dtype: Any) -> Trained:
    model = chainer.Sequential(L.Linear(8, 6))
    decode = L.Linear(3, 8)
    model.append(decode)

    def loss(x: Any, eps: Any) -> Any:
        mean, ln_var = F.split_axis(model[0](x), 2, 1)
        y = decode(mean + F.exp(ln_var / 2) * eps)
        bits = (x > 0).astype("i")
        return (
            F.bernoulli_nll(bits.astype(x.dtype), y) + F.gaussian_kl_divergence(mean, ln_var)
        ) / len(x)

    batch = floats(draw, dtype, n, 8), floats(draw, dtype, n, 3)
    return Trained(model, loss, batch, lambda x, eps: len(x))


def weighted(draw: Draw, n: int, dtype: Any) -> Trained:
    model = dense(6, WIDTH, 1)

    def loss(x: Any, y: Any, w: Any) -> Any:
        return F.average((model(x)[:, 0] - y) ** 2, weights=w)

    batch = floats(draw, dtype, n, 6), floats(draw, dtype, n), draw.rand(n).astype(dtype)
    return Trained(model, loss, batch)


# -- samples that are images ----------------------------------------------------------------------


def convolutions(draw: Draw, n: int, dtype: Any, norm: Any = None) -> Trained:
    model = chainer.Sequential(L.Convolution2D(2, 6, 3, pad=1), F.relu)
    if norm is not None:
        model.insert(1, norm())
    model.extend([lambda x: F.max_pooling_2d(x, 2), L.Linear(6 * 9, CLASSES)])
    batch = floats(draw, dtype, n, 2, 6, 6), labels(draw, n)
    return Trained(model, lambda x, t: F.softmax_cross_entropy(model(x), t, normalize=False), batch)


def group_normalised(draw: Draw, n: int, dtype: Any) -> Trained:
    return convolutions(draw, n, dtype, lambda: L.GroupNormalization(3))


def residual(draw: Draw, n: int, dtype: Any) -> Trained:
    model = chainer.ChainList(*(L.Convolution2D(4, 4, 3, pad=1) for _ in range(4)), L.Linear(4, 5))

    def loss(x: Any, t: Any) -> Any:
        for layer in [*model][:-1]:
            x = x + F.local_response_normalization(F.relu(layer(x)))
        return F.softmax_cross_entropy([*model][-1](F.mean(x, axis=(2, 3))), t)

    return Trained(model, loss, (floats(draw, dtype, n, 4, 5, 5), labels(draw, n, ignored=0.2)))


def segmentation(draw: Draw, n: int, dtype: Any) -> Trained:
    """Pixels of which many have no label, and classes that weigh."""
    down = L.Convolution2D(2, 6, 4, 2, 1)
    up = L.Deconvolution2D(6, CLASSES, 4, 2, 1)
    model = chainer.Sequential(down, F.relu, up)
    importance = np.linspace(0.5, 2, CLASSES).astype(dtype)
    batch = floats(draw, dtype, n, 2, 6, 6), labels(draw, n, 6, 6, ignored=0.4)
    batch[1][: n // 3] = -1
    return Trained(
        model, lambda x, t: F.softmax_cross_entropy(model(x), t, class_weight=importance), batch
    )


def detector(draw: Draw, n: int, dtype: Any) -> Trained:
    """Both terms are divided by the boxes that were found, as of SSD."""
    model = dense(6, WIDTH, 4 * (2 + 4))

    def loss(x: Any, is_box: Any, where: Any) -> Any:
        y = model(x).reshape(-1, 4, 6)
        found = max(1, int(is_box.sum()))
        kind = F.softmax_cross_entropy(y[:, :, :2].reshape(-1, 2), is_box.ravel(), reduce="no")
        place = F.huber_loss(y[:, :, 2:].reshape(-1, 4), where.reshape(-1, 4), 1.0)
        return F.sum(kind) / found + F.sum(place * is_box.ravel().astype(x.dtype)) / found

    is_box = (draw.rand(n, 4) < 0.2).astype("i")
    batch = floats(draw, dtype, n, 6), is_box, floats(draw, dtype, n, 4, 4)
    return Trained(model, loss, batch, lambda x, is_box, where: is_box.sum())


# -- samples that are sequences -------------------------------------------------------------------


class Attention(chainer.Chain):
    """One head over tokens, with normalised layers around it."""

    def __init__(self, words: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        with self.init_scope():
            self.embed = L.EmbedID(words, WIDTH)
            self.query_key_value = L.Linear(WIDTH, 3 * WIDTH)
            self.norm = L.LayerNormalization(WIDTH)
            self.out = L.Linear(WIDTH, words)

    def __call__(self, x: Any) -> Any:
        n, length = x.shape
        h = self.embed(x)
        q, k, v = F.split_axis(self.query_key_value(h, n_batch_axes=2), 3, 2)
        scores = F.matmul(q, k, transb=True) / WIDTH**0.5
        if self.causal:
            scores += np.triu(np.full((length, length), -1e4), 1).astype(scores.dtype)
        h = h + F.matmul(F.softmax(scores, axis=2), v)
        return self.out(self.norm(h.reshape(n * length, WIDTH)))


def language_model(draw: Draw, n: int, dtype: Any) -> Trained:
    """Rows are padded: their last words have no label."""
    model = Attention(9, causal=True)
    x, t = draw.randint(0, 9, (n, 7)).astype("i"), draw.randint(0, 9, (n, 7)).astype("i")
    for row, length in zip(t, draw.randint(1, 8, n), strict=True):
        row[length:] = -1
    return Trained(model, lambda x, t: F.softmax_cross_entropy(model(x), t.ravel()), (x, t))


def masked_language_model(draw: Draw, n: int, dtype: Any) -> Trained:
    """Three words in twenty have a label; a row may have none."""
    model = Attention(9, causal=False)
    x = draw.randint(0, 9, (n, 7)).astype("i")
    t = np.where(draw.rand(n, 7) < 0.15, x, -1).astype("i")
    t[0, 0] = 1
    return Trained(model, lambda x, t: F.softmax_cross_entropy(model(x), t.ravel()), (x, t))


def with_next_sentence(draw: Draw, n: int, dtype: Any) -> Trained:
    """A mean over words and one over rows."""
    model, _, (x, t), _ = masked_language_model(draw, n, dtype)

    def loss(x: Any, t: Any, follows: Any) -> Any:
        y = model(x)
        first = y.reshape(len(x), -1, 9)[:, 0, :2]
        return F.softmax_cross_entropy(y, t.ravel()) + F.softmax_cross_entropy(first, follows)

    return Trained(model, loss, (x, t, draw.randint(0, 2, n).astype("i")))


def unrolled(draw: Draw, n: int, dtype: Any) -> Trained:
    """A loss a time step, each divided by its own labels, added up."""
    model = chainer.ChainList(L.StatelessLSTM(4, WIDTH), L.Linear(WIDTH, CLASSES))

    def loss(x: Any, t: Any) -> Any:
        c = h = None
        total = 0.0
        for at in range(x.shape[1]):
            c, h = model[0](c, h, x[:, at])
            total += F.softmax_cross_entropy(model[1](h), t[:, at])
        return total

    batch = floats(draw, dtype, n, 6, 4), labels(draw, n, 6, ignored=0.4)
    return Trained(model, loss, batch)


def ragged(draw: Draw, n: int, dtype: Any) -> Trained:
    """Sequences of many lengths as lists, the loss a mean over samples of sums over words."""
    model = chainer.ChainList(L.NStepGRU(1, 4, WIDTH, 0.0), L.Linear(WIDTH, CLASSES))

    def loss(xs: Any, ts: Any) -> Any:
        _, ys = model[0](None, list(xs))
        losses = [
            F.sum(F.softmax_cross_entropy(model[1](y), t, reduce="no"))
            for y, t in zip(ys, ts, strict=True)
        ]
        return F.mean(F.stack(losses))

    lengths = draw.randint(1, 7, n)
    xs = [floats(draw, dtype, length, 4) for length in lengths]
    return Trained(model, loss, (xs, [labels(draw, length) for length in lengths]))


def speech(draw: Draw, n: int, dtype: Any) -> Trained:
    model = L.Linear(4, CLASSES)

    def loss(x: Any, t: Any) -> Any:
        ys = [model(x[:, at]) for at in range(x.shape[1])]
        return F.connectionist_temporal_classification(ys, t, 0)

    t = draw.randint(1, CLASSES, (n, 3)).astype("i")
    return Trained(model, loss, (floats(draw, dtype, n, 8, 4), t))


NETWORKS = (
    Network("perceptron", "mean of valid labels", perceptron),
    Network("perceptron, dropout", "mean of valid labels", with_dropout),
    Network("many labels", "mean of valid bits", many_labels),
    Network("regression", "Huber, mean", regression),
    Network("margin", "squared hinge", margin),
    Network("pairs", "contrastive", pairs),
    Network("triplets", "triplet", triplets),
    Network("several tasks", "two means and a penalty", several_tasks),
    Network("autoencoder", "mean absolute error", autoencoder),
    Network("variational autoencoder", "two sums by len(x)", variational),
    Network("weighted regression", "weighted average", weighted),
    Network("convolutions", "sum by samples", convolutions),
    Network("group normalisation", "sum by samples", group_normalised),
    Network("residual", "mean of valid labels", residual),
    Network("segmentation", "class weights, mean of valid pixels", segmentation),
    Network("detector", "two sums by boxes found", detector),
    Network("language model", "mean of words that are no padding", language_model),
    Network("masked language model", "mean of masked words", masked_language_model),
    Network("masked, next sentence", "a mean of words, one of rows", with_next_sentence),
    Network("LSTM, unrolled", "sum of six means", unrolled),
    Network("GRU, lists", "mean of sums", ragged),
    Network("speech", "CTC, mean", speech),
)
