"""The planning problem of a recorded step, as `umem.chainer.Recompute` has it of a running one.

A graph of `umem.planner.from_trace`, with what only a whole step shows: gradients of parameters,
which come in backward and stay, those of the step before, which stay until forward is over, and
what calls draw at random, which no plan drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from umem.devices.specs import COSTS, GPUS
from umem.errors import GraphError
from umem.planner import Graph
from umem.planner.from_trace import MADE
from umem.planner.problem import CallFacts, Problem
from umem.predict.techniques.drawn import DRAWS, PACKED, packed_bytes
from umem.trace.trace import Alloc, Op, Trace, tail
from umem.trace.walk import allocations

FLOPS_PER_BYTE = median(
    COSTS.compute_efficiency * gpu.fp32_rate / (COSTS.memory_efficiency * gpu.memory_bandwidth)
    for gpu in GPUS.values()
)
"""Operations in the time of a byte of device memory's traffic, on the GPU in the middle."""


def problems_of(trace: Trace) -> list[Problem]:
    """Return what there is to plan in a trace, by the first pass of each kind.

    What running a call again costs is what the model of a GPU says, arithmetic or traffic, for a
    GPU in the middle of the table: one plan serves all of them, and no noise of a measured time
    changes it.

    Raises:
        GraphError: no backward follows a forward pass.
    """
    kinds: dict[tuple[str, ...], ForwardPass] = {}
    for one in passes(trace):
        kinds.setdefault(tuple(one.names), one)
    if not kinds:
        raise GraphError("the trace has no backward, so that there is nothing to run again for")
    return [_problem(tail(trace, one.start)) for one in kinds.values()]


def _problem(trace: Trace) -> Problem:
    first = next(passes(trace))
    graph = Graph.from_trace(trace)
    number = {name: index for index, name in enumerate(first.names)}
    edges = tuple((number[source], number[user]) for source, user in graph.edges)
    updates = {t: nbytes for t, nbytes in _updates(trace).items() if t in first.near}
    stays = _stays(first, updates)
    workspace = _backward_workspace(trace, first)
    nodes = {number[node.name]: node for node in graph.nodes}
    inputs: dict[int, list[int]] = {}
    for source, user in edges:
        inputs.setdefault(user, []).append(source)
    calls = []
    for index, (op, made) in enumerate(zip(first.calls, first.made, strict=True)):
        node = nodes[index]
        alias = None if node.alias_of is None else number[node.alias_of]
        drawn = _drawn_bytes(op, made)
        mask = drawn if op.name == PACKED else 0
        near = dict.fromkeys([*inputs.get(index, ()), index])
        calls.append(
            CallFacts(
                label=op.name,
                nbytes=node.nbytes,
                cost=max(op.flops / FLOPS_PER_BYTE, op.traffic_bytes),
                grad_bytes=0 if alias is not None else node.nbytes,
                alias=alias,
                stash_bytes=max(0, node.stash_bytes - drawn),
                drawn_bytes=drawn,
                mask_bytes=mask,
                packed_bytes=packed_bytes(mask),
                again=node.recomputable,
                workspace_bytes=node.workspace_bytes,
                backward_workspace_bytes=workspace[index],
                stays_bytes=stays[index],
                needs=tuple(n for n in near if nodes[n].saved),
            )
        )
    backward = {index: len(calls) - index for index in range(len(calls))}
    constant = _constant_bytes(trace, first)
    return Problem(tuple(calls), edges, constant, sum(updates.values()), backward)


def _drawn_bytes(op: Op, made: list[Alloc]) -> int:
    return sum(a.nbytes for a in made if a.kind == "stash") if op.name in DRAWS else 0


def _updates(trace: Trace) -> dict[int, int]:
    """The parameters that the first step updates, and the bytes of the gradient of each."""
    kinds = allocations(trace.events)
    found: dict[int, int] = {}
    for op in trace.ops:
        if op.phase == "update":
            gradients = {a.tensor for a in op.reads if kinds[a.tensor].kind == "gradient"}
            for access in op.writes:
                if kinds[access.tensor].kind == "parameter":
                    found.setdefault(access.tensor, sum(kinds[t].nbytes for t in gradients))
    return found


