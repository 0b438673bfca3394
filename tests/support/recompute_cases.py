"""Models and data for the tests of planned recomputation, and what a training run leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import umem.chainer  # noqa: F401  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer import GCN, Adjacency
from umem.graphs import normalised_adjacency, rmat


class Mlp(chainer.ChainList):
    def __init__(self) -> None:
        super().__init__(*(L.Linear(16, 16) for _ in range(8)))

    def loss(self, x: Any, t: Any) -> Any:
        for layer in self:
            x = F.tanh(layer(x))
        return F.softmax_cross_entropy(x, t)


class Branching(Mlp):
    """Layers whose number changes with the step."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = list(lengths)

    def loss(self, x: Any, t: Any) -> Any:
        for _ in range(self.lengths.pop(0)):
            for layer in self:
                x = F.tanh(layer(x))
        return F.softmax_cross_entropy(x, t)


class Block(chainer.Chain):
    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(width, width, 3, pad=1, nobias=True)
            self.norm = L.BatchNormalization(width)

    def forward(self, h: Any) -> Any:
        return h + F.dropout(F.relu(self.norm(self.conv(h))), 0.1)


class Residual(chainer.Chain):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.blocks = chainer.ChainList(*(Block(8) for _ in range(blocks)))
            self.out = L.Linear(8, 10)

    def loss(self, x: Any, t: Any) -> Any:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return F.softmax_cross_entropy(self.out(F.mean(h, axis=(2, 3))), t)


class Deep(Residual):
    """Twelve blocks."""

    def __init__(self) -> None:
        super().__init__(12)


class UNet(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a = L.Convolution2D(3, 4, 3, pad=1)
            self.b = L.Convolution2D(4, 8, 3, pad=1)
            self.c = L.Convolution2D(8, 8, 3, pad=1)
            self.up = L.Deconvolution2D(8, 8, 2, stride=2)
            self.d = L.Convolution2D(16, 4, 3, pad=1)
            self.e = L.Convolution2D(8, 10, 3, pad=1)

    def loss(self, x: Any, t: Any) -> Any:
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.max_pooling_2d(a, 2)))
        c = F.relu(self.c(F.max_pooling_2d(b, 2)))
        h = F.relu(self.d(F.concat([self.up(c), b])))
        h = self.e(F.concat([F.unpooling_2d(h, 2, cover_all=False), a]))
        return F.softmax_cross_entropy(F.mean(h, axis=(2, 3)), t)


