"""A step of an exported model repeated, as in training: each finds what the last one left."""

from __future__ import annotations

from umem.trace.events import Alloc
from umem.trace.trace import Event, Free, Mark, Op, Trace
from umem.trace.walk import allocations, renumbered

STEPS = 3
"""Steps of a replay: the first one finds no gradients; where blocks move, later ones alternate."""
STEP = Mark("step")
_LASTING = ("parameter", "state", "input")
"""Kinds of tensors that stay from step to step."""


def repeated(trace: Trace, step_count: int = STEPS) -> Trace:
    """Return a step's trace with the step repeated, each ended by the mark ``"step"``.

    Parameters, states and inputs stay. What else a step leaves behind, such as gradients, is freed
    before the next backward, as in Chainer's ``optimizer.update(loss)``; without a backward, at the
    end of the next step.
    """
    step = [*trace.events] if trace.events[-1:] == [STEP] else [*trace.events, STEP]
    allocs = allocations(step)
    freed = {event.tensor for event in step if isinstance(event, Free)}
    stays = {t for t, alloc in allocs.items() if t not in freed and alloc.kind in _LASTING}
    left = [tensor for tensor in allocs if tensor not in freed and tensor not in stays]
    turn, stride = _last_forward(step) + 1, 1 + max(allocs, default=0)
    events = list(step)
    before = {tensor: tensor for tensor in allocs}
    for number in range(1, step_count):
        now = {t: t if t in stays else t + number * stride for t in allocs}
        for index, event in enumerate(step):
            if index == turn:
                events += [Free(before[tensor]) for tensor in left]
            if not (isinstance(event, Alloc) and event.tensor in stays):
                events.append(renumbered(event, now))
        before = now
    return trace.with_events(events)


def _last_forward(step: list[Event]) -> int:
    """Return the index of the last operation of forward."""
    found = (i for i, one in enumerate(step) if isinstance(one, Op) and one.phase == "forward")
    return max(found, default=0)
