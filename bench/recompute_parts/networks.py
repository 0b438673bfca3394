"""The networks of bench/recompute.py, each a model and a loss.

A loss takes ``region``: what is called as ``region(function, *variables)`` around each part that
one would checkpoint by hand. `call` is a plain network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import umem.chainer

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L

import umem.graphs

assert umem.chainer

Region = Callable[..., Any]
Loss = Callable[[Region], Any]


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        make: builds the model and its loss, from NumPy's global generator.
        target: the most of the reducible part that "min" may leave; None: not set.
        points: budgets of its own: a share of the raw peak, the most that the step may take.
        forget_is_wrong: why F.forget does not train it right.
        repeats: timed steps of each kind.
        torch: its name in torch_networks.py.
        no_torch: why it is not compared.
    """

    name: str
    make: Callable[[], tuple[Any, Loss, int]]
    target: float | None = None
    points: tuple[tuple[float, float], ...] = ()
    forget_is_wrong: str | None = None
    repeats: int = 5
    torch: str | None = None
    no_torch: str | None = None


def call(function: Callable[..., Any], *variables: Any) -> Any:
    """The region that is none."""
    return function(*variables)


def chain(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Functions one after another."""

    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run


def grouped(region: Region, functions: Sequence[Callable[[Any], Any]], count: int, x: Any) -> Any:
    """Functions one after another, in groups of about equal length."""
    bounds = [index * len(functions) // count for index in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        x = region(chain(functions[low:high]), x)
    return x


def images(batch: int, channels: int, pixels: int) -> Any:
    source = np.random.default_rng(0)
    return source.standard_normal((batch, channels, pixels, pixels), dtype=np.float32)


def labels(*shape: int, classes: int) -> Any:
    return np.random.default_rng(1).integers(0, classes, shape, dtype=np.int32)


def input_bytes(*arrays: Any) -> int:
    return sum(array.nbytes for array in arrays)


# -- residual network --------------------------------------------------------------------------


class ResidualBlock(chainer.Chain):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.conv = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.norm = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


def residual(
    blocks: int = 24, dropout: float = 0.0, channels: int = 32, pixels: int = 32, groups: int = 5
) -> tuple[Any, Loss, int]:
    model = chainer.ChainList(*[ResidualBlock(channels, dropout) for _ in range(blocks)])
    x = images(8, channels, pixels)

    def loss(region: Region) -> Any:
        y = grouped(region, list(model), groups, x)
        return F.mean(y * y)

    return model, loss, input_bytes(x)


# -- chainer.links -----------------------------------------------------------------------------


def resnet50() -> tuple[Any, Loss, int]:
    model = L.ResNet50Layers(pretrained_model=None)
    x, t = images(8, 3, 128), labels(8, classes=1000)
    units = []
    for name, functions in model.functions.items():
        if name.startswith("res"):
            (stage,) = functions
            units += [getattr(stage, part) for part in stage._forward]
        elif name != "prob":
            units += functions

    def loss(region: Region) -> Any:
        head = next(n for n, unit in enumerate(units) if not _is_stem(unit, model))
        y = region(chain(units[:head]), x)
        for unit in units[head : head + 16]:
            y = region(unit, y)
        return F.softmax_cross_entropy(chain(units[head + 16 :])(y), t)

    return model, loss, input_bytes(x, t)


def _is_stem(unit: Any, model: Any) -> bool:
    return not type(unit).__name__.startswith("Bottleneck")


def vgg16(pixels: int = 128) -> tuple[Any, Loss, int]:
    model = L.VGG16Layers(pretrained_model=None)
    del model.fc6
    with model.init_scope():
        model.fc6 = L.Linear(512 * (pixels // 32) ** 2, 4096)  # not for 224
    x, t = images(8, 3, pixels), labels(8, classes=1000)
    stages: list[list[Any]] = [[]]
    for name, functions in model.functions.items():
        if name not in ("fc6", "fc7", "fc8", "prob"):
            stages[-1] += functions
            if name.startswith("pool"):
                stages.append([])

    def loss(region: Region) -> Any:
        y = x
        for stage in stages[:-1]:
            y = region(chain(stage), y)
        y = F.relu(model.fc7(F.relu(model.fc6(y))))  # no dropout: F.forget stands beside it
        return F.softmax_cross_entropy(model.fc8(y), t)

    return model, loss, input_bytes(x, t)


# -- U-Net and DenseNet ------------------------------------------------------------------------


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


def unet(pixels: int = 64, base: int = 16, depth: int = 4) -> tuple[Any, Loss, int]:
    widths = [base << level for level in range(depth + 1)]
    down = [TwoConvolutions(a, b) for a, b in itertools.pairwise([1, *widths])]
    lift = [L.Deconvolution2D(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])]
    up = [TwoConvolutions(2 * w, w) for w in reversed(widths[:-1])]
    score = L.Convolution2D(base, 2, 1)
    model = chainer.ChainList(*down, *lift, *up, score)
    x, t = images(8, 1, pixels), labels(8, pixels, pixels, classes=2)

    def loss(region: Region) -> Any:
        y, skips = x, []
        for level, part in enumerate(down):
            y = region(part, F.max_pooling_2d(y, 2) if level else y)
            skips.append(y)
        for raise_, part in zip(lift, up, strict=True):
            skip = skips[-2]
            del skips[-1]
            y = region(lambda a, b, r=raise_, p=part: p(F.concat((b, r(a)))), y, skip)
        skips.clear()
        return F.softmax_cross_entropy(score(y), t)

    return model, loss, input_bytes(x, t)


class DenseLayer(chainer.Chain):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        with self.init_scope():
            self.norm1 = L.BatchNormalization(channels)
            self.conv1 = L.Convolution2D(channels, 4 * growth, 1, nobias=True)
            self.norm2 = L.BatchNormalization(4 * growth)
            self.conv2 = L.Convolution2D(4 * growth, growth, 3, pad=1, nobias=True)

    def forward(self, x: Any) -> Any:
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


def densenet(pixels: int = 32, growth: int = 12, layers: int = 8) -> tuple[Any, Loss, int]:
    channels, parts = 24, []
    parts.append(L.Convolution2D(3, channels, 3, pad=1, nobias=True))
    for stage in range(3):
        for _ in range(layers):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if stage < 2:
            parts.append(L.Convolution2D(channels, channels // 2, 1, nobias=True))
            channels //= 2
    parts.append(L.BatchNormalization(channels))
    parts.append(L.Linear(channels, 10))
    model = chainer.ChainList(*parts)
    x, t = images(8, 3, pixels), labels(8, classes=10)

    def loss(region: Region) -> Any:
        y = parts[0](x)
        for part in parts[1:-2]:
            if isinstance(part, DenseLayer):
                y = region(lambda v, p=part: F.concat((v, p(v))), y)
            else:
                y = F.average_pooling_2d(part(y), 2)
        y = F.mean(F.relu(parts[-2](y)), axis=(2, 3))
        return F.softmax_cross_entropy(parts[-1](y), t)

    return model, loss, input_bytes(x, t)


# -- transformer, LSTM, GCN --------------------------------------------------------------------


class TransformerLayer(chainer.Chain):
    """Norm first; its queries, keys and values are one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.norm1 = L.LayerNormalization(width)
            self.norm2 = L.LayerNormalization(width)
            self.qkv = L.Linear(width, 3 * width)
            self.out = L.Linear(width, width)
            self.wide = L.Linear(width, 4 * width)
            self.narrow = L.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        rows = F.reshape(x, (batch * length, width))
        rows = rows + self.out(self._attend(self.qkv(self.norm1(rows)), batch, length, width))
        rows = rows + self.narrow(F.relu(self.wide(self.norm2(rows))))
        return F.reshape(rows, x.shape)

    def _attend(self, qkv: Any, batch: int, length: int, width: int) -> Any:
        size = width // self.heads
        qkv = F.reshape(qkv, (batch, length, 3, self.heads, size))
        qkv = F.reshape(F.transpose(qkv, (2, 0, 3, 1, 4)), (3, batch * self.heads, length, size))
        q, k, v = F.separate(qkv)
        weights = F.softmax(F.matmul(q, k, transb=True) * size**-0.5, axis=2)
        y = F.reshape(F.matmul(weights, v), (batch, self.heads, length, size))
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), (batch * length, width))


