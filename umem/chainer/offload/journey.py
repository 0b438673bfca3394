"""One backward pass through what was sent a tier down, which is read ahead of its use."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.saved.buffers import Buffer
from umem.units import MIB

AHEAD_BYTES = 32 * MIB
"""So much is brought back before its use, or what one function needs where that is more."""


class Saved(NamedTuple):
    """What one function's backward reads."""

    number: int
    buffers: tuple[Buffer, ...]


class OffloadedPass:
    """One backward pass: reads ahead in the order in which it takes functions.

    Args:
        order: the functions, and what they read.
    """

    def __init__(self, order: list[tuple[Any, Saved]]) -> None:
        self._steps = [saved.buffers for _, saved in order]
        self._places = {func: place for place, (func, _) in enumerate(order)}
        self._at = self._read = 0
        self._ahead_bytes = 0
        self._has_room, self._is_reading = True, False

    def read_ahead(self, func: Any) -> None:
        """A function is about to run: begin to bring back what those after it read.

        As long as there is room: without, nothing is read ahead until the pass is over.
        """
        place = self._places.get(func)
        if place is None:
            return
        while self._at <= place:
            if self._at < self._read:
                self._ahead_bytes -= _bytes(self._steps[self._at])
            self._at += 1
        self._read = max(self._read, self._at)
        self._is_reading = True
        try:
            self._fetch()
        except MemoryError:
            self._has_room = False
        finally:
            self._is_reading = False

    def _fetch(self) -> None:
        while self._has_room and self._read < len(self._steps):
            step = self._steps[self._read]
            if self._ahead_bytes and self._ahead_bytes + _bytes(step) > AHEAD_BYTES:
                return
            for buffer in step:
                if buffer.is_below and buffer.sent is not None:
                    buffer.sent.fetch()
            self._ahead_bytes += _bytes(step)
            self._read += 1

    def release(self) -> None:
        """Let go what was read ahead of the function that runs, which needs the room.

        On the host nothing of it takes room that others need: it is the system's cache.
        """
        if self._is_reading:
            return
        for step in self._steps[self._at : self._read]:
            for buffer in step:
                if buffer.is_below and buffer.sent and not issubclass(buffer.kind, np.ndarray):
                    buffer.drop_kept()
                    buffer.sent.let_go()
                    self._has_room = False

    def needs_next(self, buffer: Buffer) -> bool:
        """Tell whether the next function reads it, too."""
        is_next = self._at < len(self._steps) and buffer in self._steps[self._at]
        return self._has_room and is_next

    def end(self) -> None:
        """Hold nothing for functions that were not taken."""
        for step in self._steps:
            for buffer in step:
                buffer.drop_kept()


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


@contextlib.contextmanager
def released_first(release: Callable[[], None]) -> Iterator[None]:
    """Have something let go before an allocation of the calling thread is refused.

    CuPy's pool has no call for that. What it does before it gives up, in 13 and 14, is to collect
    garbage, and so do umem's pools. (CuPy 13 gives up at once at a limit that `set_limit` has set.)
    Garbage is collected for other reasons too, at any moment: ``release`` may cost time only.
    """
    thread = threading.get_ident()

    def collecting(phase: str, told: dict[str, int]) -> None:
        if phase == "start" and told["generation"] == 2 and threading.get_ident() == thread:
            release()

    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
