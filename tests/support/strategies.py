"""What hypothesis makes for several tests: traces that hold together."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from umem.trace import (
    ACTIONS,
    COPIES,
    KINDS,
    PATTERNS,
    PHASES,
    Access,
    Alloc,
    Event,
    Free,
    Hint,
    Kernels,
    Mark,
    Op,
    Trace,
)

LABELS = st.text(st.characters(exclude_categories=()), max_size=6)
COUNTS = st.integers(0, 2**40)


@st.composite
def traces(draw: Any, max_events: int = 25, max_bytes: int = 5000) -> Trace:
    """A trace whose tensors are alive when they are used."""
    alive: dict[int, int] = {}
    events: list[Event] = []

    def accesses() -> tuple[Access, ...]:
        if not alive:
            return ()
        picked = draw(st.lists(st.sampled_from(sorted(alive)), max_size=3))
        found = []
        for tensor in picked:
            low, high = sorted(draw(st.tuples(*[st.integers(0, alive[tensor])] * 2)))
            found.append(Access(tensor, low, high))
        return tuple(found)

    for number in range(draw(st.integers(0, max_events))):
        what = draw(st.sampled_from(("alloc", "alloc", "free", "op", "op", "hint", "mark")))
        if what == "alloc":
            alive[number] = draw(st.integers(0, max_bytes))
            kind, label = draw(st.sampled_from(KINDS)), draw(LABELS)
            events.append(Alloc(number, alive[number], kind, label, draw(st.booleans())))
        elif what == "free" and alive:
            tensor = draw(st.sampled_from(sorted(alive)))
            del alive[tensor]
            events.append(Free(tensor))
        elif what == "op":
            events.append(_op(draw, accesses))
        elif what == "hint":
            place = draw(st.none() | st.just("cpu") | st.integers(0, 3))
            action = draw(st.sampled_from(ACTIONS))
            overlap = action in COPIES or draw(st.booleans())
            events.append(Hint(action, accesses(), place, draw(st.booleans()), overlap))
        else:
            events.append(draw((st.just("step") | LABELS).map(Mark)))
    return Trace(events, draw(st.sampled_from(("numpy", "cupy", "model"))), {"made": "here"})


def _op(draw: Any, accesses: Any) -> Op:
    """Draw an operation of a trace."""
    return Op(
        draw(LABELS),
        draw(st.sampled_from(PHASES)),
        accesses(),
        accesses(),
        draw(COUNTS),
        draw(COUNTS),
        draw(st.sampled_from(PATTERNS)),
        draw(st.none() | st.floats(0, 1e6)),
        draw(st.none() | st.integers(0, 5000)),
        kernels=draw(st.none() | st.builds(Kernels, *[st.integers(0, 5000)] * 3)),
    )