def transformer(layers: int = 12, width: int = 128, length: int = 128) -> tuple[Any, Loss, int]:
    parts = [TransformerLayer(width, 4) for _ in range(layers)]
    score = L.Linear(width, 100)
    model = chainer.ChainList(*parts, score)
    x = np.random.default_rng(0).standard_normal((8, length, width), dtype=np.float32)
    t = labels(8 * length, classes=100)

    def loss(region: Region) -> Any:
        y = x
        for part in parts:
            y = region(part, y)
        return F.softmax_cross_entropy(score(F.reshape(y, (-1, width))), t)

    return model, loss, input_bytes(x, t)


def lstm(steps: int = 200, batch: int = 128, width: int = 128) -> tuple[Any, Loss, int]:
    cell, score = L.StatelessLSTM(width, width), L.Linear(width, 8)
    model = chainer.ChainList(cell, score)
    xs = np.random.default_rng(0).standard_normal((steps, batch, width), dtype=np.float32)
    zero = np.zeros((batch, width), np.float32)
    group = round(steps**0.5)

    def part(first: int) -> Callable[..., Any]:
        def run(c: Any, h: Any) -> Any:
            total: Any = 0
            for x in xs[first : first + group]:
                c, h = cell(c, h, x)
                total += F.mean(score(h) ** 2)
            return c, h, total

        return run

    def loss(region: Region) -> Any:
        c, h, total = zero, zero, 0
        for first in range(0, steps, group):
            c, h, more = region(part(first), c, h)
            total += more
        return total

    return model, loss, input_bytes(xs, zero)


