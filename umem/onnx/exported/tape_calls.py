"""Calls as a tape remembers them: what each keeps, and where its gradients go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umem.onnx.exported.forward_memory import PlacedTensor
from umem.onnx.exported.onnx_graph import OnnxNode
from umem.onnx.exported.operators import Operator
from umem.trace.events import OUTSIDE, Access, Alloc, TapeEntry


@dataclass(frozen=True)
class GradientWay:
    """The destination of one input's gradient: tensor, bytes and memory.

    ``shared``: it is the output's gradient, or a view of it.
    """

    name: str
    nbytes: int
    shared: bool


@dataclass(frozen=True)
class TapeCall:
    """A call as backward sees it.

    Attributes:
        number: of its entry.
        label: the operator.
        rank: its distance from the inputs.
        outputs: names of its outputs.
        reads: its saved tensors.
        ways: the gradients that it makes.
        flops: its work.
        workspace_bytes: needed only while it runs.
        arithmetic: the kind of its work.
        before: numbers of the calls that made its inputs.
    """

    number: int
    label: str
    rank: int
    outputs: tuple[str, ...]
    reads: tuple[Access, ...]
    ways: tuple[GradientWay, ...]
    flops: int
    workspace_bytes: int
    arithmetic: str
    before: tuple[int, ...]


@dataclass(frozen=True)
class ForwardCall:
    """A call of forward that has a backward.

    Attributes:
        node, operator: of the call.
        number: of its entry.
        rank: its distance from the inputs.
        has_gradient: which of the node's inputs have a gradient.
        ins: its inputs in device memory, by name.
        outs: its outputs.
        stash: its function state.
        flops: its work.
        workspace_bytes: needed only while it runs.
        arithmetic: the kind of its work.
    """

    node: OnnxNode
    operator: Operator
    number: int
    rank: int
    has_gradient: Sequence[bool]
    ins: Mapping[str, PlacedTensor]
    outs: Sequence[PlacedTensor]
    stash: Sequence[Alloc]
    flops: int
    workspace_bytes: int
    arithmetic: str

    @property
    def kept(self) -> list[PlacedTensor]:
        """Return the saved tensors: inputs and outputs that backward reads."""
        places = self.operator.kept_inputs(self.has_gradient)
        names = [self.node.inputs[place] for place in places]
        found = [self.ins[name] for name in names if name in self.ins]
        return [*found, self.outs[0]] if self.operator.output else found

    @property
    def on_tape(self) -> TapeCall:
        """Return the call as backward sees it."""
        reads = [value.access for value in self.kept]
        reads += [Access(alloc.tensor, 0, alloc.nbytes) for alloc in self.stash]
        trained = [place for place, has in enumerate(self.has_gradient) if has]
        products = sum(place < 2 for place in trained)
        return TapeCall(
            self.number,
            self.node.op,
            self.rank,
            tuple(filter(None, self.node.outputs)),
            tuple(dict.fromkeys(reads)),
            tuple(map(self._way, trained)),
            self.flops * (products if self.operator.products else 1),
            self.workspace_bytes,
            self.arithmetic,
            tuple(self.ins[self.node.inputs[place]].source for place in trained),
        )

    def _way(self, place: int) -> GradientWay:
        """Describe the gradient of an input."""
        name = self.node.inputs[place]
        kind = self.ins[name].kind
        shared = self.operator.passes == "same" and not (self.node.op == "Sub" and place)
        if self.operator.elementwise and kind.shape != self.outs[0].kind.shape:
            shared = False  # summed over what was broadcast
        return GradientWay(name, kind.nbytes, shared)

    @property
    def entry(self) -> TapeEntry:
        """Return the call's entry on the trace's tape; inputs in device memory alone count."""
        inputs = self.node.inputs
        places = [place for place, name in enumerate(inputs) if name in self.ins]
        kept = self.operator.kept_inputs(self.has_gradient)
        sources = []
        for place in places:
            source = self.ins[inputs[place]].source
            sources.append(source if self.has_gradient[place] or source >= 0 else OUTSIDE)
        first, out = self.ins[inputs[places[0]]], self.outs[0]
        is_one = len(self.outs) == 1 == len(places) and out.memory == first.memory
        is_view = is_one and out.kind.nbytes == first.kind.nbytes
        return TapeEntry(
            self.number,
            tuple(sources),
            tuple(index for index, place in enumerate(places) if place in kept),
            self.operator.output,
            True,
            False,
            0 if is_view else sum(value.kind.nbytes for value in self.outs),
        )
