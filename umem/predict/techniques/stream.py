"""Events in the making, some of whose tensors are followed: dropped, made again, freed in time.

What a plan moves goes down to pinned host memory and back: copies beside the operations, as
`umem.chainer.Recompute` with offload begins them. It is sent when its last use in forward is over,
goes after the call that the plan says, and comes back before the backward that the plan says, or
when it is needed, where the trace goes backward in another order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from umem.errors import GraphError
from umem.planner.link import Move
from umem.planner.plans import Plan
from umem.trace.trace import Access, Alloc, Event, Free, Hint, Op


class Stream:
    """Events with the numbers of the followed tensors as they are at each place.

    A followed tensor is freed at the first rest after its last use. One that is made again has a
    new number.

    Args:
        followed: the tensors.
        fresh: the first number that is free.
    """

    def __init__(self, followed: Iterable[int], fresh: int) -> None:
        self._events: list[Event] = []
        self._now: dict[int, int | None] = {tensor: tensor for tensor in followed}
        self._fresh = fresh
        self._last: dict[int, int] = {}
        self._rests: list[int] = []

    def rest(self) -> None:
        """Let go here what was used last before."""
        self._rests.append(len(self._events) - 1)

    def is_gone(self, tensor: int) -> bool:
        """Tell whether it was dropped and not made again."""
        return self._now.get(tensor, tensor) is None

    def drop(self, tensor: int) -> None:
        """Let go of a tensor, which nothing uses before it is made again."""
        self._now[tensor] = None

    def hold(self, tensor: int) -> None:
        """Keep it up to here, used or not."""
        now = self._now[tensor]
        if now is not None:
            self._last[now] = max(self._last.get(now, 0), len(self._events) - 1)

    def alloc(self, alloc: Alloc) -> None:
        """Begin a tensor, for the first time or again."""
        if alloc.tensor in self._now:
            number = alloc.tensor
            if self.is_gone(number):
                number, self._fresh = self._fresh, self._fresh + 1
            self._now[alloc.tensor] = number
            self._last[number] = len(self._events)
            alloc = alloc._replace(tensor=number)
        self._events.append(alloc)

    def make(self, alloc: Alloc) -> int:
        """A tensor of the stream's own, which it follows; returns its number."""
        number, self._fresh = self._fresh, self._fresh + 1
        self._now[number] = number
        self.alloc(alloc._replace(tensor=number))
        return number

    def op(self, op: Op) -> None:
        """Run an operation.

        Raises:
            GraphError: it uses what is gone.
        """
        used = {tensor for tensor, _, _ in (*op.reads, *op.writes) if tensor in self._now}
        if used:
            op = op._replace(reads=self._mapped(op.reads, op), writes=self._mapped(op.writes, op))
            for tensor in used:
                number = self._now[tensor]
                assert number is not None
                self._last[number] = len(self._events)
        self._events.append(op)

    def other(self, event: Event) -> None:
        """Take any other event; leave out of a hint what is gone."""
        if isinstance(event, Hint):
            here = [access for access in event.accesses if not self.is_gone(access.tensor)]
            event = event._replace(accesses=self._mapped(here))
        self._events.append(event)

    def finish(self, lasting: Iterable[int] = ()) -> list[Event]:
        """Return all events; the numbers of followed tensors that are never freed: ``lasting``."""
        ends: dict[int, list[Free]] = {}
        kept = set(lasting)
        for number, place in self._last.items():
            if number not in kept:
                rest = bisect_left(self._rests, place)
                end = self._rests[rest] if rest < len(self._rests) else len(self._events) - 1
                ends.setdefault(end, []).append(Free(number))
        found: list[Event] = []
        gone: set[int] = set()
        for place, event in enumerate(self._events):
            if gone and isinstance(event, Hint):  # it is no use: nothing is kept for it
                here = (access for access in event.accesses if access.tensor not in gone)
                event = event._replace(accesses=tuple(here))
            found.append(event)
            if place in ends:
                found += ends[place]
                gone.update(free.tensor for free in ends[place])
        return found

    def _mapped(self, accesses: Iterable[Access], op: Op | None = None) -> tuple[Access, ...]:
        found = []
        for access in accesses:
            number = self._now.get(access.tensor, access.tensor)
            if number is None:
                name = "an operation" if op is None else repr(op.name)
                raise GraphError(
                    f"{name} uses tensor {access.tensor}, which the plan has dropped and not "
                    "made again: it was made for another graph"
                )
            found.append(access if number == access.tensor else access._replace(tensor=number))
        return tuple(found)