def gcn(layers: int = 8, nodes: int = 20_000, width: int = 64) -> tuple[Any, Loss, int]:
    from umem.chainer.gcn import GCN, Adjacency

    graph = umem.graphs.rmat(nodes, 5 * nodes, width, 8)
    adjacency = Adjacency(umem.graphs.normalised_adjacency(graph))
    model = GCN(width, hidden=width, classes=8, layers=layers)
    x, t = graph.features, graph.labels_where(graph.train_mask)
    links = list(model)
    functions = [lambda h, f=links[0]: f(adjacency, h)]
    functions += [lambda h, f=f: f(adjacency, F.relu(h)) for f in links[1:]]

    def loss(region: Region) -> Any:
        return F.softmax_cross_entropy(grouped(region, functions, 4, x), t)

    return model, loss, input_bytes(x, t)


POINTS = ((0.46, 1.35), (0.38, 1.47))
WITH_DROPOUT = tuple((share + 0.02, limit) for share, limit in POINTS)
NETWORKS = (
    Network("residual", residual, points=POINTS, repeats=7, torch="residual"),
    Network("residual, dropout", lambda: residual(dropout=0.1), points=WITH_DROPOUT, repeats=7,
            forget_is_wrong="masks are drawn again", torch="residual, dropout"),
    Network("ResNet50", resnet50, 0.35, repeats=3, torch="ResNet50"),
    Network("VGG16", vgg16, 0.5, repeats=3, torch="VGG16"),
    Network("VGG16, 64 px", lambda: vgg16(64), 0.5, repeats=3, no_torch="see VGG16"),
    Network("U-Net", unet, 0.5, no_torch="not a sequence"),
    Network("DenseNet", densenet, 0.35, torch="DenseNet"),
    Network("transformer", transformer, 0.35, torch="transformer"),
    Network("LSTM", lstm, 0.35, torch="LSTM"),
    Network("GCN", gcn, 0.35, torch="GCN"),
)  # fmt: skip
QUICK = (
    Network("small residual", lambda: residual(6, channels=16, pixels=16, groups=2), repeats=3),
    Network(
        "small residual, dropout",
        lambda: residual(6, 0.1, 16, 16, groups=2),
        repeats=3,
        forget_is_wrong="masks are drawn again",
    ),
)
