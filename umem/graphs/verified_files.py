"""Remembering that a file was found whole, so that a large one is not read at each opening.

A mark beside the file names its size, its inode and when it last changed, in content or in status,
by the file system's own clock, which no program sets. Models: whatever writes to the file, puts
another in its place or copies it. Does not model: a disk whose bits change while nobody writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from umem._common.files import open_regular, whole

SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago may change again and show the same times: 2 s are the
coarsest that file systems have (FAT)."""
_TEXT = "features were compared with their checksum; remove this file to have it done again\n"
_known: set[tuple[Path, str]] = set()
"""Files that this process has verified, as their folders may be read-only."""


def verify_once(path: Path, checksum: str, verify: Callable[[], None]) -> None:
    """Verify a file unless it was verified since it last changed.

    Several processes may do so at once: each verifies, and the last mark stays, which says the
    same. Where no mark can be written, this process alone remembers.

    Args:
        path: of the file; its mark has the suffix ".verified".
        checksum: the expected one.
        verify: does so; raises where it differs, and nothing is remembered.

    Raises:
        OSError, FileError: the file cannot be read.
    """
    mark, before = path.with_suffix(".verified"), _state(path)
    text = f"{_TEXT}{before} {checksum}\n"
    if (path, text) in _known or _read(mark) == text:
        return
    verify()
    changed_ns = max(os.stat(path).st_ctime_ns, os.stat(path).st_mtime_ns)
    if _state(path) == before and time.time_ns() - changed_ns > SETTLED_NS:
        _known.add((path, text))
        with suppress(OSError), whole(mark, force=True) as file:  # FileError is one
            file.write(text.encode())


def _state(path: Path) -> str:
    status = os.stat(path)
    return f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read(mark: Path) -> str | None:
    try:
        with open_regular(mark) as file:
            return file.read(1024).decode("ascii", "replace")
    except OSError:
        return None
