"""The planning problem of a step, as `umem.chainer.Recompute` has it of a running one.

A graph of `umem.planner.from_trace`, with facts that only a whole step shows: gradients of
parameters, which backward makes and keeps; those of the previous step, which stay until forward
is over; and random draws, which no plan drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from umem.devices.specs import COSTS, GPUS
from umem.errors import GraphError
from umem.planner import Graph
from umem.planner.from_trace import DRAWS, MADE, is_call
from umem.planner.problem import CallFacts, Problem
from umem.trace.analysis.updating import chunked_update
from umem.trace.events import LEAF, Alloc, Event, Free, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

FLOPS_PER_BYTE = median(
    COSTS.compute_efficiency * gpu.fp32_rate / (COSTS.memory_efficiency * gpu.memory_bandwidth)
    for gpu in GPUS.values()
)
"""Operations in the time of a byte of device memory's traffic, the median of the table's GPUs."""


PACKED = "Dropout"
"""The function whose masks are kept as bits."""
BITS = 32
"""Bits of an element of a mask, which is packed into one bit."""
OpCost = Callable[[Op], float]
"""The cost of an operation, in any unit."""


def is_mask(op: Op, alloc: Alloc) -> bool:
    """Return True if a tensor that a call makes is a mask that is kept as bits."""
    return op.name == PACKED and alloc.kind == "stash"


def packed_bytes(nbytes: int) -> int:
    """Return the bytes of a mask's bits."""
    return -(-nbytes // BITS)


def cost_in_bytes(op: Op) -> float:
    """Return the time of an operation on a median GPU, in bytes of device memory's traffic."""
    copied = 0 if op.kernels is None else op.kernels.copied_bytes
    return max(op.flops / FLOPS_PER_BYTE, op.traffic_bytes) + copied


def problem_of(trace: Trace, cost: OpCost = cost_in_bytes) -> Problem:
    """Return the planning problem of a step's forward pass and backward.

    The cost of recomputing a call is by default `cost_in_bytes`: one plan serves all GPUs.

    Args:
        trace: of one step or of several alike, in which gradients of the step before stay.
        cost: of an operation.

    Raises:
        GraphError: no backward follows the forward pass.
    """
    first = next(passes(trace), None)
    if first is None:
        raise GraphError("the step has no backward, so that there is nothing to recompute for")
    graph = Graph.from_trace(trace)
    number = {name: index for index, name in enumerate(first.names)}
    edges = tuple((number[source], number[user]) for source, user in graph.edges)
    updates = {t: nbytes for t, nbytes in _updates(trace).items() if t in first.near}
    nodes = {number[node.name]: node for node in graph.nodes}
    saved = [nodes[index].saved for index in range(len(nodes))]
    tape = _from_entries(trace, first, saved, cost)
    calls = []
    for index, (op, made) in enumerate(zip(first.calls, first.made, strict=True)):
        node = nodes[index]
        drawn = _drawn_bytes(op, made)
        mask = drawn if op.name == PACKED else 0
        calls.append(
            CallFacts(
                label=op.name,
                nbytes=node.nbytes,
                cost=cost(op),
                grad_bytes=tape.gradient_bytes[index],
                alias=None if node.alias_of is None else number[node.alias_of],
                stash_bytes=max(0, node.stash_bytes - drawn),
                drawn_bytes=drawn,
                mask_bytes=mask,
                packed_bytes=packed_bytes(mask),
                again=node.recomputable,
                workspace_bytes=node.workspace_bytes,
                backward_workspace_bytes=tape.workspace.get(index, 0),
                backward_cost=tape.backward_cost.get(index),
                stays_bytes=tape.stays.get(index, 0),
                needs=tape.needs[index],
                dead=index in tape.dead,
            )
        )
    allocs = allocations(trace.events)
    updating = [op for op in trace.ops if op.phase == "update"]
    return Problem(
        tuple(calls),
        edges,
        _constant_bytes(trace, first),
        sum(updates.values()),
        tape.order,
        update_bytes=max((chunked_update(op, allocs) for op in updating), default=0),
        whole_update_bytes=max((op.workspace_bytes or 0 for op in updating), default=0),
    )


def _drawn_bytes(op: Op, made: list[Alloc]) -> int:
    return sum(a.nbytes for a in made if a.kind == "stash") if op.name in DRAWS else 0


def _updates(trace: Trace) -> dict[int, int]:
    """Return the bytes of the gradient of each updated parameter, by the parameter's tensor."""
    kinds = allocations(trace.events)
    found: dict[int, int] = {}
    for op in trace.ops:
        if op.phase == "update":
            gradients = {a.tensor for a in op.reads if kinds[a.tensor].kind == "gradient"}
            for access in op.writes:
                if kinds[access.tensor].kind == "parameter":
                    found.setdefault(access.tensor, sum(kinds[t].nbytes for t in gradients))
    return found


@dataclass
class _Tape:
    """The facts of a tape, by the index of each call.

    Attributes:
        needs: the calls whose outputs a call's backward reads.
        gradient_bytes: bytes of the gradients of a call's outputs.
        order: a call's place in backward, where backward runs it.
        workspace: bytes of a call's backward beyond those alive at its end.
        backward_cost: cost of a call's backward.
        stays: bytes of the leaves' gradients that a call's backward is the first to make.
        dead: calls that backward does not run and whose graph is freed before.
    """

    needs: list[tuple[int, ...]]
    gradient_bytes: list[int]
    order: dict[int, int] = field(default_factory=dict)
    workspace: dict[int, int] = field(default_factory=dict)
    backward_cost: dict[int, float] = field(default_factory=dict)
    stays: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)


