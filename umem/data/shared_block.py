"""Memory that a process shares with its forked or spawned children, and the lock that guards it.

All workers share one block, because any worker may need any item: with a part of its own, each of N
would find only one item in N. The block is unnamed: the system frees it when the last process that
holds it ends, even by a kill. Forked processes inherit it; multiprocessing passes its handle to
spawned ones.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from typing import Any

import numpy as np

from umem._common.files import reason
from umem._common.locks import safe_lock
from umem.errors import FileError, StateError, UnsupportedError
from umem.units import format_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Fields = tuple[tuple[str, str, int], ...]


class SharedBlock:
    """Named arrays in shared memory, zero at first, guarded by one lock between processes.

    The lock belongs to a process (POSIX ``fcntl``), so the system releases it when the process is
    killed. `held` tells the next holder that a change was left half done.

    Args:
        fields: names, dtypes and lengths of the arrays.
        tail_bytes: bytes behind them, as the array ``tail``; they take memory once written.

    Raises:
        UnsupportedError: the system is not POSIX. FileError: it has no memory to share; nothing
            was made.
    """

    def __init__(self, fields: Fields, tail_bytes: int) -> None:
        if fcntl is None:
            raise UnsupportedError("memory shared with workers needs a POSIX system: Linux, macOS")
        self._fields, self._tail_bytes = fields, tail_bytes
        handle = _nameless_memory()
        try:
            self._map(handle)
        except (OSError, ValueError, OverflowError) as error:
            os.close(handle)
            raise FileError(
                f"cannot share {format_bytes(self._layout()[-1])} of memory with workers: "
                f"{reason(error)}; give the cache less, or raise the limit on files (ulimit -f)"
            ) from error

    def _layout(self) -> list[int]:
        """Return each array's byte offset, and the total size; 64 bytes in front hold a busy
        flag.
        """
        ends = [64]
        for _, dtype, length in (*self._fields, ("tail", "u1", self._tail_bytes)):
            ends.append(-(-(ends[-1] + np.dtype(dtype).itemsize * length) // 64) * 64)
        return ends

    def _map(self, handle: int) -> None:
        """Map the shared memory of a file handle, and make the arrays over it."""
        self._handle, self._lock = handle, safe_lock()
        starts = self._layout()
        os.ftruncate(handle, starts[-1])
        self._mapping = mmap.mmap(handle, starts[-1])
        self.arrays = {
            name: np.frombuffer(self._mapping, dtype, length, start)
            for (name, dtype, length), start in zip(
                (*self._fields, ("tail", "u1", self._tail_bytes)), starts[:-1], strict=True
            )
        }
        self._is_busy = np.frombuffer(self._mapping, np.uint8, 1)

    def __reduce__(self) -> Any:
        """Pickle for a process that is being spawned; no other process can inherit the handle."""
        from multiprocessing import context

        if context.get_spawning_popen() is None:
            raise UnsupportedError(
                "a cache can be pickled only for processes that multiprocessing starts: pickle the "
                "dataset below it instead"
            )
        return _opened, (self._fields, self._tail_bytes, reduction.DupFd(self._handle))

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock; yields True if a process died inside it and left a change half done.

        An error in the block leaves the change half done for the next holder too.
        """
        with self._lock:
            handle = self._handle
            if handle < 0:
                raise StateError("this cache was closed: make another")
            fcntl.lockf(handle, fcntl.LOCK_EX)
            try:
                was_busy, self._is_busy[0] = bool(self._is_busy[0]), 1
                yield was_busy
                self._is_busy[0] = 0
            finally:
                if self._handle == handle:  # else another thread closed it, and with it the lock
                    fcntl.lockf(handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap the memory in this process; arrays that are still referenced stay valid."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _opened(fields: Fields, tail_bytes: int, handle: Any) -> SharedBlock:
    block = SharedBlock.__new__(SharedBlock)
    block._fields, block._tail_bytes = fields, tail_bytes
    block._map(handle.detach())
    return block


def _nameless_memory() -> int:
    """Open an unnamed file in memory, or on a disk if the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("umem-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
