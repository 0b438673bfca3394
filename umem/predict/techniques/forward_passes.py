"""The forward passes of a trace: calls, what they make, and where their backward begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from umem.trace.trace import Alloc, Op, Trace

_MADE = ("activation", "stash", "array")


@dataclass
class ForwardPass:
    """The calls of a forward pass that a backward follows.

    Calls and what they make are those of `umem.planner.from_trace`.

    Attributes:
        calls: the operations, in order.
        made: the tensors that each call makes.
        near: for each tensor, the calls that read or write it.
        start: the index of the first event that is its own.
        turn: the index of the first event that is backward's.
    """

    calls: list[Op] = field(default_factory=list)
    made: list[list[Alloc]] = field(default_factory=list)
    near: dict[int, set[int]] = field(default_factory=dict)
    start: int = 0
    turn: int = 0

    @property
    def names(self) -> list[str]:
        """The names that the calls have as nodes of a graph."""
        return [f"{op.name}#{index}" for index, op in enumerate(self.calls)]

    @property
    def allocs(self) -> Iterator[Alloc]:
        """All that its calls make."""
        return (alloc for made in self.made for alloc in made)

    def calls_near(self, op: Op) -> set[int]:
        """The calls whose backward an operation may be of; empty where nothing tells.

        The backward of a call reads what the call read and made, nothing else of forward.
        """
        near = [self.near[tensor] for tensor, _, _ in op.reads if tensor in self.near]
        return set.intersection(*near) if near else set()

    def add(self, op: Op, allocs: dict[int, Alloc]) -> None:
        """Append a call; it makes what nobody has used before it."""
        index = len(self.calls)
        made: list[Alloc] = []
        for access in op.writes:
            alloc = allocs[access.tensor]
            is_new = access.tensor not in self.near and alloc not in made
            if is_new and not alloc.uploaded and alloc.kind in _MADE:
                made.append(alloc)
        for access in (*op.reads, *op.writes):
            self.near.setdefault(access.tensor, set()).add(index)
        self.calls.append(op)
        self.made.append(made)


def passes(trace: Trace) -> Iterator[ForwardPass]:
    """Each run of forward calls that a backward follows, in order."""
    allocs: dict[int, Alloc] = {}
    now = ForwardPass()
    before = 0  # the event after the last operation
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            allocs[event.tensor] = event
        elif isinstance(event, Op):
            if event.phase == "forward":
                if not now.calls:
                    now.start = before
                now.add(event, allocs)
            elif now.calls and event.phase == "backward":
                now.turn = before
                yield now
                now = ForwardPass()
            elif event.phase == "update":
                now = ForwardPass()
            before = index + 1
