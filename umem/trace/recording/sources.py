"""Sources of events, which are instrumented while any recorder is active."""

from __future__ import annotations

from typing import Literal, Protocol

from umem._common.locks import safe_lock


class Source(Protocol):
    """A library or device that can be instrumented while recorders are active.

    A signal may interrupt either method: `stop` is called next, and `start` possibly after that.
    """

    def start(self) -> None:
        """Instrument; called when the first recorder of any thread is entered."""

    def stop(self) -> None:
        """Undo the instrumentation exactly; called when the last recorder is left."""


added: list[Source] = []
"""The sources that are instrumented whenever a recorder is active, in the order of starting."""
_users: set[object] = set()
_state: Literal["off", "changing", "on"] = "off"
_lock = safe_lock()


def add_source(source: Source) -> None:
    """Instrument ``source`` whenever a recorder is active, from now on."""
    with _lock:
        added.append(source)
        if _state == "on":
            source.start()


def remove_source(source: Source) -> None:
    """Stop ``source``, and do not instrument it any more."""
    with _lock:
        if _state == "on":
            source.stop()
        added.remove(source)


def start_sources(user: object) -> None:
    """Start all sources if this user, an entered recorder's stand-in, is the first."""
    global _state
    with _lock:
        _users.add(user)
        if _state == "on":
            return
        _stop_all()  # what an interrupted start has left
        _state = "changing"
        for source in added:
            source.start()
        _state = "on"


def stop_sources(user: object) -> None:
    """Stop all sources if this user of `start_sources` was the last; a second time does nothing."""
    with _lock:
        _users.discard(user)
        if not _users:
            _stop_all()


def _stop_all() -> None:
    global _state
    if _state == "off":
        return
    _state = "changing"
    for source in reversed(added):
        source.stop()
    _state = "off"
