"""What a trace computes, and whether it holds together.

Nothing here calls what it is used to test.
"""

from __future__ import annotations

from typing import Any

from umem.trace import Alloc, Checker, Free, Op, Trace


def contents_read(trace: Trace) -> list[tuple[str, str, tuple[Any, ...]]]:
    """For each operation, its name, its phase, and what it found in what it read.

    What an operation writes follows from its name and what it read; a call that writes where it
    reads has made a view and changes nothing. State (running statistics) is left out: it is what
    a second run must neither read for its results nor change.
    """
    kinds = {event.tensor: event.kind for event in trace.events if isinstance(event, Alloc)}
    held: dict[int, Any] = {}
    found = []
    for event in trace.events:
        if isinstance(event, Alloc):
            held[event.tensor] = (event.kind, event.label) if event.uploaded else None
        elif isinstance(event, Free):
            del held[event.tensor]
        elif isinstance(event, Op):
            reads = [a for a in event.reads if kinds[a.tensor] != "state"]
            seen = tuple((held[a.tensor], a.start, a.stop) for a in reads)
            found.append((event.name, event.phase, seen))
            read = {access.tensor for access in reads}
            for place, access in enumerate(event.writes):
                gradient = kinds[access.tensor] == "gradient"
                if gradient or access.tensor not in read:
                    before = held[access.tensor] if gradient else None  # gradients add up
                    held[access.tensor] = hash((event.name, place, seen, before))
    return found


def check(trace: Trace) -> Trace:
    """Assert that a trace holds together; returns it."""
    checker = Checker()
    for event in trace.events:
        checker.check(event)
    return trace
