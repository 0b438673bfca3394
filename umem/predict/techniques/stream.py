"""Events in the making, some of whose tensors are followed: dropped, made again, freed in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from umem.errors import GraphError
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
