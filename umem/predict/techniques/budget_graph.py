"""The graph that `umem.chainer.Recompute` plans with, from a trace, and the bytes beside it.

A graph of `umem.planner.from_trace`, with what only a whole step shows: gradients of parameters,
which come in backward and stay, those of the step before, which stay until forward is over, and
what calls draw at random, which no plan drops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from umem.devices.specs import COSTS, GPUS
from umem.errors import BudgetError, GraphError
from umem.planner import Graph, Node, Plan, plan
from umem.planner.from_trace import MADE
from umem.predict.techniques.drawn import DRAWS, PACKED, packed_bytes
from umem.trace.trace import Alloc, Op, Trace, tail
from umem.trace.walk import allocations, used_bytes
from umem.units import format_apart

FLOPS_PER_BYTE = median(
    COSTS.compute_efficiency * gpu.fp32_rate / (COSTS.memory_efficiency * gpu.memory_bandwidth)
    for gpu in GPUS.values()
)
"""Operations in the time of a byte of device memory's traffic, on the GPU in the middle."""


@dataclass(frozen=True)
class PassGraphs:
    """A forward pass, and the backward after it.

    Attributes:
        whole: the graph where dropout's masks are there in full all the time.
        packing: the graph where they are bits but while they are used.
        beside_bytes: parameters, state, inputs and what was drawn; no plan drops them.
        packed_bytes: the same with masks as bits.
        plain_bytes: the most that it takes as it is; budgets are shares of that.
    """

    whole: Graph
    packing: Graph
    beside_bytes: int
    packed_bytes: int
    plain_bytes: int

    @cached_property
    def keep_all(self) -> Plan:
        """The plan that runs nothing again; what was saved goes as backward goes along."""
        return plan(self.whole, None, "store_all", model="saved")

    @cached_property
    def least(self) -> Plan:
        """The plan of the least bytes."""
        return plan(self.packing, None, model="saved")

    @property
    def least_bytes(self) -> int:
        """The smallest budget in all that has a plan."""
        return self.packed_bytes + self.least.peak_bytes

    def within(self, budget_bytes: int) -> Plan:
        """The plan for a budget in all.

        Raises:
            BudgetError: there is none; names the least that there is one for.
        """
        if budget_bytes >= self.beside_bytes + self.keep_all.peak_bytes:
            return self.keep_all
        if budget_bytes < self.least_bytes:
            budget, least, plain = format_apart(budget_bytes, self.least_bytes, self.plain_bytes)
            share = math.ceil(100 * self.least_bytes / self.plain_bytes)
            raise BudgetError(
                f"a budget of {budget} is too small: the least budget is {least}, {share}% of the "
                f"plain step's {plain}"
            )
        return plan(self.packing, budget_bytes - self.packed_bytes, model="saved")


def tapes_of(trace: Trace) -> list[PassGraphs]:
    """Return what there is to plan in a trace, by the first pass of each kind.

    What running a call again costs is what the model of a GPU says, arithmetic or traffic, for a
    GPU in the middle of the table: one plan serves all of them, and no noise of a measured time
    changes it.

    Raises:
        GraphError: no backward follows a forward pass.
    """
    kinds: dict[tuple[str, ...], list[ForwardPass]] = {}
    for one in passes(trace):
        kinds.setdefault(tuple(one.names), []).append(one)
    if not kinds:
        raise GraphError("the trace has no backward, so that there is nothing to run again for")
    peaks = _peaks(trace, sorted(one.start for same in kinds.values() for one in same))
    return [
        _tape(tail(trace, same[0].start), max(peaks[one.start] for one in same))
        for same in kinds.values()
    ]


def _peaks(trace: Trace, starts: list[int]) -> dict[int, int]:
    """By a pass's start, the most alive from there to the next one; before all: the first's."""
    peaks = dict.fromkeys(starts, 0)
    start = starts[0]
    for index, used in enumerate(used_bytes(trace.events)):
        start = index if index in peaks else start
        peaks[start] = max(peaks[start], used)
    return peaks


def _tape(trace: Trace, plain_bytes: int) -> PassGraphs:
    first = next(passes(trace))
    graph = Graph.from_trace(trace)
    updates = {t: nbytes for t, nbytes in _updates(trace).items() if t in first.near}
    stays = _stays(first, updates)
    workspace = _backward_workspace(trace, first)
    drawn = [_drawn_bytes(*call) for call in zip(first.calls, first.made, strict=True)]
    masks = [
        nbytes if op.name == PACKED else 0 for op, nbytes in zip(first.calls, drawn, strict=True)
    ]
    whole = [
        replace(
            node,
            cost=max(first.calls[index].flops / FLOPS_PER_BYTE, first.calls[index].traffic_bytes),
            stays_bytes=stays[index],
            stash_bytes=max(0, node.stash_bytes - drawn[index]),
            backward_workspace_bytes=workspace[index],
        )
        for index, node in enumerate(graph.nodes)
    ]
    packing = [_packing(node, mask) for node, mask in zip(whole, masks, strict=True)]
    old = sum(updates.values())
    constant = _constant_bytes(trace, first)
    return PassGraphs(
        whole=Graph(whole, graph.edges, old),
        packing=Graph(packing, graph.edges, old),
        beside_bytes=constant + sum(drawn),
        packed_bytes=constant + sum(drawn) - sum(masks) + sum(map(packed_bytes, masks)),
        plain_bytes=plain_bytes,
    )


def _drawn_bytes(op: Op, made: list[Alloc]) -> int:
    return sum(a.nbytes for a in made if a.kind == "stash") if op.name in DRAWS else 0


def _packing(node: Node, mask_bytes: int) -> Node:
    """The mask is there in full while the call or its backward runs."""
    packing_too = mask_bytes + mask_bytes // 4  # one byte an element on the way
    return replace(
        node,
        workspace_bytes=node.workspace_bytes + (packing_too if mask_bytes else 0),
        backward_workspace_bytes=node.backward_workspace_bytes + mask_bytes,
    )


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
