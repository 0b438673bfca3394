"""A graph from the forward pass of a recorded step."""

from __future__ import annotations

from typing import Literal

from umem.errors import GraphError
from umem.planner.node import Node
from umem.trace import Access, Alloc, Op, Trace

Cost = Literal["paper", "seconds", "flops"]
MADE = ("activation", "stash", "array")
"""The kinds of tensors that a call makes."""
NOT_AGAIN = frozenset((
    "Zoneout", "ZoneoutLSTM", "NegativeSampling", "NegativeSamplingFunction", "DropoutRNN",
    "Checkpoint", "Forget", "BatchRenormalizationFunction",
    "DecorrelatedBatchNormalization", "MultiNodeBatchNormalizationFunction",
    "PartAggregation", "OverParts", "ToParts",
))  # fmt: skip
"""Functions that are never recomputed: they draw new random numbers, change their inputs, or wait
for other ranks."""
DRAWS = frozenset((
    "Dropout", "GaussianDropout", "Gaussian", "GaussianNoise", "RReLU", "SimplifiedDropconnect",
    "GumbelSoftmax",
))  # fmt: skip
"""Functions that draw random numbers once, and reuse them when they are recomputed."""


def nodes_and_edges(trace: Trace, cost: Cost) -> tuple[list[Node], list[tuple[str, str]]]:
    """Return a node for each call of a trace's first forward pass, and the edges between them.

    A tensor is saved if it is still alive when forward ends. A call that writes no new tensor has
    made a view. Saved tensors of the kind ``stash`` are their call's function state. Inputs are
    found by tape entries in steps of ONNX models, and by their bytes in recorded steps, which have
    no tape entries; there, calls without a graph count as well, such as calls inside `F.forget`.

    Args:
        trace: a recorded step, or a forward pass whose result was still held at the end.
        cost: ``paper``: 10 for convolutions, 1 for anything else; ``seconds``: the time measured on
            the host; ``flops``.

    Raises:
        GraphError: the trace has no forward call, ``cost`` is unknown, or ``seconds`` is missing
            for a call.
    """
    if cost not in ("paper", "seconds", "flops"):
        raise GraphError(f"cost must be 'paper', 'seconds' or 'flops'; got {cost!r}")
    reader = _CallReader(trace, cost)
    has_tape = any(op.entry is not None for op in trace.ops)
    for index, event in enumerate(trace.events):
        if isinstance(event, Op) and event.phase == "forward":
            if event.entry is not None or not has_tape:  # what is not on the tape has no backward
                reader.add(event)
        elif isinstance(event, Op) and event.phase in ("backward", "update") and reader.calls:
            reader.end = index
            break
    if not reader.calls:
        raise GraphError("the trace has no forward call")
    return list(map(reader.node, range(len(reader.calls)))), reader.edges


class _CallReader:
    """Collects calls and the edges between them from the operations of a trace."""

    def __init__(self, trace: Trace, cost: Cost) -> None:
        self.calls: list[Op] = []
        self.end = len(trace.events)
        self._lives = trace.lifetimes()
        self._cost = cost
        self._names: list[str] = []
        self._made: list[list[Alloc]] = []
        self._bases: list[str | None] = []
        self._writers: dict[Access, str] = {}
        self._last_writers: dict[int, str] = {}
        self._by_number: dict[int, str] = {}
        self.edges: list[tuple[str, str]] = []

    def add(self, op: Op) -> None:
        """Add a call: edges from its inputs, the tensors that it makes, the base of a view."""
        name = f"{op.name}#{len(self.calls)}"
        inputs = self._inputs(op, name)
        self.edges += [(writer, name) for writer in dict.fromkeys(inputs)]
        made: list[Alloc] = []
        base = self._base(op) if op.entry is not None else None
        for access in op.writes:
            alloc = self._lives[access.tensor].alloc
            if access.tensor in self._last_writers:
                writer = self._writer(access)
                if op.entry is None and writer != name:  # a call's own earlier output is no base
                    base = writer
            elif not alloc.uploaded and alloc.kind in MADE:
                made.append(alloc)
            if alloc.kind not in ("stash", "parameter", "input", "state"):
                self._writers[access] = self._last_writers[access.tensor] = name
        if base is not None and base not in inputs:
            self.edges.append((base, name))
        self.calls.append(op)
        self._names.append(name)
        self._made.append(made)
        self._bases.append(base)

    def _inputs(self, op: Op, name: str) -> list[str]:
        """Return the calls that made an operation's inputs, by its tape entry or by their bytes."""
        if op.entry is None:
            found = map(self._writer, op.reads)
        else:
            self._by_number[op.entry.number] = name
            found = map(self._by_number.get, op.entry.sources)
        return [writer for writer in found if writer is not None]

    def _base(self, op: Op) -> str | None:
        """Return the first input call whose output an operation on the tape views; None: none."""
        assert op.entry is not None
        written = {access.tensor for access in op.writes}
        found = zip(op.entry.sources, op.reads, strict=False)
        bases = [self._by_number.get(source) for source, read in found if read.tensor in written]
        return next((base for base in bases if base is not None), None)

    def _writer(self, access: Access) -> str | None:
        """Return the last call that wrote exactly these bytes, else that wrote the tensor."""
        return self._writers.get(access) or self._last_writers.get(access.tensor)

    def node(self, index: int) -> Node:
        """Make the node of a call; only after all calls have been added."""
        op, made, base = self.calls[index], self._made[index], self._bases[index]
        outputs = [alloc for alloc in made if alloc.kind != "stash"]
        stashes = [alloc for alloc in made if alloc.kind == "stash" and self._is_saved(alloc)]
        is_view = base is not None and not made
        written = [self._lives[access.tensor].alloc for access in op.writes] if is_view else outputs
        return Node(
            name=self._names[index],
            nbytes=sum(alloc.nbytes for alloc in outputs),
            cost=self._cost_of(op),
            saved=any(map(self._is_saved, written)),
            alias_of=base if is_view else None,
            recomputable=op.name not in NOT_AGAIN,
            stash_bytes=sum(alloc.nbytes for alloc in stashes),
            workspace_bytes=op.workspace_bytes or 0,
        )

    def _is_saved(self, alloc: Alloc) -> bool:
        death = self._lives[alloc.tensor].death
        return death is None or death > self.end

    def _cost_of(self, op: Op) -> float:
        if self._cost == "paper":
            return 10 if "onvolution" in op.name else 1
        if self._cost == "flops":
            return op.flops
        if op.host_seconds is None:
            raise GraphError(f"{op.name!r} has no time: record the trace with measure='time'")
        return op.host_seconds
