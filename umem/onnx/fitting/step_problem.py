"""The planning problem of an exported step, like `umem.chainer.Recompute`'s of a running one.

It is a graph of `umem.planner.from_trace`, with facts that only a whole step shows: gradients of
parameters, which backward makes and keeps; the previous step's gradients, which stay until the end
of forward; and dropout's masks, which no plan drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from umem._common.specs import COSTS, GPUS
from umem.errors import GraphError
from umem.planner import CallFacts, Graph, Problem
from umem.trace import LEAF, Alloc, Event, Free, Mark, Op, TapeEntry, Trace, allocations

FLOPS_PER_BYTE = median(
    COSTS.compute_efficiency * gpu.fp32_rate / (COSTS.memory_efficiency * gpu.memory_bandwidth)
    for gpu in GPUS.values()
)
"""Operations in the time of one byte of device memory traffic: the median of the table's GPUs."""
BITS = 32
"""Bits of an element of a mask, which is packed into one bit."""
OpCost = Callable[[Op], float]
"""The cost of an operation, in any unit."""


def is_mask(op: Op, alloc: Alloc) -> bool:
    """Tell whether a tensor that a call makes is a mask that is kept as bits."""
    return op.name == "Dropout" and alloc.kind == "stash"


def packed_bytes(nbytes: int) -> int:
    """Return the bytes of a mask's bits."""
    return -(-nbytes // BITS)


def cost_in_bytes(op: Op) -> float:
    """Return the time of an operation on a median GPU, in bytes of device memory traffic."""
    return max(op.flops / FLOPS_PER_BYTE, op.traffic_bytes)


def problem_of(trace: Trace, cost: OpCost = cost_in_bytes) -> Problem:
    """Return the planning problem of a step's forward pass and backward.

    By default the cost of recomputing a call is `cost_in_bytes`, so one plan serves all GPUs.

    Args:
        trace: the trace of one step.
        cost: the cost of an operation.

    Raises:
        GraphError: no backward follows the forward pass.
    """
    step = forward_pass(trace)
    graph, allocs = Graph.from_trace(trace), allocations(trace.events)
    number = {name: index for index, name in enumerate(step.names)}
    backward = _backward(trace.events[step.turn :], cost)
    stays = _stays_bytes(step, allocs)
    held: set[int] = set()  # calls that the graph of a later call refers to
    calls = []
    for place in reversed(range(len(step.calls))):
        op, node, entry = step.calls[place], graph.nodes[place], step.entries[place]
        is_dead = not (place in backward or node.saved or place in held)
        if not is_dead:
            held.update(entry.sources)
        needs = [entry.sources[i] for i in entry.retained if entry.sources[i] in range(place)]
        needs += [place] * entry.retains_outputs
        own = backward.get(place)
        mask = sum(alloc.nbytes for alloc in step.made[place] if is_mask(op, alloc))
        calls.append(
            CallFacts(
                label=op.name,
                nbytes=node.nbytes,
                cost=cost(op),
                grad_bytes=entry.gradient_bytes,
                alias=None if node.alias_of is None else number[node.alias_of],
                stash_bytes=node.stash_bytes - mask,
                drawn_bytes=mask,
                mask_bytes=mask,
                packed_bytes=packed_bytes(mask),
                workspace_bytes=node.workspace_bytes,
                backward_workspace_bytes=0 if own is None else own.workspace_bytes,
                backward_cost=None if own is None else own.cost,
                stays_bytes=stays[place],
                needs=tuple(dict.fromkeys(needs)),
                dead=is_dead,
            )
        )
    updates = [op for op in trace.ops if op.phase == "update"]
    gradients = [allocs[a.tensor] for op in updates for a in op.reads]
    written = {a.tensor for op in updates for a in op.writes}
    beside = written.union(step.near) - {a.tensor for made in step.made for a in made}
    return Problem(
        tuple(reversed(calls)),
        tuple((number[source], number[user]) for source, user in graph.edges),
        sum(allocs[tensor].nbytes for tensor in beside),
        sum(alloc.nbytes for alloc in gradients if alloc.kind == "gradient"),
        {call: place for place, call in enumerate(backward)},
    )


def _stays_bytes(step: ForwardPass, allocs: Mapping[int, Alloc]) -> Counter[int]:
    """Return by call the bytes of the parameters' gradients that its backward makes first."""
    found: Counter[int] = Counter()
    seen: set[int] = set()
    for place in reversed(range(len(step.calls))):
        for source, access in zip(
            step.entries[place].sources, step.calls[place].reads, strict=False
        ):
            if source == LEAF and access.tensor not in seen:
                seen.add(access.tensor)
                found[place] += allocs[access.tensor].nbytes
    return found


class _Backward(NamedTuple):
    """A call's backward: its bytes beyond those alive at its end, and its cost."""

    workspace_bytes: int
    cost: float


def _backward(events: Iterable[Event], cost: OpCost) -> dict[int, _Backward]:
    """Return the backward of each call that has one, in the order of the events."""
    found: dict[int, _Backward] = {}
    sizes: dict[int, int] = {}
    level, peak, spent = 0, 0, 0.0
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.tensor] = event.nbytes
            level += event.nbytes
        elif isinstance(event, Free):
            level -= sizes.pop(event.tensor, 0)
        elif isinstance(event, Op):
            peak = max(peak, level + (event.workspace_bytes or 0))
            spent += cost(event)
        elif isinstance(event, Mark) and event.entry is not None:
            found[event.entry] = _Backward(max(0, peak - level), spent)
            peak, spent = 0, 0.0
    return found


# -- the forward pass ------------------------------------------------------------------------------


@dataclass
class ForwardPass:
    """The calls of a step that are on the tape, each at the index of its entry's number.

    Attributes:
        calls: the operations, in order.
        entries: their entries on the tape.
        made: the tensors that each call makes.
        near: for each tensor, the calls that read or write it.
        turn: the index of the first event after forward's operations.
    """

    calls: list[Op] = field(default_factory=list)
    entries: list[TapeEntry] = field(default_factory=list)
    made: list[list[Alloc]] = field(default_factory=list)
    near: dict[int, set[int]] = field(default_factory=dict)
    turn: int = 0

    @property
    def names(self) -> list[str]:
        """Return the names of the calls as nodes of a graph, such as ``"Relu#3"``."""
        return [f"{op.name}#{index}" for index, op in enumerate(self.calls)]


def forward_pass(trace: Trace) -> ForwardPass:
    """Return the forward pass of an exported step.

    Raises:
        GraphError: no backward follows it.
    """
    found, allocs = ForwardPass(), allocations(trace.events)
    for index, op in enumerate(trace.events):
        if not isinstance(op, Op):
            continue
        if op.phase == "backward":
            return found
        found.turn = index + 1
        if op.entry is not None:
            written = [allocs[a.tensor] for a in op.writes if a.tensor not in found.near]
            found.made.append([one for one in written if one.kind in ("activation", "stash")])
            for access in (*op.reads, *op.writes):
                found.near.setdefault(access.tensor, set()).add(len(found.calls))
            found.calls.append(op)
            found.entries.append(op.entry)
    raise GraphError("the step has no backward, so there is nothing to recompute")