class PlannedPass(Protocol):
    """A forward pass, see `umem.predict.techniques.budget_graph`."""

    calls: list[Op]
    made: list[list[Alloc]]
    start: int
    turn: int


class Moved:
    """The moves of a plan in the passes of a trace.

    Args:
        stream: where their events go.
        events: the trace.
        planned: its passes.
        plan: the moves, and in which order backward takes calls.
    """

    def __init__(
        self, stream: Stream, events: Sequence[Event], planned: Iterable[PlannedPass], plan: Plan
    ) -> None:
        self._stream = stream
        self._sends: dict[int, list[Alloc]] = {}  # by event
        self._leaves: dict[int, list[Alloc]] = {}
        self._fetches: dict[int, list[tuple[int, Alloc]]] = {}  # by pass: place, and what
        self._allocs: dict[int, Alloc] = {}
        self._pending: list[tuple[int, Alloc]] = []
        order = [call_number(name) for block in plan.blocks for name in block]
        self._place = {call: place for place, call in enumerate(reversed(order))}
        for one in planned if plan.moves else ():
            self._find(events, one, plan.moves)

    def _find(self, events: Sequence[Event], one: PlannedPass, moves: Sequence[Move]) -> None:
        """Find where in a pass its moves begin and end."""
        last: dict[int, int] = {}
        ends: list[int] = []
        for index in range(one.start, one.turn):
            event = events[index]
            if isinstance(event, Op):
                last.update((access.tensor, index) for access in (*event.reads, *event.writes))
                if len(ends) < len(one.calls) and event is one.calls[len(ends)]:
                    ends.append(index)
        for move in moves:
            for alloc in one.made[call_number(move.node)]:
                if (alloc.kind == "stash") == (move.what == "stash"):
                    leaves = max(ends[call_number(move.leaves_after)], last[alloc.tensor])
                    self._sends.setdefault(last[alloc.tensor], []).append(alloc)
                    self._leaves.setdefault(leaves, []).append(alloc)
                    fetch = self._place[call_number(move.fetched_before)], alloc
                    self._fetches.setdefault(one.turn, []).append(fetch)
                    self._allocs[alloc.tensor] = alloc

    def after(self, index: int) -> None:
        """An operation of forward has run: send what it used last, let go what is below."""
        for alloc in self._sends.get(index, ()):
            self._copy("send", alloc)
        for alloc in self._leaves.get(index, ()):
            self._stream.hold(alloc.tensor)
            self._stream.drop(alloc.tensor)
            self._stream.rest()

    def turn(self, index: int) -> None:
        """The backward of a pass begins."""
        self._pending = sorted(self._fetches.get(index, ()), key=lambda pair: -pair[0])

    def before(self, calls: Iterable[int]) -> None:
        """The backward of one of these calls begins: fetch what is due before it."""
        place = min((self._place[call] for call in calls), default=-1)
        while self._pending and self._pending[-1][0] <= place:
            self.bring(self._pending.pop()[1].tensor)

    def bring(self, tensor: int) -> None:
        """Begin to bring back what was moved, if it is not there."""
        alloc = self._allocs.get(tensor)
        if alloc is not None and self._stream.is_gone(tensor):
            self._stream.alloc(alloc._replace(uploaded=False))
            self._copy("fetch", alloc)

    def _copy(self, action: str, alloc: Alloc) -> None:
        whole = Access(alloc.tensor, 0, alloc.nbytes)
        self._stream.other(Hint(action, (whole,), overlap=True))


def call_number(name: str) -> int:
    """The place of a call in its pass, which its node's name ends with."""
    return int(name.rpartition("#")[2])
