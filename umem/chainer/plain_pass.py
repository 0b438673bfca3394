"""A pass of a graph that fits its budget as a plain step: nothing is done to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from umem.chainer.learning import Learned
from umem.chainer.wiring import owner_of

ENDED_EARLY = "a pass ended before its plan did: it keeps the rest"


def other_call(index: int, label: str) -> str:
    """What to tell the user of a pass that leaves what was learned."""
    return (
        f"call {index} ({label}) is not what was planned: this pass keeps everything from there "
        "on. A graph that comes back is planned for"
    )


class PlainPass:
    """One forward and its backward as Chainer runs them, compared with what was learned.

    Only what a larger step would show in is compared: the functions and what they make.

    Args:
        known: the graphs that may come, the likeliest first; all of them fit.
    """

    def __init__(self, known: Sequence[Learned]) -> None:
        self._known = known
        self.learned = known[0]
        self.went_back = False
        self.differs: str | None = None
        self._seen = 0
        self._first: Any = None
        self._last: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the next call is one of another pass."""
        if self._last is None:
            return False
        return self.went_back or (self._last() is None and self._first() is None)

    def add(self, func: Any, outputs: Any) -> None:
        """A function was applied."""
        index = self._seen
        self._seen = index + 1
        self._last = weakref.ref(func)
        if index == 0:
            self._first = self._last
        if _is_call(self.learned, index, func, outputs) or self.differs is not None:
            return
        for other in self._alike(index):
            if _is_call(other, index, func, outputs):
                self.learned = other
                return
        self.differs = other_call(index, func.label)

    def settle(self) -> None:
        """Backward begins."""
        if self.differs is not None or self._seen == len(self.learned.signatures):
            return
        for other in self._alike(self._seen):
            if self._seen == len(other.signatures):
                self.learned = other
                return
        self.differs = ENDED_EARLY

    def _alike(self, count: int) -> Iterator[Learned]:
        """The other graphs whose first calls are the same."""
        so_far = self.learned.signatures[:count]
        for other in self._known:
            if other is not self.learned and other.signatures[:count] == so_far:
                yield other


def _is_call(learned: Learned, index: int, func: Any, outputs: Any) -> bool:
    if index >= len(learned.signatures):
        return False
    kind, _, made = learned.signatures[index]
    if kind is not type(func) and kind is not type(owner_of(func)):
        return False
    if len(outputs) != len(made):
        return False
    for y, (shape, dtype) in zip(outputs, made, strict=True):
        array = y._data[0]
        if array.shape != shape or array.dtype != dtype:
            return False
    return True
