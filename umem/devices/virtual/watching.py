"""Notifies a watcher of allocations on a virtual GPU, from its events."""

from __future__ import annotations

from typing import Any

from umem.devices.base import Watcher
from umem.devices.virtual.driver import Placed
from umem.trace import Alloc, Event, Free, Op


class EventWatch:
    """Notifies a watcher of tensors and workspaces that events allocate.

    Excludes earlier allocations and empty arrays. Not thread-safe: its device sends one event at a
    time.
    """

    def __init__(self, watcher: Watcher, tensors: dict[int, Placed]) -> None:
        self._watcher, self._tensors = watcher, tensors
        self._tickets: dict[int, Any] = {}

    def begin(self) -> None:
        """Announce an event before the model applies it."""
        self._watcher.begin()

    def on_event(self, event: Event) -> None:
        """Apply an event that the model has accepted."""
        watcher = self._watcher
        if isinstance(event, Alloc):
            if event.nbytes:
                label = f"{event.label} {event.kind}"
                placed = self._tensors[event.tensor]
                address = placed.span.address if placed.managed else 0
                self._tickets[event.tensor] = watcher.allocated(event.nbytes, label, address)
        elif isinstance(event, Free):
            if event.tensor in self._tickets:
                watcher.freed(self._tickets.pop(event.tensor))
        elif isinstance(event, Op) and event.workspace_bytes:
            watcher.freed(watcher.allocated(event.workspace_bytes, f"{event.name} workspace", 0))
