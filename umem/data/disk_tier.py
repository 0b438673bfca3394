"""Items on a disk: records in one unnamed file, in a folder that the user may choose.

The system removes the file when the last process that holds it ends, even by a kill, and two runs
in one folder do not interfere. A written item stays; when the file is full, other items are loaded
from the dataset. For a shuffled order no other choice is better. A record is

    4 bytes     "uit1"
    4 bytes     CRC-32 of the rest of the record
    8 bytes     the number of the item
    8 bytes     how many bytes follow
    n bytes     the item, packed
"""

from __future__ import annotations

import os
import struct
import zlib
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from umem._common.files import ROOM_LEFT_BYTES, free_bytes, open_nameless, reason, write_at
from umem._common.printable import short
from umem.data.store import ItemStore
from umem.errors import DataWarning, FileError, warn_at_program
from umem.units import format_bytes

_RECORD, _MAGIC = struct.Struct("<4sIQQ"), b"uit1"
FULL, UNREADABLE, TORN, OTHER_ORDER, CHANGED = (1 << bit for bit in range(5))


def warn_once(store: ItemStore, kind: int, text: str) -> None:
    """Warn once for all processes together."""
    with store.held() as head:
        is_known = bool(head["warned"] & kind)
        head["warned"] |= kind
    if not is_known:
        warn_at_program(text, DataWarning)


class DiskTier:
    """The spill file of an `ItemStore`; its index is in the store's shared tables.

    Args:
        store: the item store.
        folder: a folder on a disk.
        limit_bytes: the file's largest size.

    Thread-safety: any thread, any process that was forked or spawned with it.

    Raises:
        FileError: the folder is not a folder, cannot be written to, or is in memory.
    """

    def __init__(self, store: ItemStore, folder: Path, limit_bytes: int) -> None:
        self._store, self._limit, self._name = store, limit_bytes, short(folder)
        with open_nameless(folder, ".umem-data-") as file:
            self._handle = os.dup(file.fileno())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": reduction.DupFd(self._handle)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handle = state["_handle"].detach()

    def write(self, item: int, data: Any) -> None:
        """Write an item to the spill file if it has room; a full or broken disk warns once."""
        size = _RECORD.size + len(data)
        with self._store.held() as head:
            at, generation = head["disk_end"], head["lost_count"]
            if head["is_disk_full"] or self._store.disk_at[item] or at + size > self._limit:
                return
            head["disk_end"] = at + size
        try:
            self._check_room(size)
            payload = memoryview(data).cast("B")
            start = struct.pack("<QQ", item, len(data))
            sum_ = zlib.crc32(payload, zlib.crc32(start))
            write_at(self._handle, _RECORD.pack(_MAGIC, sum_, item, len(data)), at)
            write_at(self._handle, payload, at + _RECORD.size)
        except OSError as error:
            self._off("is_disk_full", FULL, f"cannot write to {self._name}: {reason(error)}")
            return
        with self._store.held() as head:
            if head["lost_count"] == generation:
                self._store.disk_at[item], self._store.disk_bytes[item] = at + 1, len(data)
                head["spilled_bytes"] += len(data)

    def _check_room(self, size: int) -> None:
        free = free_bytes(self._handle)
        if free is not None and free < size + ROOM_LEFT_BYTES:
            raise FileError(f"{format_bytes(free)} are left")

    def read(self, item: int) -> bytes | None:
        """Read an item; None if it is absent or its checksum differs."""
        with self._store.held() as head:
            at, size = int(self._store.disk_at[item]) - 1, int(self._store.disk_bytes[item])
            if at < 0 or head["is_disk_off"]:
                return None
        try:
            data = os.pread(self._handle, _RECORD.size + size, at)
        except OSError as error:
            self._off("is_disk_off", UNREADABLE, f"cannot read from {self._name}: {reason(error)}")
            return None
        record, found = data[: _RECORD.size], data[_RECORD.size :]
        start = struct.pack("<QQ", item, size)
        expected = _RECORD.pack(_MAGIC, zlib.crc32(found, zlib.crc32(start)), item, size)
        if record == expected and len(found) == size:
            return found
        with self._store.held():
            self._store.disk_at[item] = 0
        warn_once(
            self._store,
            TORN,
            f"item {item} in {self._name} is damaged: the cache loads it, and any other damaged "
            "item, from the dataset",
        )
        return None

    def _off(self, flag: str, kind: int, text: str) -> None:
        with self._store.held() as head:
            head[flag] = 1
        rest = "all items not yet written" if flag == "is_disk_full" else "all items"
        warn_once(self._store, kind, f"{text}; {rest} are loaded from the dataset from now on")

    def close(self) -> None:
        """Close the file, which the system removes once every process has closed it."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