class Dense(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.norms = chainer.ChainList(*(L.BatchNormalization(4 + 4 * i) for i in range(5)))
            self.convs = chainer.ChainList(
                *(L.Convolution2D(4 + 4 * i, 4, 3, pad=1) for i in range(5))
            )
            self.first = L.Convolution2D(3, 4, 1)
            self.out = L.Linear(24, 10)

    def loss(self, x: Any, t: Any) -> Any:
        h = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = F.concat([h, conv(F.relu(norm(h)))])
        return F.softmax_cross_entropy(self.out(F.mean(h, axis=(2, 3))), t)


class Recurrent(chainer.Chain):
    """State is kept across steps, and cut."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(30, 8)
            self.cell = L.LSTM(8, 12)
            self.out = L.Linear(12, 10)

    def loss(self, words: Any, t: Any) -> Any:
        if self.cell.h is not None:
            self.cell.h.unchain_backward()
            self.cell.c.unchain_backward()
        total = 0
        for column in range(words.shape[1]):
            h = self.cell(self.embed(words[:, column]))
            total += F.softmax_cross_entropy(self.out(h), t)
        return total


class Transformer(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.qkv = chainer.ChainList(*(L.Linear(12, 12) for _ in range(6)))
            self.mixed = chainer.ChainList(*(L.Linear(12, 12) for _ in range(2)))
            self.norms = chainer.ChainList(*(L.LayerNormalization(12) for _ in range(4)))
            self.wide = chainer.ChainList(*(L.Linear(12, 24) for _ in range(2)))
            self.narrow = chainer.ChainList(*(L.Linear(24, 12) for _ in range(2)))
            self.out = L.Linear(12, 10)

    def attend(self, i: int, h: Any) -> Any:
        def heads(y: Any) -> Any:
            return F.transpose(F.reshape(y, (*h.shape[:2], 3, 4)), (0, 2, 1, 3))

        q, k, v = (heads(self.qkv[3 * i + j](h, n_batch_axes=2)) for j in range(3))
        weights = F.softmax(F.matmul(q, k, transb=True) * 0.5, axis=3)
        mixed = F.transpose(F.matmul(F.dropout(weights, 0.1), v), (0, 2, 1, 3))
        return self.mixed[i](F.reshape(mixed, h.shape), n_batch_axes=2)

    def normal(self, i: int, h: Any) -> Any:
        return F.reshape(self.norms[i](F.reshape(h, (-1, 12))), h.shape)

    def loss(self, x: Any, t: Any) -> Any:
        h = chainer.as_variable(x)
        for i in range(2):
            h = self.normal(2 * i, h + self.attend(i, h))
            wide = F.relu(self.wide[i](h, n_batch_axes=2))
            h = self.normal(2 * i + 1, h + self.narrow[i](wide, n_batch_axes=2))
        return F.softmax_cross_entropy(self.out(F.mean(h, axis=1)), t)


class Graphs(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        self.adjacency = Adjacency(normalised_adjacency(rmat(80, 400, 12, 10, seed=1)))
        with self.init_scope():
            self.net = GCN(12, 16, 16, layers=3, dropout=0.2)
            self.out = L.Linear(16, 10)

    def loss(self, x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(self.out(F.relu(self.net(self.adjacency, x))), t)


class Shared(chainer.Chain):
    """One layer many times, and a value with many users."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.times = times
        with self.init_scope():
            self.layer = L.Linear(16, 16)
            self.norm = L.BatchNormalization(16)

    def loss(self, x: Any, t: Any) -> Any:
        h = F.sigmoid(self.layer(x))
        total = h
        for _ in range(self.times):
            total = F.tanh(self.norm(self.layer(total))) + h * total
        return F.softmax_cross_entropy(total + h, t)


class OldStyle(chainer.Function):
    """Keeps an array on itself, as functions of Chainer 1 do."""

    def forward(self, inputs: Any) -> Any:
        self.y = np.exp(-inputs[0])
        return (self.y * inputs[0],)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return (grads[0] * self.y * (1 - inputs[0]),)


class Odd(chainer.Chain):
    """Several outputs, views, an old-style function, several losses."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(16, 24)
            self.gate = L.Linear(8, 12)
            self.out = L.Linear(12, 10)

    def loss(self, x: Any, t: Any) -> Any:
        a, b, c = F.split_axis(self.layer(x), 3, axis=1)
        h = OldStyle()(a + F.broadcast_to(F.mean(b, axis=0, keepdims=True), b.shape))
        h = F.transpose(F.reshape(F.transpose(h), (4, 2, -1)), (2, 0, 1))
        h = F.reshape(h, (len(x), 8)) * c[:, ::-1]
        state, h = F.lstm(F.expand_dims(h, 0)[0][:, :3], self.gate(h))
        return F.softmax_cross_entropy(self.out(F.concat([h] * 4)), t) + F.mean(state**2)


def rows(rng: Any) -> Any:
    return rng.standard_normal((12, 16), dtype=np.float32)


def images(rng: Any) -> Any:
    return rng.standard_normal((6, 3, 8, 8), dtype=np.float32)


def larger(rng: Any) -> Any:
    return rng.standard_normal((8, 3, 20, 20), dtype=np.float32)


def words(rng: Any) -> Any:
    return rng.integers(0, 30, (7, 6)).astype(np.int32)


def sequences(rng: Any) -> Any:
    return rng.standard_normal((5, 7, 12), dtype=np.float32)


def features(rng: Any) -> Any:
    return rng.standard_normal((80, 12), dtype=np.float32)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "mlp": (Mlp, rows),
    "residual": (Residual, images),
    "u-net": (UNet, images),
    "dense": (Dense, images),
    "lstm": (Recurrent, words),
    "transformer": (Transformer, sequences),
    "gcn": (Graphs, features),
    "shared": (Shared, rows),
    "odd": (Odd, rows),
}
LONGER: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "4 blocks": (lambda: Residual(4), images),
    "4 times shared": (lambda: Shared(4), rows),
}
"""Whose plans of least bytes take seconds to find."""


def backward(model: Any, x: Any, t: Any) -> Any:
    """The usual step, up to the update."""
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward()
    return loss


def train(
    name: str | Callable[[], Any],
    memory: Any = None,
    steps: int = 6,
    step: Callable[..., Any] = backward,
    optimizer: Any = chainer.optimizers.Adam,
    data: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Train, and give every number there is: losses, parameters, gradients, statistics."""
    make, usual = {**MODELS, **LONGER}[name] if isinstance(name, str) else (name, rows)
    np.random.seed(0)
    model = make()
    rng = np.random.default_rng(1)
    rule = optimizer().setup(model)
    found: dict[str, Any] = {}
    with memory or nullcontext():
        for number in range(steps):
            x = (data or usual)(rng)
            if x.dtype == np.float32:
                x = x.astype(chainer.get_dtype(map_mixed16=np.float16))
            t = rng.integers(0, 10, len(x)).astype(np.int32)
            loss = step(model, x, t)
            found[f"loss {number}"] = np.array(loss.array)
            for key, p in sorted(model.namedparams()):
                found[f"{key}.grad {number}"] = None if p.grad is None else p.grad.copy()
            rule.update()
            for key, p in sorted(model.namedparams()):
                found[f"{key} {number}"] = p.array.copy()
            del loss
    for key, link in sorted(model.namedlinks()):
        for persistent in sorted(link._persistent):
            found[f"{key}.{persistent}"] = np.array(getattr(link, persistent))
    found["random"] = np.array(np.random.rand())
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that every number is equal, bit for bit."""
    assert found.keys() == expected.keys()
    different = [
        key
        for key, value in expected.items()
        if (value is None) != (found[key] is None)
        or (value is not None and value.tobytes() != found[key].tobytes())
    ]
    assert not different


def planned(memory: Any) -> list[Any]:
    """The graphs that have a plan."""
    return [seen for seen in memory.graphs if seen.plan is not None]