def _from_entries(trace: Trace, first: ForwardPass, saved: Sequence[bool], cost: OpCost) -> _Tape:
    """Return the facts of a pass's tape from the entries that the trace recorded for its calls.

    Args:
        trace: begins with the pass.
        first: the pass.
        saved: by call, whether a tensor that it writes is alive when forward has ended.
        cost: of an operation.
    """
    entries = [op.entry for op in first.calls if op.entry is not None]
    index: dict[int, int] = {}
    needs = []
    for place, entry in enumerate(entries):
        read = [index[s] for i in entry.retained if (s := entry.sources[i]) in index]
        needs.append(tuple(dict.fromkeys([*read, *[place] * entry.retains_outputs])))
        index[entry.number] = place
    tape = _Tape(needs, [entry.gradient_bytes for entry in entries])
    allocs = allocations(trace.events)
    seen: set[int] = set()
    for place in reversed(range(len(entries))):  # backward comes to its leaves first
        for source, access in zip(entries[place].sources, first.calls[place].reads, strict=False):
            if source == LEAF and access.tensor not in seen:
                seen.add(access.tensor)
                tape.stays[place] = tape.stays.get(place, 0) + allocs[access.tensor].nbytes
    _follow_backward(trace.events[first.turn :], index, tape, cost)
    held: set[int] = set()  # calls that the graph of a later call refers to
    for place in reversed(range(len(entries))):
        if place in tape.order or saved[place] or place in held:
            held.update(index[source] for source in entries[place].sources if source in index)
        else:
            tape.dead.add(place)
    return tape


def _follow_backward(
    events: Sequence[Event], index: Mapping[int, int], tape: _Tape, cost: OpCost
) -> None:
    """Add to a tape the order, workspace and cost of each call's backward, from the marks."""
    sizes: dict[int, int] = {}
    level, spent = 0, 0.0
    peak: int | None = None  # of the step, once it has run an operation
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.tensor] = event.nbytes
            level += event.nbytes
        elif isinstance(event, Free):
            level -= sizes.pop(event.tensor, 0)
        elif isinstance(event, Op):
            if event.phase != "backward":
                break
            now = level + (event.workspace_bytes or 0)
            peak = now if peak is None else max(peak, now)
            spent += cost(event)
        elif isinstance(event, Mark) and event.label == "backward":
            call = None if event.entry is None else index.get(event.entry)
            if call is not None:
                tape.order.setdefault(call, len(tape.order))
                tape.workspace[call] = 0 if peak is None else max(0, peak - level)
                tape.backward_cost[call] = spent
            peak, spent = None, 0.0


def _constant_bytes(trace: Trace, first: ForwardPass) -> int:
    """Return the bytes of the tensors that a pass uses and does not make, and that updates write.

    Of what updates write, parameters and optimizer state count, whether or not the pass uses them.
    """
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

    Calls and the tensors that they make are as in `umem.planner.from_trace`.

    Attributes:
        calls: the operations, in order.
        made: the tensors that each call makes.
        near: for each tensor, the calls that read or write it.
        start: the index of the first event of the pass.
        turn: the index of the first event of its backward.
    """

    calls: list[Op] = field(default_factory=list)
    made: list[list[Alloc]] = field(default_factory=list)
    near: dict[int, set[int]] = field(default_factory=dict)
    start: int = 0
    turn: int = 0

    @property
    def names(self) -> list[str]:
        """Return the names of the calls as nodes of a graph, such as ``"ReLU#3"``."""
        return [f"{op.name}#{index}" for index, op in enumerate(self.calls)]

    @property
    def allocs(self) -> Iterator[Alloc]:
        """Return the allocations of all tensors that the calls make."""
        return (alloc for made in self.made for alloc in made)

    def calls_near(self, op: Op) -> set[int]:
        """Return the calls whose backward an operation may be part of; empty if unknown.

        The backward of a call reads no tensors of forward but those that the call read or made.
        """
        near = [self.near[tensor] for tensor, _, _ in op.reads if tensor in self.near]
        return set.intersection(*near) if near else set()

    def add(self, op: Op, allocs: dict[int, Alloc]) -> None:
        """Append a call, which makes the tensors it writes that no earlier call has used."""
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
    """Yield each run of forward calls that a backward follows, in order."""
    allocs: dict[int, Alloc] = {}
    now = ForwardPass()
    before = 0  # the event after the last operation
    has_entries = trace.has_entries
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            allocs[event.tensor] = event
        elif isinstance(event, Op):
            if is_call(event, has_entries):
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
