"""A recorded step on a whole graph, as a rank with some of its parts would run it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from umem.errors import DataError, TraceError
from umem.predict.ranks.rank_shares import GraphInParts, RankShare
from umem.predict.ranks.scaled_events import ONE, scaled
from umem.trace.events import Alloc, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

ADJACENCY = ("PartAggregation.", "SparseMatMul.matrix")
"""Prefixes of the labels of the adjacency's tensors, in parts and whole."""
AGGREGATIONS = ("PartAggregation", "SparseMatMul")
"""The operations before which rows of other ranks arrive."""
BY_PART = ("PartLinear", "PartLinearGrad", "PartBias", "PartDropout", "PartRowSums",
           "PartCrossEntropy", "PartCrossEntropyGrad")  # fmt: skip
"""Operations that run part by part, so that their workspace is that of one part."""
STACKED = ("PartRowSums", "PartCrossEntropy")
"""Operations whose output has one array a part."""
REPEATED = ("OverParts", "ToParts", "LinearGradWeight")
"""Operations whose output is the same array on every rank."""


@dataclass(frozen=True)
class Whole:
    """The sizes of the graph that a step was recorded on."""

    nodes: int
    entries: int
    part_count: int
    part_nodes: int


def whole_of(graph: GraphInParts) -> Whole:
    """Return the sums over a graph's parts, and the nodes of the largest part."""
    return Whole(sum(graph.nodes), sum(graph.entries), len(graph.nodes), max(graph.nodes))


class GraphStep:
    """A step whose activations are split by rows over ranks, and whose parameters are replicated.

    A tensor with the same bytes for every node is scaled to the rank's nodes. The adjacency has
    exactly the bytes of the rank's blocks and buffers. A tensor with one array a part is scaled to
    the rank's parts. Parameters, their gradients and the optimizer's state keep their size. An
    aggregation's time is scaled by entries, that of other operations by nodes.

    Does not model: an operation whose time is not proportional to rows, such as one that no
    longer fills the GPU; rows that are split unevenly inside of a part.

    Args:
        trace: of one process, with the whole graph.
        graph: the graph of the trace.

    Raises:
        TraceError: no graph convolution is in the trace.
        DataError: the trace is of another graph.
    """

    def __init__(self, trace: Trace, graph: GraphInParts) -> None:
        self.whole = whole_of(graph)
        self.trace = trace
        self._allocs = allocations(trace.events)
        self._parameters = {a.nbytes for a in self._allocs.values() if a.kind == "parameter"}
        self._adjacency = sum(
            a.nbytes for a in self._allocs.values() if a.label.startswith(ADJACENCY)
        )
        self._check()

    def _check(self) -> None:
        """Raise TraceError without graph convolutions, DataError for a trace of another graph."""
        ops = [op for op in self.trace.ops if op.name in AGGREGATIONS]
        if not ops:
            raise TraceError(
                "the trace has no graph convolution (umem.chainer.ParallelGraphConvolution or "
                "umem.chainer.gcn), so a cut says nothing of it; leave --cut out for a step whose "
                "batch is split"
            )
        arrays = [
            a.nbytes for a in self._allocs.values() if a.label.startswith(ADJACENCY) and a.nbytes
        ]
        starts = {(self.whole.nodes + 1) * width for width in (4, 8)}
        values = sum(nbytes for nbytes in arrays if nbytes not in starts)
        widths = {self.whole.entries * width for width in (8, 12, 16)}
        if not starts & set(arrays) or values not in widths:
            raise DataError(
                f"the cut has {self.whole.nodes:,} nodes and {self.whole.entries:,} entries, and "
                "the trace is of another graph, or of one rank of several; record a step of one "
                "process on the graph that was cut"
            )

    @property
    def exchanged(self) -> list[int]:
        """Return the bytes of a row in each exchange of the halo, over all steps of the trace."""
        found = [op for op in self.trace.ops if op.name in AGGREGATIONS and op.writes]
        return [self._allocs[op.writes[0].tensor].nbytes // self.whole.nodes for op in found]

    @property
    def summed(self) -> list[int]:
        """Return the bytes of each sum over parts, over all steps of the trace."""
        sums = [op for op in self.trace.ops if op.name == "OverParts" and op.writes]
        if sums:
            return [op.writes[0].stop - op.writes[0].start for op in sums]
        steps = max(1, self.trace.step_count)
        return [a.nbytes for a in self._allocs.values() if a.kind == "parameter"] * steps

    def of_rank(self, share: RankShare, state_ranks: int = 1) -> Trace:
        """Return the trace of the step as a rank runs it.

        Args:
            share: the rank's share of the graph.
            state_ranks: the number of ranks that the optimizer's state is split over.
        """
        adjacency, state = self._adjacency_share(share), Fraction(1, state_ranks)
        nodes = Fraction(share.nodes, self.whole.nodes)
        part = Fraction(share.part_nodes, self.whole.part_nodes)
        entries = Fraction(share.entries, self.whole.entries)

        def of_tensor(alloc: Alloc) -> Fraction:
            if alloc.label.startswith(ADJACENCY):
                return adjacency
            return state if alloc.kind == "state" else self._share(alloc, share)

        def of_op(op: Op, largest: Fraction) -> tuple[Fraction, Fraction]:
            if op.name in AGGREGATIONS:
                return entries, nodes
            return largest, part if op.name in BY_PART else ONE if op.name in REPEATED else largest

        return scaled(self.trace, of_tensor, of_op)

    def _share(self, alloc: Alloc, share: RankShare) -> Fraction:
        """Return a rank's share of a tensor that is neither the adjacency's nor optimizer state."""
        parts = Fraction(share.part_count, self.whole.part_count)
        if alloc.kind == "parameter" or alloc.label in REPEATED:
            return ONE
        of_stack = alloc.label == "PartLinearGrad" and self._is_stack(alloc.nbytes)
        if of_stack or alloc.label in STACKED:
            return parts
        if alloc.nbytes >= self.whole.nodes and alloc.nbytes % self.whole.nodes == 0:
            return Fraction(share.nodes, self.whole.nodes)
        return parts if self._is_stack(alloc.nbytes) else ONE

    def _is_stack(self, nbytes: int) -> bool:
        return nbytes in {self.whole.part_count * each for each in self._parameters}

    def _adjacency_share(self, share: RankShare) -> Fraction:
        """Return the bytes of a rank's blocks, buffers and labels over the whole adjacency's."""
        row_bytes = max(self.exchanged, default=0)
        return Fraction(share.fixed_bytes(row_bytes), self._adjacency)
