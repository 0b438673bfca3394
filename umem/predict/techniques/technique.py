"""A technique, and a step under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umem.devices.base import Mode
from umem.devices.specs import GpuSpec
from umem.trace.trace import Trace

if TYPE_CHECKING:
    from umem.predict.techniques.subject import Subject


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


@dataclass(frozen=True)
class Technique:
    """Something that can be done about a step that does not fit.

    Attributes:
        name: for a person.
        exact: whether the results of training are the same bits.
        tolerance: in a word, by what they differ where they are not.
        prepare: the step under it on a GPU. Raises an `umem.errors.UmemError` where it has
            nothing to offer; the message says why.
    """

    name: str
    exact: bool
    prepare: Callable[[Subject, GpuSpec], Prepared]
    tolerance: str | None = None
