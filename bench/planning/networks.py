"""The seven networks of Kusumoto et al. (NeurIPS 2019), table 1, as Chainer runs them.

ResNet50, ResNet152, VGG19 and GoogLeNet are Chainer's own; PSPNet (Zhao et al. 2017, on a dilated
ResNet101, with its auxiliary loss), U-Net (Ronneberger et al. 2015) and DenseNet161 (Huang et al.
2017) are written here after their papers. Each is a training step's forward pass with its loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.planner import Graph

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Network:
    """A network of the published table: GB with parameters, least peaks with liveness.

    ``published`` holds the approximate family, the exact algorithm, Chen, and keeping all.
    """

    name: str
    make: Callable[[], tuple[Any, Forward]]
    batch: int
    pixels: int
    labels: Callable[[int], int] | None
    """The edge of a map of labels for so many pixels; None: one label an image."""
    node_count: int
    published: tuple[float, float, float, float]
    traced_pixels: int | None = None


def graph_of(network: Network) -> tuple[Graph, int]:
    """The network's graph at its published batch, and the bytes of its parameters.

    The forward pass runs with one image, and what it makes is scaled. A network too large for
    that runs with a smaller image, which tells what is saved, and then with the whole one
    without keeping anything, which tells the sizes.
    """
    model, forward = network.make()
    pixels = network.traced_pixels or network.pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batch normalisation of a single value
        graph = _traced(forward, network, pixels)
        if network.traced_pixels is not None:
            with chainer.no_backprop_mode():
                graph = _resized(graph, _traced(forward, network, network.pixels))
    parameter_bytes = sum(p.array.nbytes for p in model.params() if p.array is not None)
    return scaled(graph, network.batch), parameter_bytes


def _traced(forward: Forward, network: Network, pixels: int) -> Graph:
    channels = 1 if network.name == "U-Net" else 3
    x = np.random.default_rng(0).standard_normal((1, channels, pixels, pixels), dtype=np.float32)
    t = np.zeros((1, *(() if network.labels is None else (network.labels(pixels),) * 2)), np.int32)
    with umem.record() as recorder:
        loss = forward(x, t)
    del loss
    return Graph.from_trace(recorder.trace)


def _resized(graph: Graph, large: Graph) -> Graph:
    """A graph with the sizes of another one of the same calls."""
    if graph.names != large.names:
        raise RuntimeError("the network runs other calls on a smaller image")
    nodes = [
        replace(
            small,
            nbytes=big.nbytes,
            stash_bytes=small.stash_bytes * big.nbytes // max(1, small.nbytes),
        )
        for small, big in zip(graph.nodes, large.nodes, strict=True)
    ]
    return Graph(nodes, graph.edges)


def scaled(graph: Graph, factor: int) -> Graph:
    """A graph with all its bytes taken times a factor."""
    nodes = [
        replace(node, nbytes=node.nbytes * factor, stash_bytes=node.stash_bytes * factor)
        for node in graph.nodes
    ]
    return Graph(nodes, graph.edges)


# -- Chainer's own -----------------------------------------------------------------------------


def _layers(make: Callable[[], Any], layer: str) -> tuple[Any, Forward]:
    model = make()
    return model, lambda x, t: F.softmax_cross_entropy(model(x, layers=[layer])[layer], t)


def resnet50() -> tuple[Any, Forward]:
    return _layers(lambda: L.ResNet50Layers(pretrained_model=None), "fc6")


def resnet152() -> tuple[Any, Forward]:
    return _layers(lambda: L.ResNet152Layers(pretrained_model=None), "fc6")


def vgg19() -> tuple[Any, Forward]:
    return _layers(lambda: L.VGG19Layers(pretrained_model=None), "fc8")


def googlenet() -> tuple[Any, Forward]:
    """With both auxiliary losses, as it is trained."""
    m = L.GoogLeNet(pretrained_model=None)

    def side(h: Any, conv: Any, fc1: Any, fc2: Any, t: Any) -> Any:
        h = F.relu(conv(F.average_pooling_2d(h, 5, stride=3)))
        return F.softmax_cross_entropy(fc2(F.relu(fc1(h))), t)

    def forward(x: Any, t: Any) -> Any:
        h = F.max_pooling_2d(F.relu(m.conv1(x)), 3, stride=2)
        h = F.local_response_normalization(h, n=5, k=1, alpha=2e-05)
        h = F.relu(m.conv2(F.relu(m.conv2_reduce(h))))
        h = F.local_response_normalization(h, n=5, k=1, alpha=2e-05)
        h = m.inc3b(m.inc3a(F.max_pooling_2d(h, 3, stride=2)))
        h = m.inc4a(F.max_pooling_2d(h, 3, stride=2))
        loss1 = side(h, m.loss1_conv, m.loss1_fc1, m.loss1_fc2, t)
        h = m.inc4d(m.inc4c(m.inc4b(h)))
        loss2 = side(h, m.loss2_conv, m.loss2_fc1, m.loss2_fc2, t)
        h = m.inc5b(m.inc5a(F.max_pooling_2d(m.inc4e(h), 3, stride=2)))
        h = m.loss3_fc(F.dropout(F.average_pooling_2d(h, 7, stride=1), 0.4))
        return 0.3 * (loss1 + loss2) + F.softmax_cross_entropy(h, t)

    return m, forward


# -- written here ------------------------------------------------------------------------------


class _Parts(chainer.Chain):
    """A chain that takes links as they are made."""

    def add(self, link: Any) -> Any:
        with self.init_scope():
            setattr(self, f"link{len(list(self.children()))}", link)
        return link

    def conv(self, *args: Any, **kwargs: Any) -> Any:
        return self.add(L.Convolution2D(*args, **kwargs))

    def conv_norm(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        conv = self.conv(*args, nobias=True, **kwargs)
        norm = self.add(L.BatchNormalization(args[1]))
        return lambda x: norm(conv(x))

    def norm_relu_conv(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        norm = self.add(L.BatchNormalization(args[0]))
        conv = self.conv(*args, nobias=True, **kwargs)
        return lambda x: conv(F.relu(norm(x)))


def densenet161() -> tuple[Any, Forward]:
    m, growth, channels = _Parts(), 48, 96
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

    def forward(x: Any, t: Any) -> Any:
        h = F.max_pooling_2d(F.relu(stem(x)), 3, stride=2, pad=1)
        for first, second in stages:
            if second is None:
                h = F.average_pooling_2d(first(h), 2)
            else:
                h = F.concat((h, second(first(h))))
        h = F.relu(last(h))
        return F.softmax_cross_entropy(fc(F.average_pooling_2d(h, h.shape[2:])), t)

    return m, forward


def unet() -> tuple[Any, Forward]:
    """One channel in, two classes out, convolutions without padding, crops at the skips."""
    m, width = _Parts(), (64, 128, 256, 512, 1024)
    down = [
        (m.conv(low, high, 3), m.conv(high, high, 3))
        for low, high in zip((1, *width[:-1]), width, strict=True)
    ]
    up = []
    for low, high in zip(width[-2::-1], width[:0:-1], strict=True):
        grow = m.add(L.Deconvolution2D(high, low, 2, stride=2))
        up.append((grow, m.conv(high, low, 3), m.conv(low, low, 3)))
    last = m.conv(64, 2, 1)

    def forward(x: Any, t: Any) -> Any:
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

    return m, forward


def pspnet() -> tuple[Any, Forward]:
    """On ResNet101 whose last two stages are dilated; 19 classes."""
    m, classes = _Parts(), 19
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

    def forward(x: Any, t: Any) -> Any:
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

    return m, forward


def _bottleneck(
    m: _Parts, low: int, width: int, stride: int, dilate: int, projects: bool
) -> Callable[[Any], Any]:
    narrow = m.conv_norm(low, width, 1)
    middle = m.conv_norm(width, width, 3, stride=stride, pad=dilate, dilate=dilate)
    wide = m.conv_norm(width, 4 * width, 1)
    project = m.conv_norm(low, 4 * width, 1, stride=stride) if projects else None

    def block(x: Any) -> Any:
        h = wide(F.relu(middle(F.relu(narrow(x)))))
        return F.relu(h + (x if project is None else project(x)))

    return block


NETWORKS = (
    Network("PSPNet", pspnet, 2, 713, lambda p: p, 385, (2.7, 2.8, 4.0, 9.4), 233),
    Network("U-Net", unet, 8, 572, lambda p: p - 184, 60, (5.0, 4.7, 7.4, 9.1)),
    Network("ResNet50", resnet50, 96, 224, None, 176, (3.4, 3.4, 3.7, 8.9)),
    Network("ResNet152", resnet152, 48, 224, None, 516, (2.3, 2.3, 2.4, 9.2)),
    Network("VGG19", vgg19, 64, 224, None, 46, (4.5, 4.5, 4.7, 7.0)),
    Network("DenseNet161", densenet161, 32, 224, None, 568, (1.6, 1.7, 1.8, 8.5)),
    Network("GoogLeNet", googlenet, 256, 224, None, 134, (5.2, 5.2, 6.5, 8.5)),
)
