"""A step of an exported model, for training or inference, as a trace made without a run.

Models: the events that Chainer's recorder would see for the same functions: tensors, views, tensors
that the tape keeps until the end of backward, gradients, an optimizer's state. Does not model: a
loss (the gradients of the outputs exist when backward begins), contents, a framework's fusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import get_args

from umem._common.printable import quoted
from umem.errors import OnnxError
from umem.onnx.exported.computed_weights import statistics_of
from umem.onnx.exported.onnx_fusion import fused
from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode, TensorType
from umem.onnx.exported.onnx_inference import inferred
from umem.onnx.exported.onnx_reading import read_onnx
from umem.onnx.exported.operators import OPERATORS, Operator
from umem.onnx.exported.strides import Ints, as_laid_out, packed, strides_of_view
from umem.onnx.exported.tape_backward import (
    Gradients,
    GradientWay,
    OptimizerName,
    TapeCall,
    update_events,
)
from umem.planner import Cost, Graph
from umem.trace import LEAF, OUTSIDE, Access, Alloc, Event, Free, Op, TapeEntry, Trace


@dataclass(frozen=True)
class ExportedStep:
    """A step of a model in ONNX.

    Attributes:
        trace: one step; its backend is ``model``, because nothing was run.
        names: the model's name for each forward call that has a backward, in order.
    """

    trace: Trace
    names: tuple[str, ...]


def onnx_step(
    path: str | PathLike[str],
    sizes: Mapping[str, int] | None = None,
    optimizer: OptimizerName = "adam",
    *,
    inference: bool = False,
) -> ExportedStep:
    """Make a step of a model in ONNX: forward, backward and update, or forward alone.

    Args:
        path: the file; files with weights beside it may be missing.
        sizes: a whole number of at least 1 for each dynamic axis, by its name in the model, or as
            ``"x[0]"`` for an unnamed axis of the input ``x``.
        optimizer: the optimizer whose state counts; ``"none"``: no update.
        inference: make an inference step: no tensor is kept for backward, dropout does nothing, and
            normalisations read their statistics.

    Raises:
        OnnxError: the file does not exist or is not an ONNX model; an operator is unknown or holds
            a graph; sizes are missing or contradict the graph; a shape depends on data; or the
            model has no parameter to train, except for inference. Names the node or the axis.
        MissingDependencyError: onnx is not installed.
    """
    if optimizer not in get_args(OptimizerName):
        known = ", ".join(get_args(OptimizerName))
        raise OnnxError(f"optimizer must be one of {known}; got {quoted(optimizer)}")
    read = read_onnx(path, sizes)
    graph = fused(inferred(read), read)
    writer = _StepWriter(graph, inference=inference)
    events = list(writer.events(optimizer))
    if not writer.calls and not inference:
        raise OnnxError("no parameter of the model has a gradient: there is nothing to train")
    names = tuple(writer.names)
    return ExportedStep(Trace(events, "model", {"exported": "onnx"}), names)


def graph_of(
    path: str | PathLike[str], sizes: Mapping[str, int] | None = None, cost: Cost = "flops"
) -> Graph:
    """Return the graph of a model's forward pass, for `umem.planner.plan`.

    Args:
        path: see `onnx_step`.
        sizes: see `onnx_step`.
        cost: see `umem.planner.from_trace`; ``seconds`` is not possible, because no time is known.

    Raises:
        OnnxError, MissingDependencyError: see `onnx_step`. GraphError: ``cost`` is unknown.
    """
    return Graph.from_trace(onnx_step(path, sizes, "none").trace, cost)


@dataclass
class _Placed:
    """A tensor of the graph, and its memory.

    Attributes:
        kind: its shape and type.
        memory: the access to the whole tensor of the trace that it is, or is a view of.
        strides: its strides, in elements.
        source: the call that made it, or none, as in a `TapeEntry`.
        rank: the largest number of calls on a tape before it.
    """

    kind: TensorType
    memory: Access
    strides: Ints
    source: int = OUTSIDE
    rank: int = 0


class _StepWriter:
    """Walks a graph and writes the events of a step."""

    def __init__(self, graph: OnnxGraph, *, inference: bool) -> None:
        self.graph, self._inference = graph, inference
        self.calls: list[TapeCall] = []
        self.names: list[str] = []
        self._values: dict[str, _Placed] = {}
        self._fresh = 0
        self._parameters: dict[str, Alloc] = {}
        self._host = {name for name in graph.tensors if graph.is_on_host(name)}
        made = {name for node in graph.nodes for name in node.outputs}
        self._statistics = statistics_of(graph) - made
        self._nodes = [node for node in graph.nodes if not graph.runs_on_host(node)]
        # Memory that forward allocates: its future uses in forward, whether it stays until the end
        # of backward, and its contents.
        self._uses = Counter(name for node in self._nodes for name in node.inputs)
        self._waiting: Counter[int] = Counter()
        self._held: set[int] = set()
        self._alive: dict[int, None] = {}

    def events(self, optimizer: OptimizerName) -> Iterator[Event]:
        """Yield all events of the step."""
        for node in self._nodes:
            yield from self._forward(node)
        gradients = Gradients(self._fresh)
        last = []
        for name in self.graph.outputs:
            value = self._values.get(name)
            if value is not None and value.source >= 0:
                yield from gradients.begin(name, value.kind.nbytes, "loss")
                last.append(value.source)
        yield from gradients.backward(self.calls, last)
        yield from map(Free, self._alive)  # as in `optimizer.update(loss)`: the graph goes first
        yield from update_events(optimizer, self._parameters, gradients)

    # -- forward ---------------------------------------------------------------------------

    def _forward(self, node: OnnxNode) -> Iterator[Event]:
        """Yield the events of one operator: its output, function state, and frees after it."""
        operator = OPERATORS[node.op]
        on_device = [name if name not in self._host else "" for name in node.inputs]
        for name in filter(None, on_device):
            if name not in self._values:
                yield self._given(name)
        values = [self._values[name] if name else None for name in on_device]
        ins = [value for value in values if value is not None]
        has_gradient = [self._has_gradient(*pair, operator) for pair in enumerate(values)]
        number = len(self.calls) if any(has_gradient) else None
        rank = max((value.rank for value in ins), default=0)
        made: list[Alloc] = []
        outs = []
        for place, name in enumerate(node.outputs):
            if name and not (place and operator.statistics):  # those lie where they were
                value = self._output(name, node, operator, made)
                outs.append(value)
                value.rank = rank + 1
                if number is not None and value.kind.is_float:
                    value.source = number
        is_view = self._is_view(node) and not made
        types = self._types(node.inputs), self._types(node.outputs)
        stash = [
            self._new(work(node, *types), "stash", f"{node.op}.{label}")
            for label, work in (operator.stash.items() if number is not None else ())
        ]
        yield from made
        yield from stash
        self._held.update(alloc.tensor for alloc in stash)
        writes = [value.memory for value in outs]
        if not self._inference:
            writes += [self._values[n].memory for n in on_device if n in self._statistics]
        writes += [Access(alloc.tensor, 0, alloc.nbytes) for alloc in stash]
        reads = [value.memory for value in ins]
        flops = outs[0].kind.size if operator.flops is None else operator.flops(node, *types)
        traffic = _bytes(reads) + _bytes(writes)
        if operator.gathers:
            traffic = 2 * _bytes(writes) + _bytes(reads[1:])
        elif is_view:
            traffic = flops = 0
        op = Op(
            node.op, "forward", tuple(reads), tuple(writes), flops, traffic,
            "random" if operator.gathers else "stream",
            workspace_bytes=0 if operator.workspace is None else operator.workspace(node, *types),
            arithmetic=operator.arithmetic(outs[0].kind),
        )  # fmt: skip
        if number is not None:
            op = op._replace(entry=self._on_tape(op, node, rank, values, has_gradient, outs, stash))
        yield op
        for value in ins:
            self._waiting[value.memory.tensor] -= 1
        for memory in dict.fromkeys(value.memory.tensor for value in (*ins, *outs)):
            if memory in self._alive and not self._waiting[memory] and memory not in self._held:
                del self._alive[memory]
                yield Free(memory)

    def _on_tape(
        self,
        op: Op,
        node: OnnxNode,
        rank: int,
        values: Sequence[_Placed | None],
        has_gradient: Sequence[bool],
        outs: Sequence[_Placed],
        stash: Sequence[Alloc],
    ) -> TapeEntry:
        """Note a call for backward, and hold its saved tensors; return its entry on the tape."""
        operator, number, out = OPERATORS[node.op], len(self.calls), outs[0]
        present = [(place, value) for place, value in enumerate(values) if value is not None]
        places = operator.kept_inputs(has_gradient)
        kept = [value for place, value in present if place in places] + [out] * operator.output
        self._held.update(value.memory.tensor for value in kept)
        reads = [value.memory for value in kept]
        reads += [Access(alloc.tensor, 0, alloc.nbytes) for alloc in stash]
        ways, before = [], []
        for place, value in present:
            if has_gradient[place]:
                shared = operator.passes == "same" and not (node.op == "Sub" and place)
                if operator.elementwise and value.kind.shape != out.kind.shape:
                    shared = False  # summed over what was broadcast
                ways.append(GradientWay(node.inputs[place], value.kind.nbytes, shared))
                before.append(value.source)
        products = sum(has_gradient[:2]) if operator.products else 1
        outputs = tuple(filter(None, node.outputs))
        unique = tuple(dict.fromkeys(reads))
        self.calls.append(
            TapeCall(op, rank, outputs, unique, tuple(ways), op.flops * products, tuple(before))
        )
        self.names.append(node.name)
        first = present[0][1]
        is_one = len(outs) == 1 == len(present) and out.memory == first.memory
        is_view = is_one and out.kind.nbytes == first.kind.nbytes
        return TapeEntry(
            number,
            tuple(
                value.source if has_gradient[place] or value.source >= 0 else OUTSIDE
                for place, value in present
            ),
            tuple(index for index, (place, _) in enumerate(present) if place in places),
            operator.output,
            0 if is_view else sum(value.kind.nbytes for value in outs),
        )

    def _given(self, name: str) -> Alloc:
        """Place an input, parameter or statistic at its first use."""
        kind = self.graph.tensors[name]
        what, source = "input", OUTSIDE
        if name in self._statistics:
            what = "state"
        elif name in self.graph.parameters:
            what, source = "parameter", LEAF
        alloc = Alloc(self._fresh, kind.nbytes, what, name, uploaded=True)
        self._fresh += 1
        whole = Access(alloc.tensor, 0, kind.nbytes)
        self._values[name] = _Placed(kind, whole, packed(kind.shape), source)
        if what == "parameter":
            self._parameters[name] = alloc
        return alloc

    def _has_gradient(self, place: int, value: _Placed | None, operator: Operator) -> bool:
        """Tell whether an input of an operator has a gradient."""
        is_trained = operator.trained is None or place < operator.trained
        is_trained = is_trained and operator.passes != "none" and not self._inference
        return is_trained and value is not None and value.source != OUTSIDE

    def _output(self, name: str, node: OnnxNode, operator: Operator, made: list[Alloc]) -> _Placed:
        """Place a node's output: a view of its input's memory if it can be, else new memory."""
        kind = self.graph.tensors[name]
        first = self._values.get(node.inputs[0]) if node.inputs else None
        is_view = self._is_view(node) or (node.op == "Cast" and first and first.kind == kind)
        strides = None
        if is_view and first is not None:
            strides = strides_of_view(
                node.op, first.kind.shape, first.strides, kind.shape, node.attributes.get("perm")
            )
        if strides is not None and first is not None:
            value = _Placed(kind, first.memory, strides)
        else:
            strides = packed(kind.shape)
            if operator.elementwise and first is not None and first.kind.shape == kind.shape:
                strides = as_laid_out(kind.shape, first.strides)
            made.append(self._new(kind.nbytes, "activation", node.op))
            value = _Placed(kind, Access(made[-1].tensor, 0, kind.nbytes), strides)
        self._values[name] = value
        self._waiting[value.memory.tensor] += self._uses[name]
        if name in self.graph.outputs:
            self._held.add(value.memory.tensor)
        return value

    def _is_view(self, node: OnnxNode) -> bool:
        """Tell whether an operator's output can be a view of its input."""
        return OPERATORS[node.op].view or (self._inference and node.op == "Dropout")

    def _types(self, names: tuple[str, ...]) -> list[TensorType | None]:
        return [self.graph.tensors.get(name) for name in names]

    def _new(self, nbytes: int, kind: str, label: str) -> Alloc:
        """Allocate memory for forward."""
        alloc = Alloc(self._fresh, nbytes, kind, label)
        self._alive[self._fresh] = None
        self._fresh += 1
        return alloc


def _bytes(accesses: Sequence[Access]) -> int:
    return sum(stop - start for _, start, stop in accesses)
