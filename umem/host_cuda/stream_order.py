"""Orders queued work: draws an order that CUDA's rules allow from a seed.

A stream runs its work in order. Work waits for another stream's work only because of an event, or
by the rules of the legacy default stream: its work runs after all work queued before on blocking
streams, and before all work queued there later. Any other order is allowed, and may happen here:
each seed draws how eagerly streams run, down to none that runs before something waits for it, and
which streams are ahead. Each device has its own default streams.

Models: order. Does not model: concurrent work; one piece of work runs at a time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable
from typing import NamedTuple

LEGACY, LEGACY_HANDLE, PER_THREAD_HANDLE = 0, 1, 2
"""The default streams (cudaStreamLegacy, cudaStreamPerThread, from driver_types.h)."""
EAGERNESS = (0.0, 0.0, 0.03, 0.3, 0.8)
"""Probabilities, one for each seed, that work runs after a call although nothing waits for it.

Guesses: running work as late as possible finds most missing waits, so it has two seeds of five.
"""
DEPTH = 1024
"""The most queued work on a stream before the program waits for it (a guess)."""
FREES_WAIT = 0.5
"""Share of seeds with frees that wait for the device, as CUDA may (a guess)."""


class Key(NamedTuple):
    """A stream: its device (None for work outside streams), and its number there."""

    device: int | None
    stream: Hashable


_AFTER_ALL, _NOBODYS = Key(None, "after all"), Key(None, "some day")
Clock = dict[Key, int]


class Work:
    """A piece of work on a stream.

    Attributes:
        key: the stream.
        after: work that must run before, besides earlier work on the same stream.
        clock: by stream, how much of its work must have run before this work ends.
        is_done: whether it has run.
    """

    __slots__ = ("_function", "after", "clock", "is_done", "key")

    def __init__(
        self, key: Key, function: Callable[[], object] | None, after: list[Work], clock: Clock
    ) -> None:
        self.key, self.after, self.clock, self.is_done = key, after, clock, False
        self._function = function

    def comes_after(self, other: Work) -> bool:
        """Tell whether CUDA's rules order other work before this, at any speed.

        Uses vector clocks (Mattern, "Virtual Time and Global States of Distributed Systems", 1989).
        """
        return self.clock.get(other.key, 0) >= other.clock[other.key]

    def run(self) -> None:
        """Run the work; it counts as done even if it fails."""
        function, self._function = self._function, None
        self.after.clear()
        try:
            if function is not None:
                function()
        finally:
            self.is_done = True


class StreamOrder:
    """Streams with queued work. Not thread-safe: callers hold a lock.

    The first error of late work is kept until `raise_error` or a waiting call raises it, because
    the call that ran the work may be unable to raise, such as a free.

    Args:
        seed: the seed of the order; None runs everything at once.
        home: returns a stream's device.

    Attributes:
        is_late: whether there is a seed.
        is_running: whether work is running.
        frees_wait: whether a free waits for all work, under this seed.
    """

    def __init__(self, seed: int | None, home: Callable[[int], int] = lambda stream: 0) -> None:
        self._home = home
        self._queues: dict[Key, deque[Work]] = {}
        self._non_blocking: set[Hashable] = {_AFTER_ALL.stream, _NOBODYS.stream}
        self._clocks: dict[Key, Clock] = {}  # of what each stream was given last
        self._host: Clock = {}
        self.is_running = False
        self._error: Exception | None = None
        self.reseed(seed)

    def reseed(self, seed: int | None) -> None:
        """Run all queued work, and continue with another seed."""
        self._do_all()
        self._random, self.is_late = random.Random(seed), seed is not None
        self._eagerness = 1.0 if seed is None else self._random.choice(EAGERNESS)
        self._weights: dict[Key, float] = {}
        self.frees_wait = seed is None or self._random.random() < FREES_WAIT
        self.raise_error()

    def raise_error(self) -> None:
        """Raise and clear the stored error, if any; does nothing inside work."""
        if not self.is_running and self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback leads here: what the program's frames hold would stay

    def drop_error(self) -> None:
        """Forget the stored error."""
        self._error = None

    def run_all(self) -> None:
        """Run all queued work, and store its first error."""
        self._do_all()

    def add_non_blocking(self, stream: int) -> None:
        """Exempt a stream from synchronising with the legacy default stream."""
        self._non_blocking.add(stream)

    # -- giving work -----------------------------------------------------------------------

    def issue(
        self, stream: int, function: Callable[[], object] | None, also: Iterable[Work] = ()
    ) -> Work:
        """Queue work on a stream, which also waits for the work in ``also``."""
        key = self._key(stream)
        return self._issue(key, function, [*also, *self._implied(key)])

    def issue_after_all(self, function: Callable[[], object]) -> Work:
        """Queue work after everything queued so far."""
        return self._issue(_AFTER_ALL, function, self._last(self._queues))

    def issue_some_day(self, function: Callable[[], object], after: Iterable[Work]) -> Work:
        """Queue work after other work; only a wait for everything waits for it."""
        return self._issue(_NOBODYS, function, [work for work in after if not work.is_done])

    def _implied(self, key: Key) -> list[Work]:
        return self._last(self._turns(key, self._queues))

    def _last(self, keys: Iterable[Key]) -> list[Work]:
        """Return the last work of streams that have work."""
        queues = [self._queues.get(key) for key in list(keys)]
        return [queue[-1] for queue in queues if queue]

    def _turns(self, key: Key, others: Iterable[Key]) -> list[Key]:
        """Return the streams that a stream implicitly synchronises with (legacy default stream)."""
        if key.stream in self._non_blocking:
            return []
        return [
            other
            for other in list(others)
            if other != key
            and other.device == key.device
            and other.stream not in self._non_blocking
            and LEGACY in (key.stream, other.stream)
        ]

    def is_known_over(self, work: Work) -> bool:
        """Tell whether the host has waited for work, so that later work comes after it."""
        return self._host.get(work.key, 0) >= work.clock[work.key]

    def _clock(self, key: Key, after: Iterable[Work]) -> Clock:
        """Return the vector clock of new work on a stream that follows other work."""
        found = dict(self._host)
        before = [key, *self._turns(key, self._clocks)]
        for clock in (
            *(self._clocks.get(other, {}) for other in before),
            *(w.clock for w in after),
        ):
            _merge(found, clock)
        found[key] = found.get(key, 0) + 1
        self._clocks[key] = found
        return found

    def _issue(self, key: Key, function: Callable[[], object] | None, after: list[Work]) -> Work:
        work = Work(key, function, after, self._clock(key, after))
        queue = self._queues.setdefault(key, deque())
        queue.append(work)
        if len(queue) > DEPTH:
            self.do(queue[0])
        self._wander()
        return work

    # -- waiting ---------------------------------------------------------------------------

    def do(self, work: Work) -> None:
        """Run work and all that it must follow; does nothing inside running work.

        Stores errors.
        """
        while not work.is_done and not self.is_running:
            self._advance(work.key)
            self._wander()

    def finish(self, work: Work) -> None:
        """Run work as `do` does, and raise the stored error."""
        self.do(work)
        _merge(self._host, work.clock)
        self.raise_error()

    def finish_stream(self, stream: int) -> None:
        """Run all work of a stream; on the legacy default stream, other streams' work first."""
        self.finish(self.issue(stream, None))

    def finish_all(self, device: int | None = 0) -> None:
        """Run all work of a device, or for None of all devices, with streams in any order."""
        self._do_all(None if device is None else {device, None})
        self.raise_error()

    def _do_all(self, devices: Container[int | None] | None = None) -> None:
        def which(keys: Iterable[Key]) -> list[Key]:
            return [key for key in list(keys) if devices is None or key.device in devices]

        while (keys := which(self._queues)) and not self.is_running:
            self._advance(self._drawn(keys))
        for key in which(self._clocks):
            _merge(self._host, self._clocks[key])

    def query(self, work: Work | None) -> bool:
        """Tell whether work is done; repeated polling eventually runs it."""
        if work is not None and not work.is_done and self._random.random() < 0.5:
            self.do(work)
        self.raise_error()
        if work is None or not work.is_done:
            return work is None
        _merge(self._host, work.clock)
        return True

    def last_of(self, stream: int) -> Work | None:
        """Return the last work queued on a stream; None if it is idle."""
        queue = self._queues.get(self._key(stream))
        return queue[-1] if queue else None

    def _key(self, stream: int) -> Key:
        found: Hashable = LEGACY if stream == LEGACY_HANDLE else stream
        if stream == PER_THREAD_HANDLE:
            found = PER_THREAD_HANDLE, threading.get_ident()
        return Key(self._home(stream), found)

    # -- running ---------------------------------------------------------------------------

    def _drawn(self, keys: list[Key]) -> Key:
        for key in keys:
            if key not in self._weights:
                self._weights[key] = 10 ** self._random.uniform(-2, 0)
        return self._random.choices(keys, [self._weights[key] for key in keys])[0]

    def _wander(self) -> None:
        """Run some or no work that nothing waits for."""
        while self._queues and not self.is_running and self._random.random() < self._eagerness:
            if keys := list(self._queues):
                self._advance(self._drawn(keys))

    def _advance(self, key: Key) -> None:
        """Run the next work that a stream waits for, or its own; none if already done.

        Python may collect garbage at any moment, and freeing memory runs queued work.
        """
        queue = self._queues.get(key)
        while queue and (waiting := [work for work in queue[0].after if not work.is_done]):
            queue = self._queues.get(self._random.choice(waiting).key)
        if not queue:
            return
        work = queue[0]
        self.is_running = True
        try:
            work.run()
        except Exception as error:
            self._error = self._error or error
        finally:
            self.is_running = False
            queue = self._queues[work.key]
            queue.popleft()
            if not queue:
                del self._queues[work.key]


def _merge(clock: Clock, other: Clock) -> None:
    for key, count in other.items():
        clock[key] = max(clock.get(key, 0), count)
