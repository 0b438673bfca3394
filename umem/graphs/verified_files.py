"""Remembers verified files, so that a large file is not read at each opening.

A mark beside the file holds its size, its inode and the times of its last change of content and
status. No program can set the latter, which the file system's own clock gives. Models: any write
to the file, its replacement or copy. Does not model: bits of a disk that change without a write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from umem._common.files import open_regular, whole

SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which a later change shows another time: 2 s is the coarsest
resolution of a file system (FAT)."""
_TEXT = "features were compared with their checksum; remove this file to have it done again\n"
_known: set[tuple[Path, str]] = set()
"""Files that this process has verified; their folders may be read-only."""


def verify_once(path: Path, checksum: str, verify: Callable[[], None]) -> None:
    """Verify a file unless it was verified since it last changed.

    Several processes may call it at once: each verifies the file, and all write the same mark. If
    no mark can be written, only this process remembers.

    Args:
        path: path of the file; its mark has the suffix ".verified".
        checksum: the expected checksum.
        verify: verifies the file; raises if it differs, and then no mark is written.

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
