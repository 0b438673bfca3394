"""Choice of the saved tensor to evict next.

The rule is Dynamic Tensor Rematerialization's (Kirisame et al., ICLR 2021): evict the least

    (its own cost + the cost of its evicted neighbourhood) / (bytes * staleness)

where the evicted values around a value must be recomputed with it. It is h_DTR_eq, whose
neighbourhoods are sets in a forest (union and find). They grow when a value is evicted; when one is
recomputed they get cheaper, but stay whole. Two things differ. Staleness looks forward, because
Chainer's backward takes functions by falling rank: it is the distance in ranks to the function that
reads the value first. A value that backward does not read must be recomputed with each value made
from it, so its cost is a part of theirs, and it is no candidate.

Source: https://arxiv.org/abs/2006.09616, section 4 and appendix C.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

AT_ONCE = 64
"""At most this many candidates are taken from one scan of all of them. A guess, not measured."""
LEAST_SECONDS = 1e-7
"""For a call too short for the clock: about the clock's resolution."""


class Candidates:
    """The values of one pass, by number, and the order in which to evict them.

    Cost: a microsecond to add one; to choose, one pass over arrays of all of them, and a few
    microseconds for each chosen one.
    """

    def __init__(self) -> None:
        self._count = 0
        self._bytes = np.zeros(1024)
        self._seconds = np.zeros(1024)
        self._ranks = np.zeros(1024)
        self._cost: list[float] = []
        self._near: list[list[int]] = []
        self._is_gone: list[bool] = []
        self._set: list[int] = []
        self._parents: list[int] = []
        self._set_cost: list[float] = []

    def add(self, rank: int, seconds: float, sources: Iterable[int]) -> int:
        """Add a value that takes this many seconds to compute from others; returns its number.

        The value cannot be evicted before `hold`.

        Args:
            rank: the highest rank of the functions whose backward reads it; -1: none so far.
            seconds: to recompute it from its sources; infinite if that is not allowed.
            sources: the numbers of the values that it is computed from.
        """
        number = self._count
        if number == len(self._bytes):
            self._grow()
        self._count += 1
        seconds = max(seconds, LEAST_SECONDS)
        self._seconds[number], self._ranks[number] = seconds, rank
        self._cost.append(seconds)
        near = list(sources)
        for one in near:
            self._near[one].append(number)
        self._near.append(near)
        self._is_gone.append(False)
        self._set.append(-1)
        return number

    def _grow(self) -> None:
        for name in ("_bytes", "_seconds", "_ranks"):
            array: Any = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(len(array))]))

    def hold(self, number: int, nbytes: int) -> None:
        """Allow a live value to be evicted, which would free this many bytes."""
        self._bytes[number] = nbytes

    def lock(self, number: int) -> None:
        """Protect a value from eviction; also one that is not alive."""
        self._bytes[number] = 0.0

    def read(self, number: int, rank: int) -> None:
        """Record that the backward of a function of this rank reads a value."""
        if rank > self._ranks[number]:
            self._ranks[number] = rank

    def choose(self, rank: int) -> Iterator[int]:
        """Yield the values to evict: first those with the least cost for the bytes they free.

        At most `AT_ONCE` of them. Evict or lock each one before requesting the next.

        Args:
            rank: the rank of the function that runs now, in forward or backward.
        """
        count = self._count
        nbytes = self._bytes[:count]
        distance = np.maximum(rank + 1 - self._ranks[:count], 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = self._seconds[:count] / (nbytes * distance)
        few = min(AT_ONCE, count)
        found = np.argpartition(scores, few - 1)[:few] if few < count else np.arange(count)
        heap = [(scores[n], n) for n in found.tolist() if nbytes[n] > 0]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            self._seconds[number] = self._cost[number] + self._cost_around(number)
            score = self._seconds[number] / (self._bytes[number] * distance[number])
            if heap and score > heap[0][0]:
                heapq.heappush(heap, (score, number))
            else:
                yield number

    # -- evicted neighbourhoods ------------------------------------------------------------

    def go(self, number: int) -> None:
        """Record that a value is evicted, which joins the neighbourhoods around it."""
        self._bytes[number] = 0.0
        self._is_gone[number] = True
        own = self._set[number] = len(self._parents)
        self._parents.append(own)
        self._set_cost.append(self._cost[number])
        for near in self._near[number]:
            if self._is_gone[near]:
                self._join(own, self._set[near])

    def restored(self, number: int) -> None:
        """Record that an evicted value was recomputed."""
        if self._is_gone[number]:
            self._is_gone[number] = False
            self._set_cost[self._find(self._set[number])] -= self._cost[number]

    def _cost_around(self, number: int) -> float:
        sets = {self._find(self._set[near]) for near in self._near[number] if self._is_gone[near]}
        return sum(self._set_cost[one] for one in sets)

    def _find(self, one: int) -> int:
        parents = self._parents
        while parents[one] != one:
            parents[one] = one = parents[parents[one]]
        return one

    def _join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            self._parents[one] = other
            self._set_cost[other] += self._set_cost[one]
