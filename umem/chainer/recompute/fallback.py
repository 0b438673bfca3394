"""Drops by a fixed rule, while a graph is being learned and there is no plan yet.

Calls are taken in blocks of growing length, about the square root of twice their number. A block
ends once it is long enough and little of it is still held by the user as variables: that is what
the next block goes on from. The rest of it goes then, and what was held only for a while goes at
the end of a later block, unless a later block has read it. In backward, what is missing is made
again from there on demand.
"""

from __future__ import annotations

from umem.chainer.recompute.observing import Observed
from umem.chainer.recompute.tape import Call

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