def _stays(first: ForwardPass, updates: dict[int, int]) -> list[int]:
    """By call, the gradients that its backward is the first to make."""
    stays = [0] * len(first.calls)
    for tensor, nbytes in updates.items():
        if tensor in first.near:
            stays[max(first.near[tensor])] += nbytes
    return stays


def _backward_workspace(trace: Trace, first: ForwardPass) -> list[int]:
    """By call, the most that an operation of its backward needs only while it runs."""
    found = [0] * len(first.calls)
    for event in trace.events[first.turn :]:
        if isinstance(event, Op):
            if event.phase != "backward":
                break
            call = max(first.calls_near(event), default=None)
            if call is not None:
                found[call] = max(found[call], event.workspace_bytes or 0)
    return found


def _constant_bytes(trace: Trace, first: ForwardPass) -> int:
    """All that the pass reads and no call made, and the state of what is updated."""
    made = {alloc.tensor for alloc in first.allocs}
    allocs = allocations(trace.events)
    beside = {tensor for tensor in first.near if tensor not in made}
    beside |= {
        access.tensor
        for op in trace.ops
        if op.phase == "update"
        for access in op.writes
        if allocs[access.tensor].kind in ("parameter", "state")
    }
    return sum(allocs[tensor].nbytes for tensor in beside)


# -- the forward passes of a trace ----------------------------------------------------------------


@dataclass
class ForwardPass:
    """The calls of a forward pass that a backward follows.

    Calls and what they make are those of `umem.planner.from_trace`.

    Attributes:
        calls: the operations, in order.
        made: the tensors that each call makes.
        near: for each tensor, the calls that read or write it.
        start: the index of the first event that is its own.
        turn: the index of the first event that is backward's.
    """

    calls: list[Op] = field(default_factory=list)
    made: list[list[Alloc]] = field(default_factory=list)
    near: dict[int, set[int]] = field(default_factory=dict)
    start: int = 0
    turn: int = 0

    @property
    def names(self) -> list[str]:
        """The names that the calls have as nodes of a graph."""
        return [f"{op.name}#{index}" for index, op in enumerate(self.calls)]

    @property
    def allocs(self) -> Iterator[Alloc]:
        """All that its calls make."""
        return (alloc for made in self.made for alloc in made)

    def calls_near(self, op: Op) -> set[int]:
        """The calls whose backward an operation may be of; empty where nothing tells.

        The backward of a call reads what the call read and made, nothing else of forward.
        """
        near = [self.near[tensor] for tensor, _, _ in op.reads if tensor in self.near]
        return set.intersection(*near) if near else set()

    def add(self, op: Op, allocs: dict[int, Alloc]) -> None:
        """Append a call; it makes what nobody has used before it."""
        index = len(self.calls)
        made: list[Alloc] = []
        for access in op.writes:
            alloc = allocs[access.tensor]
            is_new = access.tensor not in self.near and alloc not in made
            if is_new and not alloc.uploaded and alloc.kind in MADE:
                made.append(alloc)
        for access in (*op.reads, *op.writes):
            self.near.setdefault(access.tensor, set()).add(index)
        self.calls.append(op)
        self.made.append(made)


def passes(trace: Trace) -> Iterator[ForwardPass]:
    """Each run of forward calls that a backward follows, in order."""
    allocs: dict[int, Alloc] = {}
    now = ForwardPass()
    before = 0  # the event after the last operation
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            allocs[event.tensor] = event
        elif isinstance(event, Op):
            if event.phase == "forward":
                if not now.calls:
                    now.start = before
                now.add(event, allocs)
            elif now.calls and event.phase == "backward":
                now.turn = before
                yield now
                now = ForwardPass()
            elif event.phase == "update":
                now = ForwardPass()
            before = index + 1
