"""Which of the arrays that backward reads to let go next.

The rule is that of Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021): the least of

    (its own cost + the cost of what is gone around it) / (bytes * staleness)

where what is gone around a value has to run again with it. It is h_DTR_eq, whose neighbourhoods
are sets in a forest (union and find) that grow when a value goes, and get cheaper, but stay
whole, when one is made again. Three things differ. Staleness looks forward, because Chainer's
backward takes functions by falling rank: it is the distance in ranks to the function that reads
the value first. And a value that nobody keeps, which has to run again with each that is made of
it, counts with those and is none of its own. And where there is a link to an offload target, a
value costs at most its way there and back, which takes nothing else with it.

Source: https://arxiv.org/abs/2006.09616, section 4 and appendix C.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from umem.planner.link import Link

AT_ONCE = 64
"""So many candidates are taken from one look at all of them."""
LEAST_SECONDS = 1e-7


class Candidates:
    """The values of one pass, by number.

    Cost: of adding one, a microsecond; of choosing, one pass over arrays of all of them, and a few
    microseconds for each that is chosen.

    Args:
        link: to the offload target, in bytes a second; None where nothing moves.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._way = _seconds_a_byte(link)
        self._smallest = 0 if link is None else link.smallest_bytes
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

    def __len__(self) -> int:
        return self._count

    def add(self, rank: int, seconds: float, sources: Iterable[int]) -> int:
        """One more value, made of others in so much time; returns its number.

        It cannot go before `hold`.
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
        """It is there, and may go: that would free so many bytes."""
        self._bytes[number] = nbytes

    def lock(self, number: int) -> None:
        """It may not go, or it is not there."""
        self._bytes[number] = 0.0

    def read(self, number: int, rank: int) -> None:
        """A function of this rank reads it in backward."""
        if rank > self._ranks[number]:
            self._ranks[number] = rank

    def choose(self, rank: int) -> Iterator[int]:
        """The values that may go, those that cost the least for what they free first.

        Not all of them: `AT_ONCE` at most. Each that is yielded goes before the next is asked for,
        or is locked.

        Args:
            rank: of the function that runs; backward has come down to it, or forward up.
        """
        count = self._count
        nbytes = self._bytes[:count]
        distance = np.maximum(rank + 1 - self._ranks[:count], 1.0)
        seconds = self._seconds[:count]
        if self._way < math.inf:
            seconds = np.where(
                nbytes < self._smallest, seconds, np.minimum(seconds, self._way * nbytes)
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = seconds / (nbytes * distance)
        few = min(AT_ONCE, count)
        found = np.argpartition(scores, few - 1)[:few] if few < count else np.arange(count)
        heap = [(scores[n], n) for n in found.tolist() if nbytes[n] > 0]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            self._seconds[number] = self._cost_again(number)
            cost = min(self._seconds[number], self._way_of(number))
            score = cost / (self._bytes[number] * distance[number])
            if heap and score > heap[0][0]:
                heapq.heappush(heap, (score, number))
            else:
                yield number

    def moves(self, number: int) -> bool:
        """Tell whether its way down and back costs less than making it again."""
        return self._way_of(number) < self._cost_again(number)

    def _way_of(self, number: int) -> float:
        nbytes = float(self._bytes[number])
        return self._way * nbytes if nbytes >= self._smallest else math.inf

    def _cost_again(self, number: int) -> float:
        return self._cost[number] + self._cost_around(number)

    # -- what is gone ----------------------------------------------------------------------

    def go(self, number: int) -> None:
        """It is let go."""
        self._bytes[number] = 0.0
        self._is_gone[number] = True
        own = self._set[number] = len(self._parents)
        self._parents.append(own)
        self._set_cost.append(self._cost[number])
        for near in self._near[number]:
            if self._is_gone[near]:
                self._join(own, self._set[near])

    def come_back(self, number: int) -> None:
        """It was made again."""
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


def _seconds_a_byte(link: Link | None) -> float:
    """Down and back, one way after the other."""
    return 1 / link.out_rate + 1 / link.in_rate if link is not None and link.moves else math.inf
