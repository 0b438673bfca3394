"""Loading of items that are not in memory: from the disk tier or the dataset."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from umem._common.locks import safe_lock
from umem.data.codec import Codec, RawCodec
from umem.data.disk_tier import CHANGED, DiskTier, warn_once
from umem.data.fingerprint import fingerprint
from umem.data.items import buffer_bytes, pack, unpack
from umem.data.store import ItemStore
from umem.errors import UnsupportedError

RAW = RawCodec()
CHECK_EVERY = 256
"""One hit in this many loads its item again, to detect a dataset that is not deterministic. A
guess: it costs at most 0.4% of the time that hits save."""


class Loaded(NamedTuple):
    """An item's packed bytes, and the item itself if the dataset was called for it."""

    data: bytes
    made: tuple[Any, ...] = ()


class Loading:
    """Loads items from the disk tier or the dataset, one at a time: few datasets are thread-safe.

    Args:
        dataset: the cached dataset.
        store: the cache's store.
        disk: the disk tier; None without one.
        codec: compresses buffers.
    """

    def __init__(self, dataset: Any, store: ItemStore, disk: DiskTier | None, codec: Codec) -> None:
        self.dataset, self._store, self._disk, self._codec = dataset, store, disk, codec
        self._lock = safe_lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = safe_lock()

    def fetch(self, item: int) -> Loaded:
        """Read an item from the disk tier, or else call the dataset for it.

        Raises:
            UnsupportedError: the item cannot be cached; nothing was. Errors of the dataset pass
                through.
        """
        begun = time.perf_counter()
        data = None if self._disk is None else self._disk.read(item)
        if data is not None:
            self._count(item, begun, disk_count=1, disk_bytes=len(data))
            return Loaded(data)
        value, data = self._from_dataset(item)
        content, raw = buffer_bytes(data)
        self._count(
            item, begun, load_count=1, loaded_bytes=len(data), content_bytes=content, raw_bytes=raw
        )
        return Loaded(data, (value,))

    def _from_dataset(self, item: int) -> tuple[Any, bytes]:
        with self._lock:
            value = self.dataset[item]
        try:
            return value, pack(value, self._codec)
        except UnsupportedError as error:
            raise UnsupportedError(f"item {item} cannot be cached: {error}") from None

    def _count(self, item: int, begun: float, **more: int) -> None:
        with self._store.held() as head:
            self._store.seconds[item] = time.perf_counter() - begun
            for name, value in more.items():
                head[name] += value

    def spill(self, evicted: list[tuple[int, Any]]) -> None:
        """Write evicted items to the disk tier, if there is one."""
        for item, data in evicted:
            if self._disk is not None and data is not None:
                self._disk.write(item, data)

    def unpacked(self, data: Any) -> Any:
        """Unpack an item into a copy that the caller owns."""
        return unpack(data, self._codec)

    def check(self, item: int, data: Any) -> bool:
        """Load an item again; if it differs from the cached one, drop the cache and warn once."""
        with self._lock:
            again = pack(self.dataset[item], RAW)
        # Before the store is held: a codec's lock is older than the store's.
        is_same = pack(self.unpacked(data), RAW) == again
        with self._store.held() as head:
            head["check_count"] += 1
            if is_same:
                return True
            self._store.forget()
        warn_once(
            self._store,
            CHANGED,
            f"item {item} of the dataset has changed: the cache is dropped, and items are loaded "
            "anew. Make random changes, such as augmentation, outside of the cache",
        )
        return False

    def check_source(self) -> None:
        """Compare the dataset with its state one epoch ago; if it changed, drop the cache and warn
        once.

        Compares the fingerprint, and the first and the last item if they are in memory.
        """
        number = fingerprint(self.dataset).number
        last = len(self.dataset) - 1
        with self._store.held() as head:
            is_same, head["source"] = head["source"] == number, number
            if not is_same:
                self._store.forget()
            ends = (0, last) if 0 <= last < len(self._store.first) else ()
            kept = {item: self._store.peek(item) for item in ends}
        if not is_same:
            warn_once(
                self._store,
                CHANGED,
                "the dataset, or one of its files, has another size or modification time than "
                "when the last epoch began: the cache is dropped, and items are loaded anew",
            )
        for item, data in kept.items():
            if data is not None and not self.check(item, data):
                return

    def close(self) -> None:
        """Close the disk tier."""
        if self._disk is not None:
            self._disk.close()
