"""The networks of Kusumoto et al. (NeurIPS 2019), table 1, as graphs of what Chainer runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
from models import Model, build

from umem.planner import Graph


@dataclass(frozen=True)
class Network:
    """A network of the published table: GB with parameters, least peaks with liveness.

    ``model`` is its name and size in bench/models/; ``published`` holds the approximate family,
    the exact algorithm, Chen, and keeping all.
    """

    name: str
    model: tuple[str, str]
    batch: int
    pixels: int
    node_count: int
    published: tuple[float, float, float, float]
    traced_pixels: int | None = None


def graph_of(network: Network) -> tuple[Graph, int]:
    """The network's graph at its published batch, and the bytes of its parameters.

    The forward pass runs with one image, and what it makes is scaled. A network too large for
    that runs with a smaller image, which tells what is saved, and then with the whole one
    without keeping anything, which tells the sizes.
    """
    model = build(*network.model)
    pixels = network.traced_pixels or network.pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batch normalisation of a single value
        graph = _traced(model, pixels)
        if network.traced_pixels is not None:
            with chainer.no_backprop_mode():
                graph = _resized(graph, _traced(model, network.pixels))
    parameter_bytes = sum(p.array.nbytes for p in model.link.params() if p.array is not None)
    return scaled(graph, network.batch), parameter_bytes


def _traced(model: Model, pixels: int) -> Graph:
    inputs = model.inputs(1, pixels)
    with umem.record() as recorder:
        loss = model.loss(*inputs)
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


NETWORKS = (
    Network("PSPNet", ("PSPNet", "713 px"), 2, 713, 385, (2.7, 2.8, 4.0, 9.4), 233),
    Network("U-Net", ("U-Net", "as published, 572 px"), 8, 572, 60, (5.0, 4.7, 7.4, 9.1)),
    Network("ResNet50", ("ResNet50", "224 px"), 96, 224, 176, (3.4, 3.4, 3.7, 8.9)),
    Network("ResNet152", ("ResNet152", "224 px"), 48, 224, 516, (2.3, 2.3, 2.4, 9.2)),
    Network("VGG19", ("VGG19", "224 px"), 64, 224, 46, (4.5, 4.5, 4.7, 7.0)),
    Network("DenseNet161", ("DenseNet", "161, 224 px"), 32, 224, 568, (1.6, 1.7, 1.8, 8.5)),
    Network("GoogLeNet", ("GoogLeNet", "224 px"), 256, 224, 134, (5.2, 5.2, 6.5, 8.5)),
)
