"""The position of requests in a known order: of workers, prefetched, and after a snapshot."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import umem.data
from umem.data.epoch_position import EpochPosition
from umem.data.store import ItemStore


@dataclass
class Told:
    """An iterator says that it is at a position; whoever asks may be elsewhere."""

    position: int


@dataclass
class Asked:
    """A worker asks for the item of a position."""

    position: int


class Workers:
    """What a cache hears of Chainer's MultiprocessIterator, on a machine that stops any worker.

    Batches are loaded one after another, each by all workers: its parts (an eighth of a batch for
    two workers) go to whoever is free. One batch is loaded while as many as `prefetched` wait.
    When a snapshot is taken, those are dropped, and what is being loaded is loaded to its end,
    for nothing; then loading begins again where the program is.
    """

    def __init__(
        self, length: int, batch: int, workers: int, every: int, seed: int, prefetched: int = 1
    ) -> None:
        self.length, self.batch, self.workers, self.every = length, batch, workers, every
        self.prefetched, self.draw = prefetched, random.Random(seed)
        self.speed = [1.0] * workers
        self.done = self.start = self.drawn = 0
        self.waiting: deque[int] = deque()
        self.is_stale = False

    def events(self, count: int) -> Iterator[Told | Asked]:
        """What is heard until the program has had so many batches."""
        yield Told(0)
        while True:
            first, last = self.start, self.start + self.batch
            if last // self.length > self.drawn:  # the epoch ends in this batch: another is drawn
                self.drawn = last // self.length
                yield Told(first)
            for event in self._load(first, last):
                yield event
                if self.done >= count:
                    return
            if self.is_stale:
                self.is_stale, self.start = False, self.done * self.batch
                continue
            self.waiting.append(first)
            self.start = last
            while len(self.waiting) > self.prefetched:
                yield from self._take()
                if self.is_stale:
                    self.is_stale, self.start = False, self.done * self.batch
                if self.done >= count:
                    return

    def _load(self, first: int, last: int) -> Iterator[Told | Asked]:
        size = -(-self.batch // (4 * self.workers))
        parts = deque(deque(range(at, min(at + size, last))) for at in range(first, last, size))
        busy: dict[int, deque[int]] = {}
        while parts or busy:
            for worker in range(self.workers):
                if worker not in busy and parts:
                    busy[worker] = parts.popleft()
            if self.draw.random() < 0.05:
                self.speed[self.draw.randrange(self.workers)] = self.draw.choice([1.0, 0.3, 0.01])
            names = list(busy)
            worker = self.draw.choices(names, [self.speed[name] for name in names])[0]
            yield Asked(busy[worker].popleft())
            if not busy[worker]:
                del busy[worker]
            if self.waiting and self.draw.random() < 0.5 / self.batch:
                yield from self._take()

    def _take(self) -> Iterator[Told]:
        """The program takes a batch, and every so many a snapshot."""
        self.waiting.popleft()
        self.done += 1
        if self.done % self.every == 0:
            self.waiting.clear()
            self.is_stale = True
            yield Told(self.done * self.batch)


DRAWS = {
    "shuffle": lambda count: umem.data.shuffle,
    "with replacement": lambda count: umem.data.with_replacement,
    "by 1/rank": lambda count: umem.data.Weighted(1 / np.arange(1, count + 1)),
}


def course_of(count: int, seed: int, draw: Any = umem.data.shuffle) -> tuple[EpochPosition, Any]:
    order = umem.data.known_order(seed, draw)
    store = ItemStore(count, 1 << 20, "next-use")
    return EpochPosition(store, order, count), order


CASES = [
    (60, 7, 1), (60, 7, 3), (60, 20, 2), (300, 32, 4), (1000, 100, 8), (500, 250, 4), (200, 200, 4),
]  # fmt: skip


def followed(
    course: EpochPosition, order: Any, flow: Workers, batches: int, *, is_told: bool = True
) -> tuple[int, int]:
    """How many requests there were, and for how many the position was the right one."""
    asked = right = 0
    for event in flow.events(batches):
        epoch, at = divmod(event.position, flow.length)
        if isinstance(event, Told):
            if is_told or event.position % flow.every:
                course.move(epoch, at)
            continue
        found, expected = course.request(int(order.items(epoch)[at]), is_strict=False)
        assert expected is None, f"taken for another order at {event.position}"
        asked, right = asked + 1, right + (found == event.position)
    return asked, right


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 5, 10**9])
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("count, batch, workers", CASES)
def test_requests_of_workers_are_followed_whatever_is_asked_again(
    count: int, batch: int, workers: int, kind: str, every: int
) -> None:
    asked = right = 0
    for seed in range(2):
        course, order = course_of(count, seed, DRAWS[kind](count))
        flow = Workers(count, batch, workers, every, seed, prefetched=1 + 2 * seed)
        found = followed(course, order, flow, 3 * count // batch + 6)
        asked, right = asked + found[0], right + found[1]
    if batch <= count / 8:  # of a batch that is most of an epoch, an item may be at several places
        assert right > {"shuffle": 0.98, "with replacement": 0.9, "by 1/rank": 0.7}[kind] * asked


def test_snapshots_that_tell_the_order_nothing_are_followed() -> None:
    """Those of Chainer's own extension: workers start over, and nobody says so."""
    for seed in range(4):
        course, order = course_of(500, seed)
        flow = Workers(500, 16, 3, 3, seed)
        asked, right = followed(course, order, flow, 100, is_told=False)
        assert asked > 1600 and right > 0.97 * asked


def test_workers_that_ask_in_another_order_are_followed_by_the_nearest_positions() -> None:
    course, _ = course_of(2000, 0)
    course.move(0, 0)
    for item in range(300):
        found, expected = course.request(item, is_strict=False)
        assert found is not None and expected is None and course.next_use(item, found) > found


def test_after_workers_a_program_that_asks_itself_is_held_to_the_order_again() -> None:
    course, order = course_of(60, 0)
    now = order.items(0).tolist()
    for item in (now[1], now[0], now[3], now[2]):
        assert course.request(item, is_strict=False)[1] is None
    for at, item in enumerate(now[4:40], 4):
        assert course.request(item, is_strict=True) == (at, None)
    assert course.request(now[45], is_strict=True) == (None, now[40])
