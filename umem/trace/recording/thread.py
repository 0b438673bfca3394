"""The state of one thread that is recorded."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class ThreadState:
    """What a thread is inside of: an operation, where a dead one was interrupted; and backward.

    ``operation`` is weak: it leads to a `Measured` of the recorder's.
    ``entry_count`` numbers the calls that a framework's tape remembers.
    """

    __slots__ = ("backward_depth", "entry_count", "nested_seconds", "operation", "peak_bytes")

    def __init__(self) -> None:
        self.backward_depth = self.entry_count = 0
        self.peak_bytes = 0
        self.nested_seconds = 0.0
        self.operation: weakref.ref[Any] | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


_local = _Local()


def thread_state() -> ThreadState:
    """What the calling thread is inside of."""
    return _local.state


def inside() -> bool:
    """Whether the calling thread is inside an operation that is being measured."""
    operation = _local.state.operation
    return operation is not None and operation() is not None
