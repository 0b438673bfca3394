"""A pass of a graph that fits its budget as a plain step: nothing is done to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.seen import SeenGraph

ENDED_EARLY = "a pass ended before its plan did: it keeps the rest"


def other_call(index: int, label: str) -> str:
    """Word a warning: a pass leaves the graph that was learned."""
    return (
        f"call {index} ({label}) is not what was planned: this pass keeps everything from there "
        "on. A graph that comes back is planned for"
    )


class PlainPass:
    """One forward and its backward as Chainer runs them, compared with what was learned.

    Compared is what a larger step would show in: the functions, the parameters and other arrays
    from outside that they read, and what they make.

    Args:
        known: the graphs that may come, the likeliest first; all of them fit.
    """

    def __init__(self, known: Sequence[SeenGraph]) -> None:
        self._known = known
        self.follows = known[0]
        self.went_back = self.is_stale = False
        self.differs: str | None = None
        self._funcs: list[weakref.ref[Any]] = []

    @property
    def is_over(self) -> bool:
        """True where the next call begins another pass: nothing of this one can still be used."""
        if not self._funcs or self.went_back or self.is_stale:
            return True
        return self._funcs[-1]() is None and not self.has_graph

    @property
    def has_graph(self) -> bool:
        """True where anything of its graph is alive."""
        return any(reference() is not None for reference in reversed(self._funcs))

    @property
    def is_empty(self) -> bool:
        """True where no function was applied: the first of them has failed."""
        return not self._funcs

    def add(self, func: Any, outputs: Any) -> None:
        """A function was applied."""
        index = len(self._funcs)
        self._funcs.append(weakref.ref(func))
        if self.differs is not None or _is_call(self.follows, index, func, outputs):
            return
        for other in self._alike(index):
            if _is_call(other, index, func, outputs):
                self.follows = other
                return
        self.differs = other_call(index, func.label)

    def go_stale(self) -> None:
        """End with the next call: it reads other arrays, and begins another pass."""
        self.is_stale = True

    def finish(self) -> bool:
        """Backward is over; whether it was the first of this pass."""
        first, self.went_back = not self.went_back, True
        return first

    def settle(self, refuse: str | None) -> None:
        """Backward begins; ``refuse`` says why it takes more than was learned."""
        self._look_at_end()
        if refuse is not None:
            self.differs = refuse

    def _look_at_end(self) -> None:
        count = len(self._funcs)
        if self.differs is not None or count == len(self.follows.tape.looks):
            return
        for other in self._alike(count):
            if count == len(other.tape.looks):
                self.follows = other
                return
        self.differs = ENDED_EARLY

    def _alike(self, count: int) -> Iterator[SeenGraph]:
        """The other graphs whose first calls look the same."""
        so_far = self.follows.tape.looks[:count]
        for other in self._known:
            if other is not self.follows and other.tape.looks[:count] == so_far:
                yield other


def _is_call(seen: SeenGraph, index: int, func: Any, outputs: Any) -> bool:
    if index >= len(seen.tape.looks):
        return False
    kind, leaves, made = seen.tape.looks[index]
    if kind is not type(func) and kind is not type(owner_of(func)):
        return False
    if len(outputs) != len(made):
        return False
    for y, (shape, dtype) in zip(outputs, made, strict=True):
        array = y._data[0]
        if array.shape != shape or array.dtype != dtype:
            return False
    for place, shape, dtype in leaves:
        node = func.inputs[place] if place < len(func.inputs) else None
        if node is None or node.shape != shape or node.dtype != dtype:
            return False
    return True
