"""A dataset that caches another one's items in memory and on a disk, by a policy."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsIndex

from umem._common.files import IN_MEMORY, file_system
from umem.data.codec import Codec, RawCodec
from umem.data.counters import COUNTED, DataCounters
from umem.data.dataset_mixin import DatasetMixin
from umem.data.disk_tier import OTHER_ORDER, DiskTier, warn_once
from umem.data.epoch_position import EpochPosition
from umem.data.fingerprint import fingerprint
from umem.data.loading import CHECK_EVERY, Loaded, Loading
from umem.data.orders import KnownOrder
from umem.data.policies import POLICIES
from umem.data.prefetch_thread import PrefetchThread
from umem.data.store import Head, ItemStore
from umem.errors import DataError
from umem.units import MIB, parse_bytes

alive: weakref.WeakSet[CachedDataset] = weakref.WeakSet()
"""The caches of this process that are still referenced; `counted` sums over them."""


class CachedDataset(DatasetMixin):
    """A dataset that serves another one's items from memory and disk; see `cached`.

    Processes forked or spawned by multiprocessing can use it; all share one memory.
    Thread-safety: any thread.
    """

    def __init__(
        self,
        dataset: Any,
        memory_bytes: int,
        disk_bytes: int,
        policy: str,
        order: KnownOrder | None,
        folder: Path,
        codec: Codec,
        *,
        ahead: bool,
    ) -> None:
        self._count, self._order = len(dataset), order
        with ExitStack() as undo:
            self._store = ItemStore(self._count, memory_bytes, policy)
            undo.callback(self._store.block.close)
            disk = DiskTier(self._store, folder, disk_bytes) if disk_bytes else None
            self._loading = Loading(dataset, self._store, disk, codec)
            undo.callback(self._loading.close)
            found = fingerprint(dataset)
            self._store.head["source"] = found.number
            if order is not None:
                order.content = found.content
            self._begin(is_ahead=ahead)
            undo.pop_all()

    def _begin(self, *, is_ahead: bool) -> None:
        """Set up this process's part of the cache: epoch position, prefetch thread and finalizer.

        A spawned worker calls it again, without a prefetch thread of its own.
        """
        self._pid = os.getpid()
        self._position = EpochPosition(self._store, self._order, self._count)
        self._ahead = None
        if is_ahead and self._position.uses is not None:
            self._ahead = PrefetchThread(self._store, self._position, self._loading)
        if self._order is not None:
            self._order.subscribe(self._position.move)
        self.close = weakref.finalize(self, _close, self._ahead, self._loading, self._store)
        self.close.atexit = False  # threads of others may still ask; the system cleans up
        alive.add(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_count", "_order", "_store", "_loading")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(is_ahead=False)
        self._pid = -1  # a worker's

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<cached {type(self._loading.dataset).__name__} of {self._count}: {self.counters}>"

    def get_example(self, i: int) -> Any:
        """Return item ``i`` as a copy that the caller may change.

        Raises:
            IndexError: there is no such item. UnsupportedError: the item cannot be cached; see
                `umem.data.items`. Errors of the dataset pass through. The cache is unchanged.
        """
        item = self._place(i)
        is_owner = os.getpid() == self._pid
        self._check_epoch(self._store.head)
        is_strict = is_owner and threading.current_thread() is threading.main_thread()
        with self._store.held() as head:
            head["is_shared"] = not is_owner
            head["request_count"] += 1
            at, expected = self._position.request(item, is_strict=is_strict)
            next_use = self._position.next_use(item, at)
            data, hits = self._store.take(item, next_use), head["hit_count"]
        if expected is not None:
            self._warn_of_other_order(item, expected)
        self._wake()
        if data is None or (hits % CHECK_EVERY == 1 and not self._is_same(item, data)):
            return self._from_below(item, at, next_use)
        return self._loading.unpacked(data)

    def _check_epoch(self, head: Head) -> None:
        """Check the source for changes after each epoch's number of requests."""
        epoch = head["request_count"] // self._count
        if epoch > head["checked_epoch"]:
            head["checked_epoch"] = epoch
            self._loading.check_source()

    def _warn_of_other_order(self, item: int, expected: int) -> None:
        warn_once(
            self._store,
            OTHER_ORDER,
            f"item {item} was requested, but the order given to the cache has {expected} here: "
            "items are evicted by last use until requests follow the order. Give the iterator "
            "the same order (order_sampler=order), and each iterator a cache of its own",
        )

    def _is_same(self, item: int, data: Any) -> bool:
        begun = time.perf_counter()
        is_same = self._loading.check(item, data)
        self._waited(begun)
        return is_same

    def _from_below(self, item: int, at: int | None, next_use: float) -> Any:
        """Serve a miss: load the item or take it from the prefetch thread, store it, spill evicted
        items.
        """
        ahead = self._ahead if self._ahead is not None and self._ahead.is_here() else None
        next_uses: list[float] = []
        try:
            begun = time.perf_counter()
            data = None if ahead is None else ahead.take(item)
            loaded = self._loading.fetch(item) if data is None else Loaded(data)
            waited = time.perf_counter() - begun
            with self._store.held() as head:
                head["waited_ns"] += int(waited * 1e9)
                head["ahead_count"] += data is not None
                evicted = self._store.keep(item, loaded.data, next_use)
                if ahead is not None:
                    next_uses = [self._position.next_use(each, at) for each, _ in evicted]
        finally:
            if ahead is not None:
                ahead.served(item, next_uses)
        if ahead is None or not ahead.spill(evicted):
            begun = time.perf_counter()
            self._loading.spill(evicted)
            self._waited(begun)
        self._wake()
        return loaded.made[0] if loaded.made else self._loading.unpacked(loaded.data)

    def _wake(self) -> None:
        if self._ahead is not None and self._ahead.is_here():
            self._ahead.wake()

    def _waited(self, begun: float) -> None:
        with self._store.held() as head:
            head["waited_ns"] += int((time.perf_counter() - begun) * 1e9)

    @property
    def counters(self) -> DataCounters:
        """Return the cache's counters, summed over all processes that share it."""
        head = self._store.head
        found = {name: head[name] for name in COUNTED}
        return DataCounters(**found, waited_seconds=head["waited_ns"] / 1e9)


