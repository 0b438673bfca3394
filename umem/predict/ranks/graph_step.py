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
"""The beginnings of the labels of the adjacency's tensors, in parts and whole."""
AGGREGATIONS = ("PartAggregation", "SparseMatMul")
"""The operations before which rows of other ranks arrive."""
BY_PART = ("PartLinear", "PartLinearGrad", "PartBias", "PartDropout", "PartRowSums",
           "PartCrossEntropy", "PartCrossEntropyGrad")  # fmt: skip
"""Operations that go part by part, so that what they need while they run is a part's."""
STACKED = ("PartRowSums", "PartCrossEntropy")
"""Operations of which one array a part comes."""
REPEATED = ("OverParts", "ToParts", "LinearGradWeight")
"""Operations of which the same array comes on every rank."""


@dataclass(frozen=True)
class Whole:
    """The graph that a step was recorded on."""

    nodes: int
    entries: int
    part_count: int
    part_nodes: int


def whole_of(graph: GraphInParts) -> Whole:
    """All parts of a graph together."""
    return Whole(sum(graph.nodes), sum(graph.entries), len(graph.nodes), max(graph.nodes))


class GraphStep:
    """A step whose activations are split by rows, and whose parameters each rank has.

    A tensor of as many bytes a node has a rank's nodes; the adjacency is what the rank's blocks
    are, exactly, with its buffers; what has an array a part has the rank's parts; parameters,
    their gradients and the optimizer's state stay. An aggregation computes by entries, everything
    else by nodes.

    Does not model: an operation whose time is not proportional to rows, such as one that no
    longer fills the GPU; rows that are split unevenly inside of a part.

    Args:
        trace: of one process, with the whole graph.
        graph: the graph of the trace.

    Raises:
        TraceError: no graph convolution is in it.
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
        """Refuse a trace without graph convolutions, or of another graph."""
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
        """By exchange, the bytes of a row, over all steps of the trace."""
        found = [op for op in self.trace.ops if op.name in AGGREGATIONS and op.writes]
        return [self._allocs[op.writes[0].tensor].nbytes // self.whole.nodes for op in found]

    @property
    def summed(self) -> list[int]:
        """The bytes of each sum over parts, over all steps of the trace."""
        sums = [op for op in self.trace.ops if op.name == "OverParts" and op.writes]
        if sums:
            return [op.writes[0].stop - op.writes[0].start for op in sums]
        steps = max(1, self.trace.step_count)
        return [a.nbytes for a in self._allocs.values() if a.kind == "parameter"] * steps

    def of_rank(self, share: RankShare, state_ranks: int = 1) -> Trace:
        """The step as a rank runs it.

        Args:
            share: what it has of the graph.
            state_ranks: how many ranks the optimizer's state is split over.
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
        """A rank's share of a tensor that is neither the adjacency's nor the optimizer's."""
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
        """Return the bytes of a rank's blocks, buffers and labels, over those of the adjacency."""
        row_bytes = max(self.exchanged, default=0)
        return Fraction(share.fixed_bytes(row_bytes), self._adjacency)
