"""Tensors that outlive their step: what leaks usually look like.

A tensor outlives its step if it is alive where a *later* step ends. The loss of a step, and
whatever its graph holds, may well live into the next step: a loop's variable is assigned anew
only after the next forward pass. So the end of its own step does not count, nor does the end of
the trace.

Not counted: parameters, their gradients, and state (an optimizer's update touches them, or their
kind says so); what came from the host, which may have been there before; and what later steps
use, such as a matrix that is computed once, unless further steps add more of the same kind: a
recurrent network whose graph is never cut uses all of its past.

Which step is a later one: the next that updates some of the same parameters. Where two networks
train in turns, the loss of one lives through the update of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from umem.events import Op
from umem.tensors import Reading, Tensor

_KEPT = ("parameters", "optimizer state", "other state")


@dataclass(frozen=True)
class Leak:
    """Tensors of one make that outlived their steps, one at a time or several.

    ``steps`` are those that made them, counted from 0; ``stack`` is where in the user's code,
    the innermost place first, empty where stacks were not recorded; ``freed_count`` is how many
    were freed later.
    """

    label: str
    kind: str
    op: str | None
    phase: str | None
    stack: tuple[str, ...]
    tensor_count: int
    total_bytes: int
    steps: tuple[int, ...]
    freed_count: int


def find_leaks(reading: Reading) -> list[Leak]:
    """Tensors that outlive their step, alike ones together, the most bytes first."""
    late = _late_ends(reading)
    alike: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in _outliving(reading, late):
        alike[_make(reading, tensor)].append(tensor)
    leaks = [_leak(reading, group) for group in alike.values()]
    return sorted(leaks, key=lambda leak: -leak.total_bytes)


def _outliving(reading: Reading, late: list[int | None]) -> Iterator[Tensor]:
    found = [tensor for tensor in reading.tensors if _is_late(tensor, late)]
    makers: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for tensor in found:
        makers[_make(reading, tensor)].add(tensor.step)
    for tensor in found:
        used = (tensor.last_use or 0) > reading.steps[tensor.step]
        if not used or len(makers[_make(reading, tensor)]) > 1:
            yield tensor


def _is_late(tensor: Tensor, late: list[int | None]) -> bool:
    if tensor.uploaded or tensor.updated or tensor.kind in _KEPT or tensor.step >= len(late):
        return False
    end = late[tensor.step]
    return end is not None and tensor.alive(end)


def _make(reading: Reading, tensor: Tensor) -> tuple[object, ...]:
    """What alike tensors have in common."""
    op = None if tensor.maker is None else reading.op(tensor.maker)
    name = None if op is None else (op.name, op.phase)
    return tensor.label, tensor.kind, tensor.nbytes, name, tensor.stack


def _leak(reading: Reading, tensors: list[Tensor]) -> Leak:
    first = tensors[0]
    op = None if first.maker is None else reading.op(first.maker)
    return Leak(
        label=first.label,
        kind=first.kind,
        op=None if op is None else op.name,
        phase=None if op is None else op.phase,
        stack=first.stack,
        tensor_count=len(tensors),
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        steps=tuple(sorted({tensor.step for tensor in tensors})),
        freed_count=sum(tensor.death is not None for tensor in tensors),
    )


# -- which step is the later one ---------------------------------------------------------------


def _late_ends(reading: Reading) -> list[int | None]:
    """For each step the end of the next one that updates some of the same; None: there is none."""
    updated = _updated(reading)
    ends = list(reading.steps)
    if _goes_on(reading) and len(set(updated)) == 1:
        updated.append(updated[0])
        ends.append(len(reading.trace) - 1)
    late: list[int | None] = []
    for step in range(len(reading.steps)):
        following = (n for n in range(step + 1, len(ends)) if _same(updated[step], updated[n]))
        late.append(next((ends[n] for n in following), None))
    return late


def _same(some: frozenset[int], others: frozenset[int]) -> bool:
    return not some or not others or not some.isdisjoint(others)


def _updated(reading: Reading) -> list[frozenset[int]]:
    """The tensors that each step's updates write."""
    found = []
    start = 0
    for end in reading.steps:
        ops = _ops(reading.trace.events[start:end], "update")
        found.append(frozenset(access.tensor for op in ops for access in op.writes))
        start = end
    return found


def _goes_on(reading: Reading) -> bool:
    """Whether a further step has come as far as its backward pass, where the trace ends."""
    rest = reading.trace.events[reading.steps[-1] :] if reading.steps else []
    return any(True for _ in _ops(rest, "backward"))


def _ops(events: Iterable[object], phase: str) -> Iterator[Op]:
    return (event for event in events if isinstance(event, Op) and event.phase == phase)
