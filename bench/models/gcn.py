"""Graph convolution networks on the whole of a generated graph; a batch is its nodes."""

from __future__ import annotations

from typing import Any

import chainer.functions as F

from models.model import Model, Region, call, grouped
from umem.graphs import normalised_adjacency, rmat


def gcn(layers: int, width: int, classes: int, ties: float, seed: int = 0) -> Model:
    """``ties`` a node; the input is the adjacency, the features and the labels."""
    from umem.chainer import GCN, Adjacency  # the rest of umem.chainer comes with it

    link = GCN(width, width, classes, layers=layers)
    first, *others = link

    def inputs(nodes: int) -> tuple[Any, Any, Any]:
        graph = rmat(nodes, round(ties * nodes), width, classes, seed=seed)
        adjacency = Adjacency(normalised_adjacency(graph))
        return adjacency, graph.features, graph.labels_where(graph.train_mask)

    def loss(adjacency: Any, x: Any, t: Any, region: Region = call) -> Any:
        functions = [lambda h: first(adjacency, h)]
        functions += [lambda h, f=f: f(adjacency, F.relu(h)) for f in others]
        y = grouped(region, functions, max(1, layers // 2), x)
        return F.softmax_cross_entropy(y, t)

    return Model(link, inputs, loss, "Adam")


MODELS = {
    "GCN": {
        "8 layers": lambda: gcn(8, 64, 8, 5),
        "3 layers, 16 classes": lambda: gcn(3, 128, 16, 7),
        "3 layers, 40 classes": lambda: gcn(3, 128, 40, 6.5, seed=7),
    }
}
