"""A step under a technique, ready to be replayed."""

from __future__ import annotations

from dataclasses import dataclass

from umem.devices.base import Mode
from umem.trace.trace import Trace


@dataclass(frozen=True)
class Prepared:
    """A step under a technique, and how it is replayed.

    ``line`` is the code that turns it on; None where nothing is to be done. ``hintless`` is the
    trace that hints were added to. Where a step has ``more`` micro-batches than the trace, all like
    its last one, ``less`` is the trace with one less, which says what each of them costs.
    """

    trace: Trace
    line: str | None
    mode: Mode = "unmanaged"
    prefetch: bool = False
    hintless: Trace | None = None
    less: Trace | None = None
    more: int = 0

    @property
    def without_hints(self) -> Trace:
        """The trace as it would be without the technique's hints."""
        return self.trace if self.hintless is None else self.hintless
