"""What bench/cuda_managed.py trains: a graph network and a residual network, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.chainer.demo_workload import CLASSES, HIDDEN, Workload
from umem.chainer.gcn import GCN, Adjacency


@dataclass(frozen=True)
class Training:
    """A model on the current umem device, with all that a step of it reads."""

    loss: Callable[[], Any]
    optimizer: Any
    data: tuple[Any, ...]

    def step(self) -> float:
        """One step; returns its loss, which waits for the device."""
        loss = self.loss()
        self.optimizer.target.cleargrads()
        loss.backward()
        self.optimizer.update()
        return float(loss.array)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What a step finds in memory: parameters, their state, data."""
        return self.optimizer.target, self.optimizer, *self.data


def graph_network(nodes: int) -> Callable[[], Training]:
    """A maker of GCNs of 3 layers on one generated graph, as `umem demo` trains them."""
    work = Workload.generate(nodes, 1)

    def make() -> Training:
        place = umem.chainer.device()
        np.random.seed(0)
        adjacency = Adjacency(work.adjacency).to_device(place)
        labels = work.graph.labels_where(work.graph.train_mask)
        features, labels = place.send((work.graph.features, labels))
        model = GCN(HIDDEN, HIDDEN, CLASSES, layers=3)
        optimizer = chainer.optimizers.Adam(0.01).setup(model.to_device(place))
        return Training(
            lambda: F.softmax_cross_entropy(model(adjacency, features), labels),
            optimizer,
            (adjacency.matrix, features, labels),
        )

    return make


class ResidualBlock(chainer.Chain):
    """Two 3x3 convolutions with batch normalisation, and the way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.first_norm = L.BatchNormalization(channels)
            self.second = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.second_norm = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(h)) + x)


class ResidualNetwork(chainer.Chain):
    """Residual blocks of one width (He and others, CVPR 2016), a mean and a linear layer."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        with self.init_scope():
            self.stem = L.Convolution2D(3, channels, 3, pad=1)
            self.blocks = chainer.ChainList(*(ResidualBlock(channels) for _ in range(blocks)))
            self.last = L.Linear(channels, 10)

    def forward(self, x: Any) -> Any:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.last(F.mean(h, axis=(2, 3)))


def residual_network(batch: int, side: int, channels: int, blocks: int) -> Callable[[], Training]:
    """A maker of residual networks on one batch of ``batch`` random images of ``side`` pixels."""
    random = np.random.RandomState(1)
    images = random.rand(batch, 3, side, side).astype("f")
    labels = random.randint(0, 10, batch).astype("i")

    def make() -> Training:
        place = umem.chainer.device()
        np.random.seed(0)
        model = ResidualNetwork(channels, blocks).to_device(place)
        x, t = place.send((images, labels))
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        return Training(lambda: F.softmax_cross_entropy(model(x), t), optimizer, (x, t))

    return make
