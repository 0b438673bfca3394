"""The part of a trace from an event on: what was alive there is there from the beginning."""

from __future__ import annotations

from umem.events import Alloc, Event, Free, Mark
from umem.trace import Trace


def tail(trace: Trace, start: int) -> Trace:
    """The trace from event ``start`` on, in which a step is seen with all that it found.

    What is alive at ``start`` is uploaded first, in the order in which it was allocated, so that
    optimizer state and gradients of the step before count from the first operation. Then comes
    the mark ``"start"``: to upload them takes no time of the step's.
    """
    alive: dict[int, Alloc] = {}
    for event in trace.events[:start]:
        if isinstance(event, Alloc):
            alive[event.tensor] = event._replace(uploaded=True)
        elif isinstance(event, Free):
            del alive[event.tensor]
    events: list[Event] = [*alive.values(), Mark("start"), *trace.events[start:]]
    return Trace(events, trace.backend, trace.meta)
