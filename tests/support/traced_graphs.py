"""Graphs of hypothesis as the traces that a tape would leave, and what a trace computes.

Nothing here calls what it is used to test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from umem.trace import Access, Alloc, Checker, Event, Free, Mark, Op, Trace

INPUT_BYTES = 7


@dataclass(frozen=True)
class Call:
    """A call of a random step: what it reads and makes, whether its output is needed again."""

    preds: tuple[int, ...]
    nbytes: int
    stash: int
    workspace: int
    saved: bool
    view: bool


@st.composite
def steps(draw: Any, views: bool = False, max_calls: int = 14) -> list[Call]:
    """Calls, each after what it reads."""
    calls: list[Call] = []
    for number in range(draw(st.integers(1, max_calls))):
        near = st.integers(max(0, number - 5), number - 1)
        preds = sorted(draw(st.sets(near, min_size=1, max_size=3))) if number else []
        calls.append(
            Call(
                tuple(preds),
                draw(st.integers(1, 50)),
                draw(st.integers(1, 9)),
                draw(st.integers(0, 30)),
                draw(st.booleans()),
                views and bool(preds) and draw(st.integers(0, 3)) == 0,
            )
        )
    return calls


def trace_of(calls: list[Call], step_count: int = 1) -> Trace:
    """The step, kept as a tape keeps it: values until their last need, gradients to their use."""
    events: list[Event] = [Alloc(0, INPUT_BYTES, "input", "x", uploaded=True)]
    first = 1
    for _ in range(step_count):
        step = _Step(calls, first)
        events += step.events()
        first = step.next
    return Trace(events)


class _Step:
    """Numbers a step's tensors: of call v, its value, stash and gradient."""

    def __init__(self, calls: list[Call], first: int) -> None:
        self.calls, self.first = calls, first
        self.next = first + 3 * len(calls)
        self.root = [self._root(v) for v in range(len(calls))]
        alive = {self.root[v] for v, call in enumerate(calls) if call.saved}
        self.saved = [root in alive for root in self.root]

    def _root(self, v: int) -> int:
        return self._root(self.calls[v].preds[0]) if self.calls[v].view else v

    def _access(self, what: int, v: int) -> Access:
        sizes = self.calls[v].nbytes, self.calls[v].stash, self.calls[v].nbytes
        return Access(self.first + 3 * v + what, 0, sizes[what])

    def value(self, v: int) -> Access:
        return self._access(0, self.root[v])

    def events(self) -> Iterator[Event]:
        yield from self._forward()
        yield from self._backward()
        yield Mark("step")

    def _forward(self) -> Iterator[Event]:
        last = {self.root[v]: v for v in range(len(self.calls))}
        for w, call in enumerate(self.calls):
            last.update({self.root[v]: w for v in call.preds})
        for v, call in enumerate(self.calls):
            value, stash = self.value(v), self._access(1, v)
            reads = tuple(dict.fromkeys(map(self.value, call.preds))) or (Access(0, 0, 7),)
            if call.view:
                yield Op("f", "forward", reads, (value,), workspace_bytes=call.workspace)
            else:
                yield Alloc(value.tensor, call.nbytes, "activation", "f")
                yield Alloc(stash.tensor, call.stash, "stash", "f.stash")
                yield Op("f", "forward", reads, (value, stash), workspace_bytes=call.workspace)
            for root, at in last.items():
                if at == v and not self.saved[root]:
                    yield Free(self.value(root).tensor)

    def _backward(self) -> Iterator[Event]:
        needs = [[x for x in (*c.preds, v) if self.saved[x]] for v, c in enumerate(self.calls)]
        first = {self.root[x]: v for v in reversed(range(len(self.calls))) for x in needs[v]}
        there: set[int] = set()
        for v in reversed(range(len(self.calls))):
            call = self.calls[v]
            for x in (v, *call.preds):
                if x not in there and not self.calls[x].view:
                    there.add(x)
                    yield Alloc(self._access(2, x).tensor, self.calls[x].nbytes, "gradient", "g")
            reads = [self.value(x) for x in needs[v]]
            reads += [] if call.view else [self._access(1, v), self._access(2, v)]
            writes = [self._access(2, x) for x in call.preds if not self.calls[x].view]
            yield Op(f"b{v}", "backward", tuple(reads), tuple(writes))
            if not call.view:
                yield Free(self._access(1, v).tensor)
                yield Free(self._access(2, v).tensor)
            for root, at in first.items():
                if at == v:
                    yield Free(self.value(root).tensor)


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
