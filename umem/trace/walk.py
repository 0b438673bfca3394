"""A walk over the events of a trace: the live tensors, and the bytes in use.

All code that follows tensors from birth to death, or renumbers them, uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from umem.trace.events import Access, Alloc, Event, Free, Hint, Op

Accesses = tuple[Access, ...]


class Lifetime(NamedTuple):
    """From the event that allocates a tensor to the one that frees it; None: never."""

    alloc: Alloc
    birth: int
    death: int | None


class Alive:
    """The tensors alive after the events so far, by number, oldest first."""

    def __init__(self) -> None:
        self.tensors: dict[int, Alloc] = {}
        self.nbytes = 0

    def follow(self, event: Event) -> Alloc | None:
        """Apply the next event; returns the allocation that it starts or ends, if any.

        Raises:
            KeyError: the event frees a tensor that is not alive.
        """
        if isinstance(event, Alloc):
            self.tensors[event.tensor] = event
            self.nbytes += event.nbytes
            return event
        if isinstance(event, Free):
            alloc = self.tensors.pop(event.tensor)
            self.nbytes -= alloc.nbytes
            return alloc
        return None


def with_sizes(events: Iterable[Event], workspace: Iterable[int | None]) -> Iterator[Event]:
    """Yield the events, each operation with the next size of workspace."""
    sizes = iter(workspace)
    for event in events:
        yield event._replace(workspace_bytes=next(sizes)) if isinstance(event, Op) else event


def used_bytes(events: Iterable[Event]) -> Iterator[int]:
    """Yield the bytes in use at each event, known workspace included."""
    live = 0
    sizes: dict[int, int] = {}
    for event in events:  # quick, because a choice walks over a hundred traces
        if type(event) is Op:
            yield live + (event.workspace_bytes or 0)
            continue
        if type(event) is Alloc:
            sizes[event.tensor] = event.nbytes
            live += event.nbytes
        elif type(event) is Free:
            live -= sizes.pop(event.tensor)
        yield live


def lifetimes(events: Iterable[Event]) -> dict[int, Lifetime]:
    """Return each tensor's birth and death, as indexes into the events."""
    found: dict[int, Lifetime] = {}
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            found[event.tensor] = Lifetime(event, index, None)
        elif isinstance(event, Free):
            found[event.tensor] = found[event.tensor]._replace(death=index)
    return found


def allocations(events: Iterable[Event]) -> dict[int, Alloc]:
    """Return each tensor's allocation; the last one if a number was reused."""
    return {event.tensor: event for event in events if isinstance(event, Alloc)}


# -- other numbers, other accesses -------------------------------------------------------------


def with_accesses(event: Event, change: Callable[[Accesses], Accesses]) -> Event:
    """Return an operation or hint with changed accesses; other events as they are."""
    if isinstance(event, Op):  # `_replace` takes three times as long, and there are many
        return Op(event.name, event.phase, change(event.reads), change(event.writes), *event[4:])
    if isinstance(event, Hint):
        return event._replace(accesses=change(event.accesses))
    return event


def renumbered(event: Event, numbers: Mapping[int, int]) -> Event:
    """Return the event with its tensors renumbered.

    Raises:
        KeyError: ``numbers`` lacks a tensor.
    """
    if type(event) is Alloc:
        return Alloc(numbers[event.tensor], *event[1:])
    if type(event) is Free:
        return Free(numbers[event.tensor])
    return with_accesses(event, partial(_moved, numbers))


def _moved(numbers: Mapping[int, int], accesses: Accesses) -> Accesses:
    make = tuple.__new__  # half the time of `Access`, of which a step has ten thousands
    return tuple([make(Access, (numbers[each[0]], each[1], each[2])) for each in accesses])
