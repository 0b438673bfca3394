"""Scaling of each tensor and operation of a trace to a share of its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil

from umem.trace.events import Access, Alloc, Event, Op
from umem.trace.trace import Trace

ONE = Fraction(1)
OfTensor = Callable[[Alloc], Fraction]
OfOp = Callable[[Op, Fraction], tuple[Fraction, Fraction]]
"""Returns the shares of an operation's work and workspace, given that of its largest tensor."""


def scaled(trace: Trace, of_tensor: OfTensor, of_op: OfOp) -> Trace:
    """Return the trace with each tensor and operation scaled to a share, rounded up.

    ``of_op`` is given the share of the operation's largest tensor, or that of the optimizer state
    that it reads or writes.
    """
    return trace.with_events(_events(trace, of_tensor, of_op))


def _events(trace: Trace, of_tensor: OfTensor, of_op: OfOp) -> Iterator[Event]:
    """Yield events with tensors and operations scaled."""
    seen: dict[int, tuple[Alloc, Fraction]] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            share = of_tensor(event)
            seen[event.tensor] = event, share
            yield event._replace(nbytes=ceil(event.nbytes * share))
        elif isinstance(event, Op):
            yield _op(event, seen, of_op)
        else:
            yield event


def _op(op: Op, seen: dict[int, tuple[Alloc, Fraction]], of_op: OfOp) -> Op:
    """Return an operation with its accesses, arithmetic and workspace scaled."""
    used = [seen[access.tensor] for access in (*op.reads, *op.writes)]
    states = [share for alloc, share in used if alloc.kind == "state"]
    largest = max(used, key=lambda found: found[0].nbytes, default=None)
    work, workspace = of_op(op, states[0] if states else ONE if largest is None else largest[1])
    beside = op.workspace_bytes
    return op._replace(
        reads=tuple(_access(access, seen[access.tensor][1]) for access in op.reads),
        writes=tuple(_access(access, seen[access.tensor][1]) for access in op.writes),
        flops=ceil(op.flops * work),
        traffic_bytes=ceil(op.traffic_bytes * work),
        workspace_bytes=None if beside is None else ceil(beside * workspace),
        kernels=None if op.kernels is None else op.kernels.scaled(float(workspace)),
    )


def _access(access: Access, share: Fraction) -> Access:
    start, stop = ceil(access.start * share), ceil(access.stop * share)
    return access if share == ONE else access._replace(start=start, stop=stop)


def with_state_split(trace: Trace, ranks: int) -> Trace:
    """Return the trace with 1 / ``ranks`` of each optimizer state, and of its updates."""
    share = Fraction(1, ranks)
    return scaled(
        trace, lambda alloc: share if alloc.kind == "state" else ONE, lambda op, own: (own, own)
    )
