"""The file operations of snapshots, one method each, so that tests can replace the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


class FileOperations:
    """The file operations of snapshots; they follow no link and overwrite nothing.

    Every method may raise OSError, and is safe to call from any thread.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder in an existing parent."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a new file; returns its handle."""
        return os.open(path, _NEW | _NO_LINK | _BINARY, 0o666)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all bytes to a file."""
        while data:
            data = data[os.write(handle, data) :]

    def synchronize(self, handle: int) -> None:
        """Flush a file's content to the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file, without flushing it."""
        os.close(handle)

    def synchronize_folder(self, path: Path) -> None:
        """Flush a folder's names to the disk."""
        if os.name == "nt":  # Windows cannot open folders
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        """List the names in a folder."""
        return os.listdir(path)

    def open(self, path: Path) -> IO[bytes]:
        """Open a file for reading; refuses links, and does not block on a pipe."""
        return os.fdopen(os.open(path, os.O_RDONLY | _NO_LINK | _NO_WAIT | _BINARY), "rb")

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that can still be written to a folder's file system."""
        return shutil.disk_usage(path).free
