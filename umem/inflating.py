"""What a gzip file holds, a piece at a time: never more of it in memory than was asked for."""

from __future__ import annotations

import io
import zlib
from typing import IO

_CHUNK = 16 << 10
"""Of compressed bytes; they may hold a thousand times as many."""
_MAGIC = b"\x1f\x8b"


class NotGzipError(ValueError):
    """It is no gzip file, or one that is damaged or goes on after its end."""


class TooLargeError(ValueError):
    """It holds more than was allowed."""


class Inflating(io.RawIOBase):
    """The contents of a gzip file of one member, as a stream to read; checksum and length too.

    Put an `io.BufferedReader` around it. An empty file has no contents.

    Args:
        file: the compressed file; whoever opened it closes it.
        max_bytes: of contents; what holds more raises TooLargeError.

    Raises, from `readinto`:
        NotGzipError, TooLargeError, OSError; EOFError where the file ends too early.
    """

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes
        self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._has_begun = False

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, or a part of it; 0 at the end."""
        while not self._inflater.eof:
            data = self._inflater.unconsumed_tail or self._file.read(_CHUNK)
            if not self._has_begun:
                if not data:
                    return 0
                self._check_magic(data)
            found = self._inflate(data, len(buffer))
            if found:
                self._left -= len(found)
                if self._left < 0:
                    raise TooLargeError
                buffer[: len(found)] = found
                return len(found)
            if not data:
                raise EOFError("its compressed data end too early")
        if self._inflater.unused_data or self._file.read(1):
            raise NotGzipError("it goes on after its end")
        return 0

    def _check_magic(self, data: bytes) -> None:
        self._has_begun = True
        if not _MAGIC.startswith(data[:2]):
            raise NotGzipError("it is not compressed with gzip, as every trace is")

    def _inflate(self, data: bytes, count: int) -> bytes:
        try:
            return self._inflater.decompress(data, count)
        except zlib.error:
            raise NotGzipError("its compressed data are damaged") from None
