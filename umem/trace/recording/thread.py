"""What concerns one thread: who records it, and the operation that is being measured."""

from __future__ import annotations

import threading
import weakref
from time import perf_counter
from tracemalloc import get_traced_memory, reset_peak
from typing import TYPE_CHECKING, Any, Protocol

from umem import scopes
from umem.scopes import derived

if TYPE_CHECKING:
    from umem.trace.recording.recorder import Recorder


class Following:
    """What is told of operations while the scope that holds it is open: a recorder."""

    measure: str


class Meter(Protocol):
    """What tells how much memory is held, and was held at most."""

    def traced(self) -> tuple[int, int]:
        """Bytes now, and at most since `reset`."""

    def reset(self) -> None:
        """Forget the peak."""


class HostMeter:
    """The host's memory, as tracemalloc tells it."""

    traced = staticmethod(get_traced_memory)
    reset = staticmethod(reset_peak)


meters: list[Meter] = [HostMeter()]
"""The last one tells of the workspace of operations: always, where it is not the first."""


class ThreadState:
    """What a thread is inside of: an operation, where a dead one was interrupted; and backward.

    ``entry_count`` numbers the calls that a framework's tape remembers.
    """

    __slots__ = ("backward_depth", "entry_count", "nested_seconds", "operation", "peak_bytes")

    def __init__(self) -> None:
        self.backward_depth = self.entry_count = 0
        self.peak_bytes = 0
        self.nested_seconds = 0.0
        self.operation: weakref.ref[Measured] | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


_local = _Local()


class Audience:
    """The recorders that follow the calling code, outermost first, and its thread's state."""

    __slots__ = ("is_traced", "recorders", "state")

    def __init__(self, payload: tuple[Any, ...]) -> None:
        found: list[Any] = [part for part in payload if isinstance(part, Following)]
        self.recorders: tuple[Recorder, ...] = tuple(found)
        asked = any(follower.measure == "workspace" for follower in found)
        self.is_traced = asked or (bool(found) and len(meters) > 1)
        self.state = _local.state  # what is derived is of one thread, where anybody follows it


def thread_state() -> ThreadState:
    """What the calling thread is inside of."""
    return _local.state


def active() -> tuple[Recorder, ...]:
    """The recorders that follow the calling code, outermost first."""
    return derived(Audience).recorders


def follow_last(recorder: Recorder) -> None:
    """Have this recorder told after all others of the calling code."""
    scopes.move_last(tuple(scope for scope in scopes.inside() if recorder in scope.payload))


def forget_operation() -> None:
    """Where nobody follows this code any more, no operation of it is measured."""
    if not active():
        _local.state.operation = None


def inside() -> bool:
    """Whether the calling thread is inside an operation that is being measured."""
    operation = _local.state.operation
    return operation is not None and operation() is not None


class Measured:
    """One operation being measured: its own seconds, without those of operations inside it.

    ``workspace_bytes`` is the traced peak, that of operations inside it included, above what was
    left when the operation returned; None when time is measured instead.
    """

    __slots__ = (
        "__weakref__", "_outer", "_outer_operation", "_outer_peak", "_start", "_state", "seconds",
        "workspace_bytes",
    )  # fmt: skip

    def __init__(self, told: Audience | None = None) -> None:
        if told is None:
            told = derived(Audience)
        self._state = state = told.state if told.recorders else _local.state
        self._outer = state.nested_seconds
        state.nested_seconds = 0.0
        self._outer_operation = state.operation
        state.operation = weakref.ref(self)
        self._outer_peak = -1
        self.seconds: float | None = None
        self.workspace_bytes: int | None = None
        if told.is_traced:
            meter = meters[-1]
            self._outer_peak = max(state.peak_bytes, meter.traced()[1])
            state.peak_bytes = 0
            meter.reset()
        self._start = perf_counter()

    def stop(self) -> None:
        """The operation has returned; what follows is recording."""
        own = perf_counter() - self._start - self._state.nested_seconds
        if self._outer_peak < 0:
            self.seconds = own if own > 0.0 else 0.0
        else:
            left, peak = meters[-1].traced()
            self.workspace_bytes = max(0, peak - left, self._state.peak_bytes - left)

    def close(self) -> None:
        """Hand the time of this operation and of its recording to the enclosing one."""
        state = self._state
        state.operation = self._outer_operation
        state.nested_seconds = self._outer + perf_counter() - self._start
        if self._outer_peak >= 0:
            state.peak_bytes = max(state.peak_bytes, self._outer_peak)
