"""Peaks of host memory by `tracemalloc`, for one pass at a time.

Slow, and it sees what NumPy allocates only. Where `tracemalloc` is on already it is used as it
is, and its peak is reset.
"""

from __future__ import annotations

import tracemalloc
from typing import Literal

What = Literal["workspace", "peak"]


class Tracing:
    """Off, or measuring each call's workspace, or the peak of a whole pass."""

    def __init__(self) -> None:
        self.what: What | None = None
        self._before = 0
        self._ours = False

    def start(self, what: What) -> None:
        """Begin to measure."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(1)
            self._ours = True
        else:
            tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        self.what = what

    def stop(self) -> None:
        """Measure no more; what was on before stays on."""
        if self._ours:
            tracemalloc.stop()
        self._ours = False
        self.what = None

    def call_begins(self) -> None:
        """What comes now is one call's."""
        if self.what == "workspace":
            tracemalloc.reset_peak()

    def workspace(self) -> int:
        """Bytes that the call needed only while it ran; 0 where they are not measured."""
        if self.what != "workspace":
            return 0
        left, peak = tracemalloc.get_traced_memory()
        return max(0, peak - left)

    def peak(self) -> int:
        """The most bytes at once since the start, above what was there."""
        return tracemalloc.get_traced_memory()[1] - self._before
