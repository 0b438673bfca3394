"""What is alive after each event, by a walk and by looking at every tensor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from strategies import traces

from umem.trace.events import Alloc, Event, Free, Op
from umem.trace.trace import Trace
from umem.trace.walk import Alive, renumbered, used_bytes

MOST = 25
"""Events of a trace, and so tensors at most."""


def with_numbers_again(trace: Trace) -> list[Event]:
    """The events of a trace, with the least number for each tensor that no live one has."""
    numbers: dict[int, int] = {}
    events = []
    for event in trace.events:
        if isinstance(event, Alloc):
            numbers[event.tensor] = min(set(range(MOST)) - set(numbers.values()))
        events.append(renumbered(event, numbers))
        if isinstance(event, Free):
            del numbers[event.tensor]
    return events


def alive_by_looking(events: list[Event], place: int) -> dict[int, Alloc]:
    """Of each number the last allocation up to a place, unless a free comes after it."""
    found = {}
    for number in range(MOST):
        mine = [e for e in events[: place + 1] if isinstance(e, (Alloc, Free))]
        mine = [event for event in mine if event.tensor == number]
        if mine and isinstance(mine[-1], Alloc):
            found[number] = mine[-1]
    return found


@pytest.mark.thorough
@given(traces(MOST))
@settings(deadline=None)
def test_the_bytes_in_use_are_those_of_what_is_alive_and_of_workspace(trace: Trace) -> None:
    events = with_numbers_again(trace)
    expected = []
    for place, event in enumerate(events):
        held = sum(alloc.nbytes for alloc in alive_by_looking(events, place).values())
        expected.append(held + (event.workspace_bytes or 0 if isinstance(event, Op) else 0))
    assert list(used_bytes(events)) == expected
    assert Trace(events).peak_bytes == max(expected, default=0)
    walk = Alive()
    for event in events:
        walk.follow(event)
    assert walk.tensors == alive_by_looking(events, len(events))
    assert walk.nbytes == sum(alloc.nbytes for alloc in walk.tensors.values())


def test_what_is_not_alive_cannot_be_freed_or_used() -> None:
    with pytest.raises(KeyError):
        Alive().follow(Free(3))
