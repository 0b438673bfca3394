"""Passes without a plan: left alone where a plain step fits, thinned by a fixed rule otherwise.

The rule holds while a graph is being learned. Calls are taken in blocks of growing length, about
the square root of twice their number. A block ends once it is long enough and little of it is still
held by the user as variables: that is what the next block goes on from. The rest of it goes then,
and what was held only for a while goes at the end of a later block, unless a later block has read
it. In backward, what is missing is made again from there on demand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.observing import Observed
from umem.chainer.recompute.seen import SeenGraph
from umem.chainer.recompute.tape import Call

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

    def end_forward(self, refuse: str | None) -> None:
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


# -- while a graph is being learned --------------------------------------------------------------

FIRST_BLOCK = 4
"""Calls of the first block; each block is one longer than the one before."""
PATIENCE = 2
"""A block ends at the latest at so many times its length."""


class Fallback:
    """Drops by the rule, as calls come."""

    def __init__(self) -> None:
        self._block: list[tuple[Call, Observed]] = []
        self._ended: set[int] = set()
        self._count = 0
        self._least_held: int | None = None
        self._held: list[Call] = []
        self._crossing: set[int] = set()

    def add(self, call: Call, observed: Observed) -> None:
        """A call was applied."""
        if self._block and self._is_over():
            self._end()
        for source in call.sources:
            if source.call is not None and source.call.index in self._ended:
                self._crossing.add(source.call.index)
        self._block.append((call, observed))

    def _is_over(self) -> bool:
        length = FIRST_BLOCK + self._count
        held = sum(observed.nbytes for call, observed in self._block if call.is_held())
        least = held if self._least_held is None else self._least_held
        self._least_held = min(least, held)
        long_enough = len(self._block) >= length and held <= least
        return long_enough or len(self._block) >= PATIENCE * length

    def _end(self) -> None:
        held = []
        for call in self._held:
            if call.is_held():
                held.append(call)
            elif call.index not in self._crossing:
                _let_go(call)
        for call, observed in self._block:
            self._ended.add(call.index)
            if observed.again and call.is_held():
                held.append(call)
            elif observed.again:
                _let_go(call)
            call.pack()
        self._held, self._block = held, []
        self._count += 1
        self._least_held = None


def _let_go(call: Call) -> None:
    call.drop()
    call.drop_stash()
