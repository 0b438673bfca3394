"""One backward pass over offloaded saved tensors: the prefetch of their buffers."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.saved.buffers import Buffer
from umem.planner import AHEAD_BYTES


class Saved(NamedTuple):
    """The buffers that one function's backward reads, and its number in the order of forward."""

    number: int
    buffers: tuple[Buffer, ...]


class OffloadedPass:
    """One backward pass: prefetches buffers in the order in which functions run backward.

    Args:
        order: the functions in that order, each with its saved buffers.
    """

    def __init__(self, order: list[tuple[Any, Saved]]) -> None:
        self._steps = [saved.buffers for _, saved in order]
        self._places = {func: place for place, (func, _) in enumerate(order)}
        self._at = self._read = 0
        self._ahead_bytes = 0
        self._has_room, self._is_reading = True, False

    def read_ahead(self, func: Any) -> None:
        """Begin to prefetch the buffers of the functions after ``func``, whose backward runs next.

        Once an allocation has failed, nothing is prefetched until the pass is over. A function that
        is not part of the pass changes nothing.
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
        """Prefetch the buffers of one function after another, up to `AHEAD_BYTES`.

        Raises:
            MemoryError: no room for a buffer; those before it are being fetched.
        """
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
        """Drop prefetched buffers, because the running function needs the room.

        Only those on a GPU: on the host they are pages of the system's cache, freed as needed. If
        there were any, nothing more is prefetched in this pass.
        """
        if self._is_reading:
            return
        for step in self._steps[self._at : self._read]:
            for buffer in step:
                if buffer.is_below and buffer.sent and not issubclass(buffer.kind, np.ndarray):
                    buffer.drop_kept()
                    buffer.sent.release()
                    self._has_room = False

    def needs_next(self, buffer: Buffer) -> bool:
        """Tell whether the next function reads a buffer too, and no allocation has failed."""
        is_next = self._at < len(self._steps) and buffer in self._steps[self._at]
        return self._has_room and is_next

    def end(self) -> None:
        """Drop the buffers that are held for functions that did not run."""
        for step in self._steps:
            for buffer in step:
                buffer.drop_kept()


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


@contextlib.contextmanager
def released_first(release: Callable[[], None]) -> Iterator[None]:
    """Call ``release`` in the block before an allocation of the calling thread fails.

    CuPy's pool has no hook for that. Before an allocation fails, CuPy 13 and 14 collect garbage,
    and so do umem's pools: a callback of the collector, on its oldest generation, calls
    ``release``. (CuPy 13 fails at once at a limit that `set_limit` has set.) Garbage may also be
    collected at any other moment: ``release`` must be correct then, and may only cost time.
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
