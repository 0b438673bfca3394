"""What can be instrumented while recorders are active, and the count of those that are."""

from __future__ import annotations

from typing import Protocol

from umem.forking import safe_lock


class Source(Protocol):
    """Something that can be instrumented while recorders are active."""

    def start(self) -> None:
        """Instrument; called when the first recorder of any thread is entered."""

    def stop(self) -> None:
        """Restore exactly what was there; called when the last recorder is left."""


_sources: list[Source] = []
_started_count = 0
_lock = safe_lock()


def add_source(source: Source) -> None:
    """Instrument ``source`` whenever a recorder is active, from now on."""
    with _lock:
        _sources.append(source)
        if _started_count:
            source.start()


def start_sources() -> None:
    """A recorder is entered."""
    global _started_count
    with _lock:
        if _started_count == 0:
            for source in _sources:
                source.start()
        _started_count += 1


def stop_sources() -> None:
    """A recorder is left."""
    global _started_count
    with _lock:
        _started_count -= 1
        if _started_count == 0:
            for source in reversed(_sources):
                source.stop()
