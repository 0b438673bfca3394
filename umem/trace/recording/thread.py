"""The state of a recorded thread."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class ThreadState:
    """The operation that a thread is measuring, and its counters.

    Attributes:
        operation: a weak reference to the innermost `Measured`, or None; a dead one if the
            operation was interrupted before it was closed.
        backward_depth: the number of nested backward passes.
        nested_seconds: time of operations nested in the measured one.
        peak_bytes: the meter's peak in the operation so far, before the meter's last reset.
    """

    __slots__ = ("backward_depth", "nested_seconds", "operation", "peak_bytes")

    def __init__(self) -> None:
        self.backward_depth = 0
        self.peak_bytes = 0
        self.nested_seconds = 0.0
        self.operation: weakref.ref[Any] | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


_local = _Local()


def thread_state() -> ThreadState:
    """Return the state of the calling thread."""
    return _local.state


def inside() -> bool:
    """Tell whether the calling thread is inside a measured operation."""
    operation = _local.state.operation
    return operation is not None and operation() is not None
