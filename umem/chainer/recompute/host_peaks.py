"""Peaks of host memory by `tracemalloc`, for one pass at a time.

Slow, and it sees what NumPy allocates only: on a GPU nothing is measured. Where `tracemalloc` is
on already it is used as it is, and its peak is reset.
"""

from __future__ import annotations

import tracemalloc


class HostPeaks:
    """Off, or measuring each call's workspace, or the peak of a whole pass."""

    def __init__(self) -> None:
        self.what: str | None = None
        self._before = self._forward = 0
        self._ours = False
        self._blind = False

    def start(self, what: str, *, blind: bool = False) -> None:
        """Begin to measure each call's ``workspace``, or a pass's ``peak``.

        ``blind``: the arrays are where it sees nothing.
        """
        self.what, self._blind = what, blind
        if blind:
            return
        if not tracemalloc.is_tracing():
            tracemalloc.start(1)
            self._ours = True
        else:
            tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        self._forward = 0

    def stop(self) -> None:
        """Measure no more; what was on before stays on."""
        if self._ours:
            tracemalloc.stop()
        self._ours = False
        self.what = None

    def call_begins(self) -> None:
        """Measure one call from here on."""
        if self.what == "workspace" and not self._blind:
            tracemalloc.reset_peak()

    def workspace(self) -> int:
        """Bytes that the call needed only while it ran; 0 where they are not measured."""
        if self.what != "workspace" or self._blind:
            return 0
        left, peak = tracemalloc.get_traced_memory()
        return max(0, peak - left)

    def turn(self) -> None:
        """Forward is over."""
        if self.what == "peak" and not self._blind:
            self._forward = tracemalloc.get_traced_memory()[1] - self._before
            tracemalloc.reset_peak()

    def peak(self, cleared: int) -> int | None:
        """The most bytes at once of a pass, above what is there all the time; None unmeasured.

        ``cleared``: what was there before the pass, and went when forward was over.
        """
        if self._blind:
            return None
        backward = tracemalloc.get_traced_memory()[1] - self._before
        if not self._ours:  # what was cleared was followed, and is missing since
            backward += cleared
        return max(self._forward + cleared, backward)
