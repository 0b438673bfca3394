"""Datasets, requests and an oracle for tests of umem.data."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

import umem.data
from umem.data import RawCodec, pack


class Items:
    """A dataset that makes items of its own number, and counts how often it is asked."""

    def __init__(self, count: int, nbytes: int | Sequence[int] = 2000) -> None:
        self.sizes = [nbytes] * count if isinstance(nbytes, int) else list(nbytes)
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        return self.item(index)

    def item(self, index: int) -> Any:
        return np.full(self.sizes[index], index % 251, np.uint8), np.int64(index)

    def packed(self, index: int = 0) -> int:
        """Bytes that a cache without a codec counts for an item."""
        return len(pack(self.item(index), RawCodec()))


def same(found: Any, expected: Any) -> bool:
    return found[1] == expected[1] and found[0].tobytes() == expected[0].tobytes()


def epochs(order: umem.data.KnownOrder, count: int) -> Iterator[list[int]]:
    """Ask a sampler for epoch after epoch, as an iterator of Chainer does."""
    now = order(np.arange(count), 0)
    while True:
        yield now.tolist()
        now = order(now, len(now))


def most_hits(requests: Sequence[int], room: int) -> int:
    """Hits of Belady's MIN for items of one size, which may be left out.

    A heap of the next uses in the whole sequence; what is used last goes.
    """
    next_use, seen = [0.0] * len(requests), dict[int, int]()
    for at in range(len(requests) - 1, -1, -1):
        next_use[at] = seen.get(requests[at], inf)
        seen[requests[at]] = at
    inside, heap, hits = dict[int, float](), list[tuple[float, int]](), 0
    for at, item in enumerate(requests):
        hits += item in inside
        inside[item] = next_use[at]
        heapq.heappush(heap, (-next_use[at], item))
        while len(inside) > room:
            use, last = heapq.heappop(heap)
            if inside.get(last) == -use:
                del inside[last]
    return hits
