"""The graph network whose times on an RTX 5090 are published, as the events of a trace.

The program: eunomia-bpf/gpu_ext, workloads/pytorch/benchmark_gnn_uvm.py with ``--prop chunked``
(PyTorch 2.9, CUDA 12.8). Full-batch, two layers, float32, random graph. Each operation below is
one that PyTorch runs for it; sizes, lifetimes and order follow from how autograd and Python hold
tensors, and each comment says why. What is under a megabyte a step (the loss, biases, the
optimizer's temporaries) is left out, except parameters and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from um_programs import FLOAT, Program

from umem.trace import Access

INDEX = 8
BOOL = 1


@dataclass(frozen=True)
class Sizes:
    """N nodes, F features, H hidden, C classes, undirected edges a node, edges in a chunk."""

    nodes: int
    features: int = 128
    hidden: int = 256
    classes: int = 10
    edges_per_node: int = 10
    chunk_edges: int = 2_000_000

    @property
    def edges(self) -> int:
        """Directed: both directions, and one self loop a node."""
        return (2 * self.edges_per_node + 1) * self.nodes

    @property
    def train_nodes(self) -> int:
        """A tenth of the nodes have labels."""
        return self.nodes // 10


class GcnProgram:
    """The program for one size. ``epoch_bytes`` is what one epoch allocates afresh."""

    def __init__(self, sizes: Sizes, epochs: int = 2) -> None:
        self.sizes, self.program = sizes, Program()
        self._graph()
        self._parameters()
        self.program.step()
        before = self.program.allocated_bytes
        for _ in range(epochs):  # the first warms up, as in the publication
            self._epoch()
            self.program.step()
        self.epoch_bytes = (self.program.allocated_bytes - before) // epochs

    # -- what stays ------------------------------------------------------------------------

    def _graph(self) -> None:
        """Features, labels and the normalised edges, all made on the GPU."""
        p, s = self.program, self.sizes
        pairs = s.edges_per_node * s.nodes
        edge_index = p.made("edge_index", 2 * pairs * INDEX)  # main() keeps it
        self.x = p.made("x", s.nodes * s.features * FLOAT)
        self.y = p.made("y", s.nodes * INDEX)
        self.train_mask = p.made("train_mask", s.nodes * BOOL)
        both = [p.made("cat", 2 * pairs * INDEX, (edge_index,)) for _ in range(2)]
        loops = p.made("arange", s.nodes * INDEX)
        self.src, self.dst = (p.made("cat", s.edges * INDEX, (half, loops)) for half in both)
        degree = p.made("bincount", s.nodes * FLOAT, (self.dst,))
        roots = [p.made("sqrt", s.edges * FLOAT, (degree, i)) for i in (self.src, self.dst)]
        self.edge_weight = p.made("reciprocal", s.edges * FLOAT, roots)
        p.free(*both, loops, degree, *roots)

    def _parameters(self) -> None:
        s = self.sizes
        shapes = (s.features * s.hidden, s.hidden, s.hidden * s.classes, s.classes)
        names = ("w1", "b1", "w2", "b2")
        self.parameters = [self._upload(n, name) for n, name in zip(shapes, names, strict=True)]
        self.state = [
            self._upload(2 * n, f"adam.{name}") for n, name in zip(shapes, names, strict=True)
        ]
        self.shapes = shapes

    def _upload(self, count: int, name: str) -> int:
        return self.program.new(count * FLOAT, name, "parameter", uploaded=True)

    # -- one epoch -------------------------------------------------------------------------

    def _epoch(self) -> None:
        """Run one epoch of the program: forward, backward, and Adam."""
        p, s = self.program, self.sizes
        w1, b1, w2, b2 = self.parameters
        # Forward. Autograd saves relu's result, dropout's mask and the second linear's input.
        h = self._linear(self.x, w1, b1, s.features, s.hidden)
        a = self._aggregate(h, s.hidden, self.src, self.dst)
        p.free(h)
        hidden = p.made("relu", self._dense(s.hidden), (a,))
        p.free(a)
        dropped = p.new(self._dense(s.hidden), "dropout")
        kept = p.new(s.nodes * s.hidden * BOOL, "dropout.mask")
        p.op("dropout", (hidden,), (dropped, kept))
        h = self._linear(dropped, w2, b2, s.hidden, s.classes)
        out = self._aggregate(h, s.classes, self.src, self.dst)  # train_one_epoch holds it
        p.free(h)
        g = self._loss(out)
        # Backward. A function's saved tensors go when it has run.
        gh = self._aggregate(g, s.classes, self.dst, self.src)
        p.free(g)
        gb2 = p.made("sum", self.shapes[3] * FLOAT, (gh,))
        work = 2 * s.nodes * s.hidden * s.classes
        g = p.made("mm", self._dense(s.hidden), (gh, w2), flops=work)
        gw2 = p.made("mm", self.shapes[2] * FLOAT, (gh, dropped), flops=work)
        p.free(gh, dropped)
        ga = p.made("dropout_backward", self._dense(s.hidden), (g, kept))
        p.free(g, kept)
        g = p.made("relu_backward", self._dense(s.hidden), (ga, hidden))
        p.free(ga, hidden)
        gh = self._aggregate(g, s.hidden, self.dst, self.src)
        p.free(g)
        gb1 = p.made("sum", self.shapes[1] * FLOAT, (gh,))
        work = 2 * s.nodes * s.features * s.hidden
        gw1 = p.made("mm", self.shapes[0] * FLOAT, (gh, self.x), flops=work)  # x needs no gradient
        p.free(gh)
        self._adam((gw1, gb1, gw2, gb2))
        p.free(out)

    def _dense(self, columns: int) -> int:
        return self.sizes.nodes * columns * FLOAT

    def _linear(self, x: int, weight: int, bias: int, columns_in: int, columns_out: int) -> int:
        """addmm: the bias is added within the product."""
        work = 2 * self.sizes.nodes * columns_in * columns_out
        return self.program.made("addmm", self._dense(columns_out), (x, weight, bias), flops=work)

    def _aggregate(self, h: int, columns: int, source: int, target: int) -> int:
        """Sum over edges, a chunk at a time: gather rows, scale them, scatter-add them.

        A custom autograd function: nothing of a chunk is saved, and backward is the same with
        source and target exchanged. A chunk's message lives until the next one has replaced it
        (Python rebinds the name only then), so three chunks are alive at once.

        Rows are gathered by whole cache lines; each row that is added is read and written.
        """
        p = self.program
        out = p.made("zeros", self._dense(columns))
        message = None
        for start, stop in self._chunks():
            edges = stop - start
            size = edges * columns * FLOAT
            gathered = p.new(size, "gather")
            p.op(
                "gather",
                (h, _part(source, start, stop, INDEX)),
                (gathered,),
                traffic=2 * size + edges * INDEX,
                pattern="random",
            )
            scaled = p.made(
                "mul",
                size,
                (gathered, _part(self.edge_weight, start, stop, FLOAT)),
                flops=edges * columns,
            )
            p.free(gathered, *([] if message is None else [message]))
            message = scaled
            p.op(
                "index_add",
                (message, _part(target, start, stop, INDEX)),
                (out,),
                flops=edges * columns,
                traffic=3 * size + edges * INDEX,
                pattern="random",
            )
        assert message is not None
        p.free(message)
        return out

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.sizes.edges, self.sizes.chunk_edges):
            yield start, min(start + self.sizes.chunk_edges, self.sizes.edges)

    def _loss(self, out: int) -> int:
        """Cross entropy of the rows with labels, and its gradient for all rows."""
        p, s = self.program, self.sizes
        rows, scores = s.train_nodes * INDEX, s.train_nodes * s.classes * FLOAT
        picked = p.made("nonzero", rows, (self.train_mask,))
        chosen = p.new(scores, "index")
        p.op("index", (out, picked), (chosen,), traffic=2 * scores + rows, pattern="random")
        labels = p.new(rows, "index")
        p.op("index", (self.y, picked), (labels,), traffic=3 * rows, pattern="random")
        logs = p.made("log_softmax", scores, (chosen,))
        p.op("nll_loss", (logs, labels), ())
        g_logs = p.made("nll_loss_backward", scores, (labels,))
        g_chosen = p.made("log_softmax_backward", scores, (g_logs, logs))
        p.free(g_logs, logs, labels, chosen)
        g = p.made("zeros", self._dense(s.classes))
        p.op("index_put", (g_chosen, picked), (g,), traffic=3 * scores + rows, pattern="random")
        p.free(g_chosen, picked)
        return g

    def _adam(self, gradients: tuple[int, ...]) -> None:
        changed = (*self.parameters, *self.state)
        self.program.op("adam", gradients, changed, flops=12 * sum(self.shapes))
        self.program.free(*gradients)


def _part(tensor: int, start: int, stop: int, itemsize: int) -> Access:
    return Access(tensor, start * itemsize, stop * itemsize)
