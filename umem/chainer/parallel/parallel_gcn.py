"""Graph convolutions on a graph in parts, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import chainer
import chainer.functions as F

from umem.chainer.gcn import check_layers
from umem.chainer.parallel.parallel_graph import ParallelGraph
from umem.chainer.parallel.part_functions import PartBias, PartLinear
from umem.chainer.parallel.part_sums import ToParts
from umem.chainer.parallel.ranks import Ranks


class ParallelGraphConvolution(chainer.Link):
    """One layer A X W' + b with rows spread over ranks; `GraphConvolution` is the serial one.

    Products with W are computed by part, and the gradients of W and b are summed over parts in
    order: the same bits on every rank, and for any number of ranks of one cut. W and b start as on
    rank 0. All ranks make it, and run forward and backward through it, in the same order.

    Args:
        comm: a communicator of ChainerMN or mpi4py; None: one process.
        in_size: columns of x.
        out_size: columns of the result.
    """

    def __init__(self, comm: Any, in_size: int, out_size: int) -> None:
        super().__init__()
        self._ranks = Ranks(comm)
        with self.init_scope():
            self.W = chainer.Parameter(chainer.initializers.GlorotUniform(), (out_size, in_size))
            self.b = chainer.Parameter(0, (out_size,))
        self._ranks.broadcast(self.W.array, 0)

    def multiplies_first(self, x: Any) -> bool:
        """Tell whether x is multiplied by W before the adjacency: if that makes it narrower, or x
        is on disk.
        """
        out_size, in_size = self.W.shape
        return out_size < in_size or not isinstance(
            x, (chainer.Variable, chainer.get_array_types())
        )

    def forward(self, graph: ParallelGraph, x: Any) -> Any:
        """Apply the layer to this rank's rows: (n, in_size) to (n, out_size).

        Args:
            graph: the rank's parts.
            x: variable or array; or an array for each part, which are not copied.
        """
        w, b = (ToParts(self._ranks, len(graph.rows)).apply((p,))[0] for p in (self.W, self.b))
        if not self.multiplies_first(x):
            y = PartLinear(graph.rows).apply((graph.aggregate(x), w))[0]
        elif isinstance(x, Sequence):
            y = graph.aggregate(PartLinear(graph.rows, x).apply((w,))[0])
        else:
            y = graph.aggregate(PartLinear(graph.rows).apply((x, w))[0])
        return PartBias(graph.rows).apply((y, b))[0]


class ParallelGCN(chainer.ChainList):
    """Graph convolutions with ReLU between them, on a graph in parts.

    Dropout is `ParallelGraph.dropout`, whose masks do not depend on the number of ranks.

    Args:
        comm: a communicator of ChainerMN or mpi4py; None: one process.
        in_size: features of a node.
        hidden: width of every layer but the last.
        classes: width of the last layer.
        layers: the number of graph convolutions, at least 1.
        dropout: share of the hidden values that training drops before each layer but the first.
    """

    def __init__(
        self,
        comm: Any,
        in_size: int,
        hidden: int,
        classes: int,
        layers: int = 3,
        dropout: float = 0.0,
    ) -> None:
        check_layers("ParallelGCN", layers, dropout)
        sizes = [in_size, *[hidden] * (layers - 1), classes]
        super().__init__(*(ParallelGraphConvolution(comm, *pair) for pair in pairwise(sizes)))
        self.dropout = dropout

    def forward(self, graph: ParallelGraph, x: Any) -> Any:
        """Return this rank's scores: (n, in_size) to (n, classes)."""
        first, *others = self
        h = first(graph, x)
        for layer in others:
            h = layer(graph, graph.dropout(F.relu(h), self.dropout))
        return h

    def exchanged_widths(self, x: Any, *, train: bool = True) -> list[int]:
        """Return the column count of each halo exchange of a step, both directions; see `HaloPlan`.

        Args:
            x: the argument of the model.
            train: whether backward is also counted.
        """
        widths = []
        for number, layer in enumerate(self):
            out_size, in_size = layer.W.shape
            before = layer.multiplies_first(x if number == 0 else layer.W)
            again = train and (number > 0 or before)
            widths += [out_size if before else in_size] * (2 if again else 1)
        return widths
