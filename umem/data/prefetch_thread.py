"""A thread that fetches items before they are requested, in a known order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from umem.data.epoch_position import EpochPosition
from umem.data.loading import Loading
from umem.data.store import RECENT, ItemStore

LOOK_SECONDS = 0.5
"""The thread wakes at least this often, a guess; each request wakes it at once."""
MOST_AHEAD = 1024
"""At most this many positions are looked at ahead of requests, a guess; memory usually limits it
first."""
LEAST_HELD = 2
"""The number of items that may be held whatever their size: one waits while another is fetched."""


class _Ahead(NamedTuple):
    """An item that was fetched ahead.

    Attributes:
        at: the position of its request.
        lost_count: the number of times the cache had been dropped when it was fetched.
        data: its packed bytes; None if the fetch failed.
    """

    at: int
    lost_count: int
    data: bytes | None


class PrefetchThread:
    """Fetches items in the order of future requests, and holds them until they are requested.

    Chainer's workers load batches before they are needed, so the thread rests while workers share
    the cache. A forked process has no such thread, and does not wait for one.

    Args:
        store, position, loading: the cache's parts.
    """

    def __init__(self, store: ItemStore, position: EpochPosition, loading: Loading) -> None:
        self._store, self._position, self._loading = store, position, loading
        self._pid = os.getpid()
        # Locks, because their methods are C. A condition's methods are Python: a signal handler
        # can raise in them with the lock held, or released before `with` releases it.
        self._lock = threading.RLock()
        self._signal, self._fetching = threading.Lock(), threading.Lock()
        self._signal.acquire()  # released once there is something to look at
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._fetched_item: int | None = None
        self._held: dict[int, _Ahead] = {}
        self._being_served: set[int] = set()
        self._evicted: list[tuple[int, Any]] = []
        self._frontier = self._moves = 0

    def is_here(self) -> bool:
        """Tell whether the thread, started or not, belongs to this process and has not ended."""
        return os.getpid() == self._pid and not self._is_over

    def wake(self) -> None:
        """Wake the thread for a new request; the first call starts it."""
        with self._lock:
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(target=self._run, name="umem-data", daemon=True)
                self._thread.start()
        self._notify()

    def _notify(self) -> None:
        with suppress(RuntimeError):  # it has not been heard yet
            self._signal.release()

    def take(self, item: int) -> bytes | None:
        """Take the bytes of an item that was fetched ahead; waits for a fetch in progress.

        None if the item was not fetched, or its fetch failed. It is not fetched again until
        `served`.
        """
        with self._lock:
            self._being_served.add(item)
        if self._fetched_item == item:
            with self._fetching:
                pass
        with self._lock:
            found = self._held.pop(item, None)
        if found is None or found.lost_count != self._store.head["lost_count"]:
            return None
        return found.data

    def served(self, item: int, next_uses: Iterable[float] = ()) -> None:
        """Note that a request is over, and the next uses of items evicted from memory."""
        with self._lock:
            self._being_served.discard(item)
            self._frontier = int(min((self._frontier, *next_uses)))

    def spill(self, evicted: list[tuple[int, Any]]) -> bool:
        """Let the thread write evicted items to disk; False while it still writes earlier ones."""
        with self._lock:
            is_taken = not self._evicted
            if is_taken:
                self._evicted = evicted
        return is_taken

    def close(self) -> None:
        """Stop the thread after its current fetch, and wait for it."""
        if os.getpid() != self._pid:
            return
        self._is_over = True
        self._notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Fetch item by item until closed, sleeping while there is nothing to fetch."""
        try:
            while not self._is_over:
                with self._lock:
                    evicted, self._evicted = self._evicted, []
                self._loading.spill(evicted)
                found = self._next()
                if found is None:
                    self._signal.acquire(timeout=LOOK_SECONDS)
                else:
                    self._fetch(*found)
        finally:  # nobody waits for a thread that is gone
            self._is_over = True
            if self._fetched_item is not None:
                self._fetching.release()

    def _next(self) -> tuple[int, int] | None:
        """Return the next position whose item is neither in memory nor held, and the item.

        The item is marked as being fetched. None if there is no room for another, the cache is
        shared with workers, no order is followed, or the next `MOST_AHEAD` items are there.
        """
        with self._store.held() as head, self._lock:
            self._drop_stale()
            nbytes = sum(len(one.data) for one in self._held.values() if one.data)
            self._store.count_ahead(nbytes)
            if head["is_shared"] or not head["is_following"]:
                return None
            if len(self._held) >= LEAST_HELD and nbytes >= self._store.ahead_bytes:
                return None
            assert self._position.uses is not None
            end = head["at"] + MOST_AHEAD
            while self._frontier < end:
                at = self._frontier
                self._frontier += 1
                item = self._position.uses.item(at)
                if not self._store.first[item] and not self._is_held(item):
                    self._fetching.acquire()
                    self._fetched_item = item
                    return at, item
        return None

    def _is_held(self, item: int) -> bool:
        return item in self._held or item in self._being_served

    def _drop_stale(self) -> None:
        """Drop items that will not be requested; begin anew if requests are at another position."""
        head = self._store.head
        at, is_idle = head["at"], head["is_shared"] or not head["is_following"]
        if is_idle or self._moves != head["moves"]:
            self._moves, self._frontier = head["moves"], at
        self._frontier = max(self._frontier, at)
        self._held = {
            item: one
            for item, one in self._held.items()
            if not is_idle
            and at - RECENT <= one.at < at + MOST_AHEAD
            and one.lost_count == head["lost_count"]
        }

    def _fetch(self, at: int, item: int) -> None:
        """Fetch one item, and hold it for its request.

        An exception of the dataset is dropped here; the request for the item raises it again.
        """
        data, lost_count = None, self._store.head["lost_count"]
        try:
            data = self._loading.fetch(item).data
        except BaseException:  # whoever asks for the item is told, of sys.exit() too
            pass
        with self._lock:
            self._held[item] = _Ahead(at, lost_count, data)
            self._fetched_item = None
        self._fetching.release()
