"""A tier below the one that arrays are in: pinned host memory below a GPU, files below the host."""

from __future__ import annotations

import os
from typing import Any, Protocol

from umem.errors import StateError
from umem.units import BLOCK_BYTES

SMALLEST_BYTES = BLOCK_BYTES // 32
"""Arrays below 64 KiB stay: their way costs more than their room is worth."""


class Process:
    """The process that makes this: one that is forked from it is another."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_this(self) -> bool:
        """Tell whether the calling process is the one."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise StateError in another one."""
        if not self.is_this():
            raise StateError(
                "what backward needs was sent a tier down before this process was forked, and is "
                "its parent's: go backward there, or begin a graph after the fork"
            )


class Sent(Protocol):
    """An array on its way down, below, or on its way back.

    A process that is forked has none of the threads and streams that carry it: there an array that
    was not let go stays, one that was is the parent's, and nothing is waited for.

    Attributes:
        nbytes: the bytes of the array.
    """

    nbytes: int

    def is_gone(self) -> bool:
        """Tell whether the copy below is whole, so that the array may be let go at once."""

    def let_go(self) -> None:
        """Hold the array no more, once the copy below is whole; whoever has to wait for it, waits.

        On a GPU that is the stream that computes, never the host.
        """

    def fetch(self) -> None:
        """Begin to bring the array back, beside what runs; a second time does nothing."""

    def array(self) -> Any:
        """The array: contents, shape, type and strides as they were; waits for what is under way.

        It is held by the caller alone, and may be asked for again once it was let go.
        """

    def forget(self) -> None:
        """Give up the room below; a second time does nothing."""


class Tier(Protocol):
    """Where arrays go.

    Attributes:
        name: in words, such as "pinned host memory".
        sent_bytes, fetched_bytes: what went down, and what came back.
        waited_seconds: how long the program waited for either, where that can be known.
    """

    name: str
    sent_bytes: int
    fetched_bytes: int
    waited_seconds: float

    def send(self, array: Any) -> Sent | None:
        """Begin to copy an array down, which owns dense memory in any order of its axes.

        None: there is no room, and the array stays where it is. Nobody may change it from now on
        until it is let go.
        """

    def close(self) -> None:
        """Wait for what is under way, and give up everything; a second time does nothing."""
