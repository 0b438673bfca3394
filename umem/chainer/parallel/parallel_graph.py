"""A rank's parts of a graph, and sums over all parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from platform import python_version
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from umem.chainer.parallel.aggregation import Halo, PartAggregation
from umem.chainer.parallel.part_functions import PartCrossEntropy, PartDropout
from umem.chainer.parallel.part_sums import OverParts
from umem.chainer.parallel.ranks import Ranks
from umem.errors import DataError, DeviceError
from umem.graphs import Array, Graph, open_cut, parts_of_ranks, rank_blocks


class ParallelGraph:
    """This rank's parts of a partitioned graph: its rows, in the order of parts.

    Every rank makes one from the same folder and communicator, and makes the collective calls in
    the same order. Each rank opens the list of the cut and the files of its own parts only.

    Cost: about 40 bytes an entry of its rows while it is made, 8 after, and two buffers as large as
    the longest message: at most the rows of one part.

    Args:
        folder: an output of `umem.graphs.cut` or ``umem graph cut``.
        comm: a communicator of ChainerMN or mpi4py; None: this process has all parts.
        graph: check that the cut is of this graph.

    Attributes:
        ranks: the communicator.
        parts: this rank's parts.
        rows: the slice of each part's rows.
        features: by part, float32 (n, F) in the files; unused rows are not read.
        nodes: int32 (n,), the numbers of this rank's nodes in the graph.
        labels: int32 (n,).
        train_mask: bool (n,).
        val_mask: bool (n,).
        test_mask: bool (n,).
        class_count: one more than the highest label of the graph.
        feature_count: F.

    Raises:
        SizeError: there are more ranks than parts; nothing was sent.
        DataError: a file cannot be read or is torn, the cut is of another graph, or a rank has
            another cut, umem or Python version. It is raised on every rank.
    """

    def __init__(
        self, folder: str | os.PathLike[str], comm: Any = None, *, graph: Graph | None = None
    ) -> None:
        self.ranks = Ranks(comm)
        error: DataError | None = None
        facts = {
            "version of umem": sys.modules["umem"].__version__,
            "version of Python": python_version(),
        }
        try:
            cut = open_cut(os.fspath(folder), graph)
            runs = parts_of_ranks(len(cut.nodes), self.ranks.size)
            facts["cut"] = cut.identity
            self._load(cut, runs)
        except DataError as found:
            error = found
        self.ranks.check_alike(facts, error)

    def _load(self, cut: Any, runs: tuple[range, ...]) -> None:
        """Load this rank's parts of a cut, and split their rows into blocks."""
        self.parts = runs[self.ranks.rank]
        found = [cut.part(part) for part in self.parts]
        blocks = rank_blocks(cut, runs, self.ranks.rank, found)
        self.rows: tuple[slice, ...] = blocks.rows
        self.features: Sequence[Array] = [part.features for part in found]
        for name in ("nodes", "labels", "train_mask", "val_mask", "test_mask"):
            setattr(self, name, np.concatenate([getattr(part, name) for part in found]))
        self.class_count, self.feature_count = cut.class_count, cut.feature_count
        self._halo = Halo(self.ranks, runs, blocks)

    nodes: Array
    labels: Array
    train_mask: Array
    val_mask: Array
    test_mask: Array

    @property
    def node_count(self) -> int:
        """Return n, the number of this rank's nodes."""
        return len(self.labels)

    def to_device(self, device: Any) -> ParallelGraph:
        """Move the adjacency to a device, given as to Chainer's `to_device`; returns self."""
        self._halo.to_device(device)
        return self

    def load_features(self) -> Any:
        """Read this rank's features to the adjacency's device: float32 (n, F)."""
        return self._halo.device.send(np.concatenate(self.features))

    def labels_where(self, mask: Array) -> Any:
        """Return labels, int32 (n,), with -1 outside ``mask``, on the adjacency's device."""
        return self._halo.device.send(np.where(mask, self.labels, np.int32(-1)))

    def aggregate(self, x: Any) -> Any:
        """Multiply this rank's rows of the normalised adjacency by x, differentiably; a collective
        call.

        At any moment the rows of one remote part are in memory; backward sends them again, as
        gradients. Sums are over neighbours by part, from the row's own part on, in the order of
        parts: the same bits on any number of ranks.

        Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training of
        Graph Neural Networks on Large Graphs", MLSys 2022.

        Args:
            x: variable or array of floats, (n, F), each rank's own rows.

        Returns:
            chainer.Variable: (n, F), of x's dtype.

        Raises:
            DeviceError: x is on another device than the adjacency.
        """
        here, there = cuda.get_array_module(x), self._halo.device.xp
        if here is not there:
            raise DeviceError(
                f"the graph is on {there.__name__} and x is an array of {here.__name__}; bring "
                "both to one device with graph.to_device(device) and device.send(x)"
            )
        return PartAggregation(self._halo).apply((x,))[0]

    def dropout(self, x: Any, ratio: float = 0.5) -> Any:
        """Apply dropout to x in training, as Chainer's; a collective call.

        The mask depends on NumPy's global generator on rank 0, from which each call draws one key,
        and on the part of a node, not on the number of ranks. It is recomputed in backward.

        Args:
            x: variable or array of floats, (n, F).
            ratio: 0 to below 1.
        """
        if not 0 <= ratio < 1:
            raise ValueError(f"dropout: ratio must be from 0 to below 1; got {ratio}")
        if not chainer.config.train or not ratio:
            return chainer.as_variable(x)
        function = PartDropout(self.rows, self.parts.start, ratio, self.ranks.draw())
        return function.apply((x,))[0]

    def cross_entropy(self, scores: Any, labels: Any) -> Any:
        """Return the mean softmax cross entropy over all ranks' labelled nodes; a collective call.

        Losses are summed by part, and then over parts in order. Each rank gets the same loss, and
        must run backward from it. A rank may have no labelled node; if none has, the loss is 0.

        Args:
            scores: variable of floats, (n, classes).
            labels: int (n,), -1 for nodes that do not count, as from `labels_where`.

        Returns:
            chainer.Variable: a scalar, the same on every rank.
        """
        sums = PartCrossEntropy(self.rows, labels).apply((scores,))[0]
        (count,) = self.ranks.count(int((labels >= 0).sum()))
        return OverParts(self.ranks).apply((sums,))[0] / max(count, 1)

    def accuracy(self, scores: Any, labels: Any) -> float:
        """Return the accuracy over all ranks' labelled nodes; a collective call.

        Every rank gets the same number, so that all stop early or none does. It is NaN if no node
        has a label.

        Args:
            scores: variable or array of floats, (n, classes).
            labels: int (n,), -1 for nodes that do not count.
        """
        array = scores.array if isinstance(scores, chainer.Variable) else scores
        right = int(((array.argmax(axis=1) == labels) & (labels >= 0)).sum())
        hits, count = self.ranks.count(right, int((labels >= 0).sum()))
        return hits / count if count else float("nan")