def _close(ahead: PrefetchThread | None, loading: Loading, store: ItemStore) -> None:
    if ahead is not None:
        ahead.close()
    loading.close()
    store.block.close()


def cached(
    dataset: Any,
    memory: str | SupportsIndex,
    disk: str | SupportsIndex = 0,
    policy: str | None = None,
    order: KnownOrder | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    codec: Codec | None = None,
    ahead: bool = True,
) -> CachedDataset:
    """Cache a dataset's items in memory and on a disk, so that each is loaded once, or seldom.

    Items have exactly the dataset's bits, and each is a copy that the caller may change. Apply
    random changes, such as augmentation, outside: ``TransformDataset(cached(...), augment)``.

    Args:
        dataset: any object with ``__len__`` and ``__getitem__``. The cache asks it for one item at
            a time, by an integer, also from a thread of its own.
        memory: limit of the packed items in memory, for all processes together. Prefetched items
            and tables take up to 5% more. Items larger than the limit are not cached.
        disk: limit of the items on a disk; 0: no disk.
        policy: ``"next-use"`` (needs an order), ``"lru"`` or ``"cost"``; see `umem.data.policies`.
            None: next-use with an order, lru without.
        order: the iterator's ``order_sampler``; see `known_order`.
        folder: folder of the disk's unnamed file; None: the system's temporary folder.
        codec: compresses buffers; None: buffers are stored uncompressed.
        ahead: with an order, prefetch the next items in a thread.

    Raises:
        SizeError: a size is invalid. DataError: policy, order or codec is invalid or missing.
            FileError: the folder cannot be used, or the system has no memory to share. StateError:
            the order has another number of items. UnsupportedError: the system is not POSIX. After
            each, nothing was made.
    """
    memory_bytes = parse_bytes(memory, "memory")
    disk_bytes = parse_bytes(disk, "disk") if disk else 0
    policy = policy or ("lru" if order is None else "next-use")
    if policy not in POLICIES:
        raise DataError(f"policy must be one of {', '.join(POLICIES)}; got {policy!r}")
    if policy == "next-use" and order is None:
        raise DataError(
            'policy "next-use" needs order=umem.data.known_order(seed), the same object as the '
            'iterator\'s order_sampler; "lru" and "cost" need none'
        )
    if order is not None and not isinstance(order, KnownOrder):
        raise DataError(f"order must be a umem.data.known_order(seed); got {order!r}")
    codec = RawCodec() if codec is None else codec
    if not hasattr(codec, "compress"):
        raise DataError(f"codec must be a codec, such as umem.data.BloscCodec(); got {codec!r}")
    where = Path(folder) if folder is not None else _temporary_folder()
    return CachedDataset(
        dataset, memory_bytes, disk_bytes, policy, order, where, codec, ahead=ahead
    )


def _temporary_folder() -> Path:
    """Return the system's temporary folder; if that is in memory, /var/tmp."""
    usual, other = Path(tempfile.gettempdir()), Path("/var/tmp")
    is_memory = usual.is_dir() and file_system(usual) in IN_MEMORY
    return other if is_memory and other.is_dir() else usual


def counted() -> DataCounters | None:
    """Sum the counters of all caches in this process; None if it has no cache."""
    found = [cache.counters for cache in (*alive,)]
    return DataCounters.total(found) if found else None


def reported() -> dict[str, float]:
    """Return the summed counters of this process as report entries; empty if it has no cache."""
    found = counted()
    if found is None:
        return {}
    return {
        "data/hit_rate": found.hit_rate,
        "data/memory_MiB": found.memory_bytes / MIB,
        "data/waited_s": found.waited_seconds,
        "data/raw_MiB": found.raw_bytes / MIB,
    }
