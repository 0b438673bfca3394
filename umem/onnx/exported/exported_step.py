"""A step of an exported model, training or inference, as a trace that nothing has run.

Models: what Chainer's recorder would have seen of the same functions: tensors, views, what the
tape keeps until the end of backward, gradients, an optimizer's state. Does not model: a loss (the
gradient of each output is there when backward begins), contents, what a framework fuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import get_args

from umem.errors import OnnxError
from umem.onnx.exported.computed_weights import statistics_of
from umem.onnx.exported.forward_memory import ForwardMemory, PlacedTensor
from umem.onnx.exported.onnx_fusion import fused
from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode, TensorType
from umem.onnx.exported.onnx_inference import inferred
from umem.onnx.exported.onnx_reading import read_onnx
from umem.onnx.exported.operators import OPERATORS, Operator
from umem.onnx.exported.strides import as_laid_out, packed, strides_of_view
from umem.onnx.exported.tape_backward import Gradients
from umem.onnx.exported.tape_calls import ForwardCall, TapeCall
from umem.onnx.exported.updates import OptimizerName, update_events
from umem.printable import quoted
from umem.trace.events import LEAF, OUTSIDE, Access, Alloc, Event, Op
from umem.trace.trace import Trace


@dataclass(frozen=True)
class ExportedStep:
    """A step of a model in ONNX.

    Attributes:
        trace: one step; its backend is ``model``, because nothing has run.
        names: the model's name for each call of forward that has a backward, in order.
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
        path: the file; weights in files beside it need not be there.
        sizes: a whole number of at least 1 for each dynamic axis, by its name in the model, or
            ``"x[0]"`` for one of the input ``x`` without a name.
        optimizer: whose state is counted; ``"none"``: no update.
        inference: the model is not trained: nothing is kept for a backward, dropout does nothing,
            and normalisations read their statistics.

    Raises:
        OnnxError: no such file, not a model in ONNX, an operator that is unknown or holds a
            graph, sizes that are missing or contradict the graph, a shape that depends on data,
            nothing to train, unless for inference. Names the node or the axis.
        MissingDependencyError: onnx is not installed.
    """
    if optimizer not in get_args(OptimizerName):
        known = ", ".join(get_args(OptimizerName))
        raise OnnxError(f"the optimizer is one of {known}; got {quoted(optimizer)}")
    graph = fused(inferred(read_onnx(path, sizes)))
    writer = _StepWriter(graph, inference=inference)
    events = list(writer.events(optimizer))
    if not writer.calls and not inference:
        raise OnnxError("no parameter of the model has a gradient: there is nothing to train")
    names = tuple(writer.names)
    return ExportedStep(Trace(events, "model", {"exported": "onnx"}), names)


class _StepWriter:
    """Walks a graph and writes the events of a step."""

    def __init__(self, graph: OnnxGraph, *, inference: bool) -> None:
        self.graph, self._inference = graph, inference
        self.calls: list[TapeCall] = []
        self.names: list[str] = []
        self._values: dict[str, PlacedTensor] = {}
        self._fresh = 0
        self._memory = ForwardMemory(graph)
        self._parameters: dict[str, Alloc] = {}
        self._host = {name for name in graph.tensors if graph.is_on_host(name)}
        made = {name for node in graph.nodes for name in node.outputs}
        self._statistics = statistics_of(graph) - made

    def events(self, optimizer: OptimizerName) -> Iterator[Event]:
        """Yield all events of the step."""
        for node in self.graph.nodes:
            if not self.graph.runs_on_host(node):
                yield from self._forward(node)
        gradients = Gradients(self._fresh)
        last = []
        for name in self.graph.outputs:
            value = self._values.get(name)
            if value is not None and value.source >= 0:
                yield from gradients.begin(name, value.kind.nbytes, "loss")
                last.append(value.source)
        yield from gradients.backward(self.calls, last)
        yield from self._memory.over()  # as in `optimizer.update(loss)`: the graph goes first
        yield from update_events(optimizer, self._parameters, gradients)

    # -- forward ---------------------------------------------------------------------------

    def _forward(self, node: OnnxNode) -> Iterator[Event]:
        """Yield the events of one operator: its output, function state, and frees after it."""
        operator = OPERATORS[node.op]
        names = [name for name in node.inputs if name and name not in self._host]
        for name in names:
            yield from self._given(name)
        ins = [self._values[name] for name in names]
        rank = max((value.rank for value in ins), default=0)
        has_gradient = self._gradients_of(node, operator)
        number = len(self.calls) if any(has_gradient) else None
        made: list[Event] = []
        outs = []
        for place, name in enumerate(node.outputs):
            if not name or (place and operator.statistics):
                continue  # running statistics lie where they were
            value = self._output(name, node, operator, made)
            outs.append(value)
            value.rank = rank + 1
            if number is not None and value.kind.is_float:
                value.source = number
        yield from made
        types = self._types(node.inputs), self._types(node.outputs)
        stash = self._stash(node, operator, types) if number is not None else []
        yield from stash
        writes = [value.access for value in outs]
        if not self._inference:
            writes += [self._values[n].access for n in names if n in self._statistics]
        writes += [Access(alloc.tensor, 0, alloc.nbytes) for alloc in stash]
        flops = outs[0].kind.size if operator.flops is None else operator.flops(node, *types)
        workspace = 0 if operator.workspace is None else operator.workspace(node, *types)
        reads = tuple(value.access for value in ins)
        traffic = _bytes(reads) + _bytes(writes)
        if operator.gathers:
            traffic = 2 * _bytes(writes) + _bytes(reads[1:])
        elif self._is_view(node) and not any(isinstance(event, Alloc) for event in made):
            traffic = flops = 0
        kind = operator.arithmetic(outs[0].kind)
        entry = None
        if number is not None:
            values = dict(zip(names, ins, strict=True))
            call = ForwardCall(
                node,
                operator,
                number,
                rank,
                has_gradient,
                values,
                outs,
                stash,
                flops,
                workspace,
                kind,
            )
            for value in call.kept:
                self._memory.hold(value.memory)
            self.calls.append(call.on_tape)
            self.names.append(node.name)
            entry = call.entry
        yield Op(
            node.op, "forward", reads, tuple(writes), flops, traffic,
            "random" if operator.gathers else "stream", workspace_bytes=workspace, entry=entry,
            arithmetic=kind,
        )  # fmt: skip
        yield from self._memory.gone(ins, outs)

    def _given(self, name: str) -> Iterator[Event]:
        """Yield the allocation of an input, parameter or statistic at its first use."""
        if name in self._values:
            return
        kind = self.graph.tensors[name]
        what = "input"
        source = OUTSIDE
        if name in self._statistics:
            what = "state"
        elif name in self.graph.parameters:
            what, source = "parameter", LEAF
        self._values[name] = PlacedTensor(
            kind, self._fresh, kind.nbytes, packed(kind.shape), source
        )
        alloc = Alloc(self._fresh, kind.nbytes, what, name, uploaded=True)
        self._fresh += 1
        if what == "parameter":
            self._parameters[name] = alloc
        yield alloc

    def _gradients_of(self, node: OnnxNode, operator: Operator) -> list[bool]:
        """Tell for each input of a node whether it has a gradient."""
        found = []
        for place, name in enumerate(node.inputs):
            value = self._values.get(name)
            is_trained = operator.trained is None or place < operator.trained
            is_trained = is_trained and not self._inference
            has = value is not None and value.source != OUTSIDE and is_trained
            found.append(has and operator.passes != "none")
        return found

    def _output(
        self, name: str, node: OnnxNode, operator: Operator, made: list[Event]
    ) -> PlacedTensor:
        """Place a node's output: a view of its input's memory if it can be, else new memory."""
        kind = self.graph.tensors[name]
        first = self._values.get(node.inputs[0]) if node.inputs else None
        is_view = self._is_view(node) or (node.op == "Cast" and first and first.kind == kind)
        if is_view and first is not None:
            strides = strides_of_view(
                node.op, first.kind.shape, first.strides, kind.shape, node.attributes.get("perm")
            )
            if strides is not None:
                value = PlacedTensor(kind, first.memory, first.memory_bytes, strides)
                self._values[name] = value
                self._memory.note(name, value.memory)
                return value
        strides = packed(kind.shape)
        if operator.elementwise and first is not None and first.kind.shape == kind.shape:
            strides = as_laid_out(kind.shape, first.strides)
        value = PlacedTensor(kind, self._fresh, kind.nbytes, strides)
        made.append(Alloc(self._fresh, kind.nbytes, "activation", node.op))
        self._memory.made(self._fresh)
        self._fresh += 1
        self._values[name] = value
        self._memory.note(name, value.memory)
        return value

    def _is_view(self, node: OnnxNode) -> bool:
        """Tell whether an operator's output can be a view of its input."""
        return OPERATORS[node.op].view or (self._inference and node.op == "Dropout")

    def _types(self, names: tuple[str, ...]) -> list[TensorType | None]:
        return [self.graph.tensors.get(name) for name in names]

    def _stash(
        self,
        node: OnnxNode,
        operator: Operator,
        types: tuple[list[TensorType | None], list[TensorType | None]],
    ) -> list[Alloc]:
        """Allocate the function state that a call keeps beside inputs and outputs."""
        found = []
        for label, work in operator.stash.items():
            found.append(Alloc(self._fresh, work(node, *types), "stash", f"{node.op}.{label}"))
            self._memory.made(self._fresh)
            self._memory.hold(self._fresh)
            self._fresh += 1
        return found


def _bytes(accesses: tuple[Access, ...] | list[Access]) -> int:
    return sum(stop - start for _, start, stop in accesses)
