"""What concerns one thread: who records it, and the operation that is being measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from tracemalloc import get_traced_memory, reset_peak
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.recorder import Recorder


class _State:
    """What concerns one thread."""

    __slots__ = ("depth", "nested_seconds", "peak_bytes", "recorders", "traced")

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.recorders: tuple[Recorder, ...] = ()
        self.traced = False
        self.nested_seconds = 0.0
        self.depth = 0


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_local = _Local()


def active() -> tuple[Recorder, ...]:
    """The recorders that follow the calling thread, outermost first."""
    return _local.state.recorders


def follow(recorders: tuple[Recorder, ...]) -> None:
    """Have these recorders follow the calling thread."""
    state = _local.state
    state.recorders = recorders
    state.traced = any(recorder.measure == "workspace" for recorder in recorders)


def inside() -> bool:
    """Whether the calling thread is inside an operation that is being measured."""
    return _local.state.depth > 0


@contextmanager
def paused() -> Iterator[None]:
    """Run a block that no recorder sees: the library's own arithmetic."""
    before = active()
    follow(())
    try:
        yield
    finally:
        follow(before)


class Measured:
    """One operation being measured: its own seconds, without those of operations inside it.

    ``workspace_bytes`` is the traced peak, that of operations inside it included, above what was
    left when the operation returned; None when time is measured instead.
    """

    __slots__ = ("_outer", "_outer_peak", "_start", "_state", "seconds", "workspace_bytes")

    def __init__(self) -> None:
        self._state = state = _local.state
        self._outer = state.nested_seconds
        state.nested_seconds = 0.0
        state.depth += 1
        self._outer_peak = -1
        self.seconds: float | None = None
        self.workspace_bytes: int | None = None
        if state.traced:
            self._outer_peak = max(state.peak_bytes, get_traced_memory()[1])
            state.peak_bytes = 0
            reset_peak()
        self._start = perf_counter()

    def stop(self) -> None:
        """The operation has returned; what follows is recording."""
        own = perf_counter() - self._start - self._state.nested_seconds
        if self._outer_peak < 0:
            self.seconds = own if own > 0.0 else 0.0
        else:
            left, peak = get_traced_memory()
            self.workspace_bytes = max(0, peak - left, self._state.peak_bytes - left)

    def close(self) -> None:
        """Hand the time of this operation and of its recording to the enclosing one."""
        state = self._state
        state.depth -= 1
        state.nested_seconds = self._outer + perf_counter() - self._start
        if self._outer_peak >= 0:
            state.peak_bytes = max(state.peak_bytes, self._outer_peak)
