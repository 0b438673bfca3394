"""What is alive after each event, by a walk and by looking at every tensor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.trace.events import Access, Alloc, Event, Free, Hint, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import Alive, used_bytes


@st.composite
def programs(draw: Any) -> list[Event]:
    """Events that hold together; a number is used again once its tensor is freed."""
    events: list[Event] = []
    alive: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 30))):
        free = [number for number in range(5) if number not in alive]
        kinds = ["mark", *(["alloc"] if free else []), *(["free", "op", "hint"] if alive else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "alloc":
            number = draw(st.sampled_from(free))
            alive[number] = draw(st.integers(0, 9))
            events.append(Alloc(number, alive[number], "array", f"born {len(events)}"))
        elif kind == "mark":
            events.append(Mark("step"))
        else:
            number = draw(st.sampled_from(sorted(alive)))
            whole = (Access(number, 0, alive[number]),)
            if kind == "free":
                del alive[number]
                events.append(Free(number))
            elif kind == "hint":
                events.append(Hint("prefetch", whole, 0))
            else:
                workspace = draw(st.none() | st.integers(0, 9))
                events.append(Op("f", "forward", whole, whole, workspace_bytes=workspace))
    return events


def alive_by_looking(events: list[Event], place: int) -> dict[int, Alloc]:
    """Of each number the last allocation up to a place, unless a free comes after it."""
    found = {}
    for number in range(5):
        mine = [e for e in events[: place + 1] if isinstance(e, (Alloc, Free))]
        mine = [event for event in mine if event.tensor == number]
        if mine and isinstance(mine[-1], Alloc):
            found[number] = mine[-1]
    return found


@given(programs())
def test_the_bytes_in_use_are_those_of_what_is_alive_and_of_workspace(events: list[Event]) -> None:
    expected = []
    for place, event in enumerate(events):
        held = sum(alloc.nbytes for alloc in alive_by_looking(events, place).values())
        expected.append(held + (event.workspace_bytes or 0 if isinstance(event, Op) else 0))
    assert list(used_bytes(events)) == expected
    assert Trace(events).peak_bytes == max(expected, default=0)
    walk = Alive(events)
    assert walk.tensors == alive_by_looking(events, len(events))
    assert walk.nbytes == sum(alloc.nbytes for alloc in walk.tensors.values())


def test_what_is_not_alive_cannot_be_freed_or_used() -> None:
    with pytest.raises(KeyError):
        Alive([Free(3)])
