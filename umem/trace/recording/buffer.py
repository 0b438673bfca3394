"""The store of a recorder: events as plain tuples, decoded when somebody asks."""

from __future__ import annotations

from typing import Any, NamedTuple

from umem.trace.events import Event, decode
from umem.trace.stacks import Reader

Raw = tuple[Any, ...]
"""An event as in a file: its kind's name, then its fields."""


class Boundary(NamedTuple):
    """A place in what is stored, and how a recording begins there.

    That is with the allocations that were alive there and the mark ``"start"``.
    """

    position: int
    beginning: tuple[Raw, ...]


class Store:
    """The events of one recording.

    Plain tuples: the garbage collector soon leaves them alone, while to walk through a hundred
    thousand named ones costs more than the rest of recording.
    """

    def __init__(self) -> None:
        self.raw: list[Raw] = []
        self._decoded: list[Event] = []
        self._reader = Reader()

    def __len__(self) -> int:
        return len(self.raw)

    def events(self) -> list[Event]:
        """Everything that is stored."""
        self._decoded += [self._decode(raw) for raw in self.raw[len(self._decoded) :]]
        return list(self._decoded)

    def _decode(self, raw: Raw) -> Event:
        if raw[0] == "alloc" and len(raw) > 6:
            raw = (*raw[:6], self._reader.texts(raw[6]))
        return decode(*raw)

    def drop_before(self, boundary: Boundary) -> None:
        """Forget what was stored before it, but for the allocations that were alive there."""
        self.raw[: boundary.position] = boundary.beginning
        self._decoded.clear()
