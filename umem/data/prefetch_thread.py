"""A thread that fetches items before they are asked for, in the order that is known."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from umem.data.epoch_position import EpochPosition
from umem.data.loading import Loaded, Loading
from umem.data.store import MOST_AHEAD, ItemStore

LOOK_SECONDS = 0.5
"""The thread wakes at least this often; each request wakes it at once."""


class PrefetchThread:
    """Prefetches items in the order of coming requests, in the process that made the cache.

    Workers fetch ahead themselves, as Chainer has them load batches that are not needed yet: where
    they ask, the thread rests. A forked process has none of it, and waits for nothing.

    Args:
        store, position, loading: of the cache.
    """

    def __init__(self, store: ItemStore, position: EpochPosition, loading: Loading) -> None:
        self._store, self._position, self._loading = store, position, loading
        self._pid = os.getpid()
        # Locks, as their methods are C. Those of a condition are Python: a signal's handler can
        # raise in them with the lock held, or with it released before `with` releases it.
        self._lock = threading.RLock()
        self._bell, self._fetching = threading.Lock(), threading.Lock()
        self._bell.acquire()  # released once there is something to look at
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._under_way: int | None = None
        self._hand: tuple[int, Loaded] | None = None

    def is_here(self) -> bool:
        """Tell whether the thread, started or not, is this process's and not over."""
        return os.getpid() == self._pid and not self._is_over

    def wake(self) -> None:
        """Wake the thread for a new request; the first call starts it."""
        with self._lock:
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(target=self._run, name="umem-data", daemon=True)
                self._thread.start()
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it has not been heard yet
            self._bell.release()

    def hand_over(self, at: int) -> Loaded | None:
        """Wait for the fetch under way for a position, and take its item; None if there is none.

        None, too, if the fetch failed.
        """
        if self._under_way == at:
            with self._fetching:
                pass
        with self._lock:
            if self._hand is not None and self._hand[0] == at:
                (_, found), self._hand = self._hand, None
                return found
        return None

    def close(self) -> None:
        """Stop the thread after its current fetch, and wait for it."""
        if os.getpid() != self._pid:
            return
        self._is_over = True
        self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Prefetch position by position until closed, sleeping while there is nothing to fetch."""
        try:
            while not self._is_over:
                found = self._next()
                if found is None:
                    self._rest()
                else:
                    self._deal_with(*found)
        finally:  # nobody waits for a thread that is gone
            self._is_over = True
            if self._under_way is not None:
                self._fetching.release()

    def _rest(self) -> None:
        self._bell.acquire(timeout=LOOK_SECONDS)

    def _next(self) -> tuple[int, int] | None:
        """Return the next position whose item is not in memory, and the item; None if none is due.

        Moves the frontier past items in memory, pins them and spills others; the position that is
        returned is noted as under way. None is due while the current request is not dealt with, the
        cache is shared with workers, no order is followed, or `MOST_AHEAD` is reached.
        """
        store, position = self._store, self._position
        while True:
            with store.held() as head:
                at = head["frontier"]
                is_open = at < head["at"]  # the request before is not dealt with
                if is_open or head["is_shared"] or not head["is_following"]:
                    return None
                if at - head["at"] >= MOST_AHEAD:
                    return None
                assert position.uses is not None
                item = position.uses.item(at)
                gone = store.pin(item, at, position.next_use(item, at))
                if gone is None:
                    self._fetching.acquire()
                    self._under_way = at
                    return at, item
                head["frontier"] = at + 1
            self._loading.spill(gone)

    def _deal_with(self, at: int, item: int) -> None:
        """Fetch one item, offer it to a waiting request, and wait until it is stored or requested.

        An exception of the dataset is dropped here; the request for the item raises it again.
        """
        loaded = None
        try:
            loaded = self._loading.fetch(item)
        except BaseException:  # whoever asks for the item is told, of sys.exit() too
            pass
        with self._lock:
            self._hand = None if loaded is None else (at, loaded)
            self._under_way = None
        self._fetching.release()
        while not self._is_over and not self._is_settled(at, item, loaded):
            self._rest()

    def _is_settled(self, at: int, item: int, loaded: Loaded | None) -> bool:
        """Store a fetched item; tells whether it is stored, or no longer needed for prefetch.

        Storing it evicts and spills others, and moves the frontier past it.
        """
        store = self._store
        with store.held() as head:
            if (
                head["at"] > at
                or head["frontier"] != at
                or not head["is_following"]
                or head["is_shared"]
            ):
                return True
            if loaded is None:
                return False
            next_use = self._position.next_use(item, at)
            gone = store.keep(item, loaded.data, next_use, at, is_ahead=True)
            if gone is None:
                return False
            head["frontier"] = at + 1
        with self._lock:
            self._hand = None
        self._loading.spill(gone)
        return True
