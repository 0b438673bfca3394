"""A trace of steps in the steady state, in which each step finds the tensors that the last left.

A recorded first step uploads parameters, and finds neither gradients of a previous step nor a pool
that has grown. Only later steps are representative, so that a single step is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from umem.errors import TraceError
from umem.trace.trace import Alloc, Event, Free, Hint, Mark, Op, Trace, tail
from umem.trace.walk import Alive, allocations, numbered_by_birth, renumbered
from umem.units import format_bytes

STEP, START = Mark("step"), Mark("start")
_LASTING = ("parameter", "state", "input")


def steady(trace: Trace, step_count: int = 2) -> Trace:
    """Return the last steps of a trace; the last one is repeated where there are too few.

    A trace without an optimizer's update is one step. Tensors that a step leaves behind, except
    parameters, state and inputs, are freed where the trace frees those of the previous step, and
    otherwise before the next backward, as in Chainer's ``optimizer.update(loss)``. Of a program
    without Chainer that marks no steps, they are freed before it is repeated.

    Raises:
        TraceError: the trace has no operation.
    """
    if next(trace.ops, None) is None:
        raise TraceError(_nothing(trace))
    whole, ends = _marked(distinct(trace))
    if len(ends) > step_count:
        last = tail(whole, ends[-step_count - 1]).events
        return trace.with_events(_as_first(last))
    events = whole.events
    step = tail(whole, ends[-2]).events if len(ends) > 1 else events
    events = _as_first(events)
    begins_anew = not trace.step_count and all(op.entry is None for op in trace.ops)
    again = _Repeater(events, step, begins_anew=begins_anew)
    for _ in range(step_count - len(ends)):
        events = [*events, *again.events()]
    return trace.with_events(events)


def _nothing(trace: Trace) -> str:
    """Format what to do with a trace that has no operation."""
    if trace.backend != "cupy" or not trace.peak_bytes:
        return "the trace has no operation: nothing to choose for. Record a whole step"
    return (
        f"the trace has allocations of CuPy only, {format_bytes(trace.peak_bytes)} at the peak, "
        "and no operation whose time could be predicted. Where that is more than the GPU has, "
        "umem.hybrid() and umem.managed() hold the rest; for their times record the program on a "
        "software GPU: umem run --software t4 --record FILE SCRIPT"
    )


def distinct(trace: Trace) -> Trace:
    """Return the trace with tensors numbered by birth if a number was used twice."""
    allocs = [event.tensor for event in trace.events if isinstance(event, Alloc)]
    if len(set(allocs)) == len(allocs):
        return trace
    return trace.with_events(numbered_by_birth(trace.events))


def _marked(trace: Trace) -> tuple[Trace, list[int]]:
    """Return the trace up to its last whole step, and the indices after each step's mark.

    Where several optimizers update in turn, as for a GAN, a step is a period of these updates.
    """
    pieces: list[list[Event]] = [[]]
    for event in trace.events:
        if event == STEP:
            pieces.append([])
        else:
            pieces[-1].append(event)
    # Events after the last update are no whole step, except frees of the step's graph.
    rest = pieces.pop() if len(pieces) > 1 else []
    frees = takewhile(lambda event: isinstance(event, Free), rest)
    period = period_of([[e.name for e in piece if isinstance(e, Op)] for piece in pieces])
    events: list[Event] = []
    ends: list[int] = []
    for number, piece in enumerate(pieces, 1):
        events += piece
        if (len(pieces) - number) % period == 0:
            events.append(STEP)
            ends.append(len(events))
    events += frees
    return trace.with_events(events), ends


def period_of(steps: list[list[str]]) -> int:
    """Return after how many updates the same operations repeat; the first update may differ.

    By the longest suffix that is also a prefix: Knuth, Morris and Pratt, 1977.
    """
    found = [tuple(step) for step in (steps[1:] if len(steps) > 2 else steps)]
    longest = [0]
    for step in found[1:]:
        length = longest[-1]
        while length and found[length] != step:
            length = longest[length - 1]
        longest.append(length + 1 if found[length] == step else 0)
    return len(found) - longest[-1]


def _as_first(events: list[Event]) -> list[Event]:
    """Return steps as at the beginning of training, when the addresses of tensors are decided.

    Tensors that the recorded steps found are allocated only if operations use them or they are
    parameters; an optimizer's state is allocated before its first use, in memory that is free then.
    """
    start = next((i for i, event in enumerate(events) if event == START), None)
    if start is None:
        return events
    found = allocations(events[:start])
    used = {
        access.tensor
        for event in events
        if isinstance(event, Op)
        for access in (*event.reads, *event.writes)
    }
    gone = {n for n, alloc in found.items() if n not in used and alloc.kind != "parameter"}
    late = {
        n: alloc._replace(uploaded=False)
        for n, alloc in found.items()
        if n in used and alloc.kind == "state"
    }
    first: list[Event] = []
    for event in events:
        if isinstance(event, (Alloc, Free)) and event.tensor in gone:
            continue
        if isinstance(event, Alloc) and event is found.get(event.tensor):
            if event.tensor in late:
                continue
        if isinstance(event, Op):
            for tensor, _, _ in (*event.reads, *event.writes):
                if tensor in late:
                    first.append(late.pop(tensor))
        elif isinstance(event, Hint):  # without accesses of tensors that are not allocated
            here = (a for a in event.accesses if a.tensor not in gone and a.tensor not in late)
            event = event._replace(accesses=tuple(here))
        elif isinstance(event, Free) and event.tensor in late:  # it was never allocated
            del late[event.tensor]
            continue
        first.append(event)
    return first


class _Repeater:
    """A step that is repeated any number of times.

    Args:
        events: the events so far; they end with the step.
        step: the step's events; they begin with uploads of the tensors that it found, if known.
        begins_anew: whether tensors that a step leaves behind are freed before the next begins.
    """

    def __init__(self, events: list[Event], step: list[Event], *, begins_anew: bool) -> None:
        self._step = step
        self._alive = Alive(events)
        self._fresh = 1 + max(allocations(events), default=-1)
        freed = {event.tensor for event in step if isinstance(event, Free)}
        found = step[: step.index(START)] if START in step else []
        went = [event for event in found if isinstance(event, Alloc) and event.tensor in freed]
        old = {event.tensor for event in found if isinstance(event, Alloc)}
        self._lasting = {
            tensor
            for tensor, alloc in self._alive.tensors.items()
            if tensor not in freed
            and alloc.kind in _LASTING
            and (tensor in old or not any(other[1:4] == alloc[1:4] for other in went))
        }
        self._found = len(found)
        self._frees_at = 0 if begins_anew else _first_backward(step)

    def events(self) -> Iterator[Event]:
        """Yield the events of one more step."""
        left = {n: alloc for n, alloc in self._alive.tensors.items() if n not in self._lasting}
        now = {tensor: tensor for tensor in self._lasting}
        for index, event in enumerate(self._step):
            if index == self._frees_at:
                for number in left:
                    yield self._follow(Free(number))
                left.clear()
            if isinstance(event, Alloc):
                if event.tensor in self._lasting:
                    continue
                found = _taken(left, event, event.kind != "input" or index < self._found)
                now[event.tensor] = self._fresh if found is None else found
                if found is not None:
                    continue
            yield self._follow(renumbered(event, now))

    def _follow(self, event: Event) -> Event:
        self._alive.follow(event)
        if isinstance(event, Alloc):
            self._fresh = max(self._fresh, event.tensor + 1)
        return event


def _first_backward(step: list[Event]) -> int:
    """Return the index after the last operation before backward; the last event without one."""
    before = 0
    for index, event in enumerate(step):
        if isinstance(event, Op):
            if event.phase != "forward" and event.phase != "array":
                return before
            before = index + 1
    return len(step) - 1


def _taken(left: dict[int, Alloc], alloc: Alloc, is_old: bool) -> int | None:
    """Take from ``left`` the tensor of the previous step that an upload stands for.

    It has the same bytes, kind and label. None where the upload stands for no such tensor.
    """
    if not alloc.uploaded or not is_old:
        return None
    for number, other in left.items():
        if other[1:4] == alloc[1:4]:  # bytes, kind, label
            del left[number]
            return number
    return None
