"""Tensors that outlive their step, which is how leaks usually look.

The loss of a step, and its whole graph, may live through the next step: ``loss = step()`` replaces
the old loss only when the next step has returned. So a tensor outlives its step if it is still
alive when the step *after* the next one begins. If the trace ends with the next step, tensors may
still be about to be freed; then a tensor counts only if similar tensors of an earlier step are
alive too, because something collects them.

Not counted are parameters, their gradients and state (an optimizer's update touches them, or their
kind tells); tensors from the host; and tensors that later steps use, such as a matrix that is
computed once. The last do count if similar ones of several steps are alive at once: a recurrent
network whose graph is never cut uses all of its past. Tensors made before the recording count only
beside similar ones made in it.

The next step is the next one that updates some of the same parameters: if two networks train in
turns, the loss of one lives through the updates of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from umem.trace.analysis.tensors import ACTIVATIONS, LASTING, Reading, Tensor
from umem.trace.events import Op

BEFORE = -1
"""The step number of tensors made before the recording."""


@dataclass(frozen=True)
class Leak:
    """Tensors of one kind and origin that outlived their steps.

    ``steps`` are the steps that made them, counted from 0; ``earlier_count`` of them were made
    before the recording, and ``freed_count`` were freed later. ``stack`` has the lines of the
    user's code that made them, innermost first; it is empty if stacks were not recorded.
    """

    label: str
    kind: str
    op: str | None
    phase: str | None
    stack: tuple[str, ...]
    tensor_count: int
    total_bytes: int
    steps: tuple[int, ...]
    earlier_count: int
    freed_count: int


def find_leaks(reading: Reading) -> list[Leak]:
    """Find tensors that outlive their step, grouped by origin, most bytes first."""
    ends = _ends(reading)
    alike: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in reading.tensors:
        end = ends.get(_step(tensor))
        if end is not None and _may_leak(tensor) and tensor.alive(end.mark):
            alike[tensor.label, tensor.nbytes, tensor.stack].append(tensor)
    found = (list(_outliving(reading, group, ends)) for group in alike.values())
    leaks = [_leak(reading, group) for group in found if group]
    return sorted(leaks, key=lambda leak: -leak.total_bytes)


def can_tell(reading: Reading) -> bool:
    """Tell whether the trace is long enough to find that nothing outlives a step."""
    ends = _ends(reading)
    if any(end.sure is not None for step, end in ends.items() if step != BEFORE):
        return True
    earlier = (t for t in reading.tensors if t.uploaded and t.kind in ACTIVATIONS)
    return len(ends) > 1 and any(True for _ in earlier)


def _step(tensor: Tensor) -> int:
    return BEFORE if tensor.uploaded else tensor.step


def _may_leak(tensor: Tensor) -> bool:
    if tensor.updated or tensor.kind in LASTING:
        return False
    return not tensor.uploaded or tensor.kind in ACTIVATIONS


def _outliving(reading: Reading, alike: list[Tensor], ends: dict[int, _End]) -> Iterator[Tensor]:
    grown = _grown(alike, ends)
    for tensor in alike:
        if tensor.birth in grown or (not tensor.uploaded and _is_late(reading, tensor, ends)):
            yield tensor


def _is_late(reading: Reading, tensor: Tensor, ends: dict[int, _End]) -> bool:
    """Tell whether a tensor certainly outlives its step, and no later step uses it."""
    sure = ends[tensor.step].sure
    used = (tensor.last_use or 0) > reading.steps[tensor.step]
    return sure is not None and tensor.alive(sure) and not used


def _grown(alike: list[Tensor], ends: dict[int, _End]) -> set[int]:
    """Return the births of tensors that are alive together with similar ones of another step."""
    found: set[int] = set()
    for step in {_step(tensor) for tensor in alike}:
        end = ends[step]
        earlier = (t for t in alike if _step(t) < step and t.alive(end.mark))
        beside = [t for t in earlier if _same(ends[_step(t)].updated, end.updated)]
        if beside:
            found.update(t.birth for t in beside)
            found.update(t.birth for t in alike if _step(t) == step)
    return found


def _leak(reading: Reading, tensors: list[Tensor]) -> Leak:
    """Sum up tensors of one origin."""
    last = tensors[-1]  # the one that is least likely to be from before
    op = None if last.maker is None else reading.op(last.maker)
    steps = {_step(tensor) for tensor in tensors} - {BEFORE}
    return Leak(
        label=last.label,
        kind=last.kind,
        op=None if op is None else op.name,
        phase=None if op is None else op.phase,
        stack=last.stack,
        tensor_count=len(tensors),
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        steps=tuple(sorted(steps)),
        earlier_count=sum(_step(tensor) == BEFORE for tensor in tensors),
        freed_count=sum(tensor.death is not None for tensor in tensors),
    )


# -- which step is the next one ----------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    """The end of the next step, and the event at which a live tensor certainly outlives it.

    ``sure`` is the first operation after that end, or the end of the trace; None if the trace ends
    with the step. ``updated`` are the tensors that the step and the next one train.
    """

    mark: int
    sure: int | None
    updated: frozenset[int]


def _ends(reading: Reading) -> dict[int, _End]:
    """Return for each step the end of the next one."""
    updated = _updated(reading)
    found = {}
    for step in range(len(updated)):
        following = range(step + 1, len(updated))
        after = next((n for n in following if _same(updated[step], updated[n])), None)
        if after is not None:
            found[step] = _end(reading, after, updated[step])
    if updated:  # of what was there before: once all that is trained was updated
        first = max(updated.index(some) for some in updated)
        whose = updated[0] if first == 0 else frozenset((BEFORE,))  # or nobody knows
        found[BEFORE] = _end(reading, first, whose)
    return found


def _end(reading: Reading, step: int, updated: frozenset[int]) -> _End:
    mark, events = reading.steps[step], reading.trace.events
    following = (n for n in range(mark + 1, len(events)) if isinstance(events[n], Op))
    last = len(events) - 1 if len(events) - 1 > mark else None
    return _End(mark, next(following, last), updated)


def _same(some: frozenset[int], others: frozenset[int]) -> bool:
    return not some or not others or not some.isdisjoint(others)


def _updated(reading: Reading) -> list[frozenset[int]]:
    """Return the tensors that each step's updates write."""
    found = []
    start = 0
    for end in reading.steps:
        ops = _updates(reading.trace.events[start:end])
        found.append(frozenset(access.tensor for op in ops for access in op.writes))
        start = end
    return found


def _updates(events: Iterable[object]) -> Iterator[Op]:
    return (event for event in events if isinstance(event, Op) and event.phase == "update")
