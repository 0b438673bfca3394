"""The offload target of NumPy's arrays: one file in the user's folder, memory-mapped.

The file has no name: the system removes it when the process ends, however it ends, so a kill leaves
nothing, and neither other runs nor forked processes can find it. A thread writes the sent arrays. A
fetched array is the file itself, mapped privately: its pages are the system's cache until they are
written to, and leave the process when the array is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from umem._common.files import ROOM_LEFT_BYTES, free_bytes, open_nameless, reason, write_at
from umem._common.printable import short
from umem.chainer.saved.array_layout import bytes_of
from umem.chainer.saved.tiers.extents import PAGE, Extent, Extents, most_mappings
from umem.chainer.saved.tiers.recorder_events import record_fetch, record_send
from umem.chainer.saved.tiers.tier import Process
from umem.errors import FileError, OffloadWarning, StateError, UnsupportedError, warn_at_program
from umem.units import MIB, format_bytes, format_seconds

LINE_BYTES = 64
"""A fetched array has its former address modulo this cache line, which affects speed."""
TRIM_BYTES = 8 * MIB
"""After this many freed bytes the C library is asked to return free memory to the system: a guess,
not measured."""
SLOW_SECONDS = 2.0
"""The least time of waiting for the disk that causes a warning: noticeable for a person."""


class _Mapping(mmap.mmap):
    """A memory map that refers to its extent, so that this is not allocated again before."""

    extent: Extent


class FileTier:
    """An unnamed file in a folder, to which NumPy's arrays are offloaded; see `Tier`.

    Args:
        folder: an existing folder, on a disk.
        limit_bytes: the most that the file takes; None: as much as the disk has room for.

    Attributes:
        name: a description, such as "a file in scratch".
        process: the process that opened the file, and has the threads that write and read.
        sent_bytes, fetched_bytes: bytes offloaded and fetched so far.
        waited_seconds: the seconds that the program waited for the file so far.

    Thread-safety: any thread. A forked child process sends nothing, and cannot fetch.

    Raises:
        FileError: there is no such folder, it cannot be written to, or it is in memory itself.
            Nothing was created.
        UnsupportedError: the system is not POSIX.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
        self._folder = Path(folder)
        self.name = f"a file in {short(self._folder)}"
        self._file = _open(self._folder)
        self._limit = limit_bytes
        self.sent_bytes = self.fetched_bytes = 0
        self.waited_seconds = 0.0
        self._extents = Extents()
        self._mappings: WeakSet[_Mapping] = WeakSet()
        self._most_mappings = most_mappings()
        self.process, self._begun = Process(), time.monotonic()
        self._writer = ThreadPoolExecutor(1, "umem-offload-writer")
        self._reader = ThreadPoolExecutor(1, "umem-offload-reader")
        self._warned: set[str] = set()
        self._write_seconds = 0.0
        self._let_go_bytes = 0
        self._is_closed = False

    def send(self, array: Any) -> SentToFile | None:
        """Begin to write an array that owns dense memory; None if the file has no room.

        Raises nothing: one `OffloadWarning` says that the disk is full.
        """
        if self._is_closed or not self.process.is_this():
            return None
        skew = int(array.__array_interface__["data"][0]) % LINE_BYTES
        place = self._extents.take(skew + array.nbytes, self._room)
        if place is None:
            return None
        self.sent_bytes += array.nbytes
        return SentToFile(self, array, place, skew)

    def _room(self, more_bytes: int) -> bool:
        """Tell whether the file may grow by some bytes; warn once if the disk is full."""
        size = self._extents.end_bytes + more_bytes
        if self._limit is not None and size > self._limit:
            return False
        free = free_bytes(self._file.fileno())
        if free is not None and free < more_bytes + ROOM_LEFT_BYTES:
            self._warn_once(
                "room",
                f"{short(self._folder)} has {format_bytes(free)} left, but {format_bytes(size)} "
                "were to be written: the rest stays in memory. Make room, or name a "
                "folder on a larger disk",
            )
            return False
        return True

    def write(self, held: list[Any], place: Extent, skew: int) -> None:
        """Write an array to an extent, ``skew`` bytes in; runs in the writing thread.

        Args:
            held: a list of only the array; it is emptied, so that it drops the array.
            place: the extent.
            skew: the offset of the array's first byte in the extent.

        Raises:
            OSError: the system refuses; the extent has part of the array at most.
        """
        begun = time.monotonic()
        write_at(self._file.fileno(), bytes_of(held.pop()), place.start + skew)
        self._write_seconds += time.monotonic() - begun

    def map(self, place: Extent, nbytes: int) -> Any:
        """Map an extent as an array of uint8, its pages read into the cache.

        A copy if too many maps are alive. Runs in the reading thread, or in one that waits.
        """
        mapping = _Mapping(
            self._file.fileno(), nbytes, flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=place.start,
        )  # fmt: skip
        mapping.extent = place
        flat = np.frombuffer(mapping, np.uint8)
        self._mappings.add(mapping)
        if len(self._mappings) > self._most_mappings:
            return flat.copy()
        np.add.reduce(flat[::PAGE])  # reads each page, without Python's lock
        return flat

    def read_ahead(self, place: Extent, nbytes: int) -> Future[Any]:
        """Begin to read and `map` an extent; return the future of its array."""
        if hasattr(os, "posix_fadvise"):  # the disk begins at once
            os.posix_fadvise(self._file.fileno(), place.start, nbytes, os.POSIX_FADV_WILLNEED)
        return self._reader.submit(self.map, place, nbytes)

    def write_later(self, array: Any, place: Extent, skew: int) -> Future[None]:
        """Begin to `write` an array; once the future is done the thread has dropped the array."""
        return self._writer.submit(self.write, [array], place, skew)

    def count_freed(self, nbytes: int) -> None:
        """Count freed bytes, and now and then return free memory to the system, in a thread."""
        self._let_go_bytes += nbytes
        if self._let_go_bytes >= TRIM_BYTES:
            self._let_go_bytes = 0
            self._writer.submit(_trim)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the block's time to `waited_seconds`; warn once if that is most of the run."""
        begun = time.monotonic()
        yield
        now = time.monotonic()
        self.waited_seconds += now - begun
        if self.waited_seconds > max(SLOW_SECONDS, (now - self._begun) / 2):
            rate = self.sent_bytes / max(self._write_seconds, 1e-9)
            self._warn_once(
                "slow",
                f"{short(self._folder)} takes {format_bytes(rate)} a second, and the program has "
                f"waited {format_seconds(self.waited_seconds)} of "
                f"{format_seconds(now - self._begun)} for it: name a folder on a faster disk",
            )

    def refused(self, error: OSError) -> None:
        """Warn, once, that an array could not be written."""
        self._warn_once(
            "refused",
            f"cannot write to {short(self._folder)}: {reason(error)}; "
            f"{format_bytes(self._extents.end_bytes)} were written: the rest stays in memory",
        )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn_at_program(text, OffloadWarning)

    def close(self) -> None:
        """Wait for pending reads and writes, and close the file; a second time does nothing.

        Fetched arrays stay valid.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.process.is_this():
            self._writer.shutdown()
            self._reader.shutdown()
        self._file.close()


class SentToFile:
    """An array that is being written, is in the file, or is being fetched; see `Sent`.

    Args:
        tier: the target that has the file.
        array: an array that owns dense memory.
        place: the extent of the file to write to.
        skew: the offset of the array's first byte in the extent.
    """

    def __init__(self, tier: FileTier, array: Any, place: Extent, skew: int) -> None:
        self.nbytes = int(array.nbytes)
        self._shape, self._dtype, self._strides = array.shape, array.dtype, array.strides
        self._tier = tier
        self._place: Extent | None = place
        self._skew = skew
        self._array: Any = array
        self._write = tier.write_later(array, place, skew)
        self._read: Future[Any] | None = None
        self._known = record_send(array)

    def is_gone(self) -> bool:
        """Tell whether the array was written completely; False in a forked child process."""
        write = self._write
        if not self._tier.process.is_this():  # a fork may leave the lock of a future held for ever
            return False
        return write.done() and not write.cancelled() and write.exception() is None

    def release(self) -> None:
        """Wait for the write and drop the array; if the write failed, warn and keep it."""
        if self._array is None or not self._tier.process.is_this():
            return
        if not self._write.done():
            with self._tier.waiting():
                self._write.exception()
        error = self._write.exception()
        if error is None:
            self._array = None
            self._tier.count_freed(self.nbytes)
        elif isinstance(error, OSError):
            self._tier.refused(error)
        else:
            raise error

    def fetch(self) -> None:
        """Begin to read the array; no effect a second time, or while the array is not dropped.

        Raises:
            StateError: in a process forked since the array was sent.
        """
        if self._read is None and self._array is None and self._place is not None:
            self._tier.process.check()
            self._read = self._tier.read_ahead(self._place, self._skew + self.nbytes)

    def array(self) -> Any:
        """Return the array, for the caller alone; a page is copied when it is first written to.

        Raises:
            FileError: the file cannot be read. StateError: `forget` was called, or the process was
                forked since the array was sent.
        """
        if self._array is not None:
            return self._array
        if self._place is None:
            raise StateError("the array was forgotten")
        self._tier.process.check()
        read, self._read = self._read, None
        try:
            if read is None:
                flat = self._tier.map(self._place, self._skew + self.nbytes)
            elif read.done():
                flat = read.result()
            else:
                with self._tier.waiting():
                    flat = read.result()
        except OSError as error:
            raise FileError(f"cannot read {self._tier.name}: {reason(error)}") from error
        self._tier.fetched_bytes += self.nbytes
        array: Any = np.ndarray(self._shape, self._dtype, flat, self._skew, self._strides)
        record_fetch(array, self._known)
        return array

    def forget(self) -> None:
        """Release the extent, which is free once nothing is written to it or mapped from it."""
        if self._tier.process.is_this():
            self._write.cancel()
        self._place = self._array = self._read = None


def _trim() -> None:
    """Make the GNU C library return its free pages to the system; elsewhere do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _open(folder: Path) -> Any:
    if not hasattr(os, "pwrite") or not hasattr(mmap, "MAP_PRIVATE"):
        raise UnsupportedError("files below NumPy's arrays need a POSIX system: Linux or macOS")
    return open_nameless(folder, ".umem-offload-")
