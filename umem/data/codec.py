"""Compression of an item's buffers: the interface, and a codec that does nothing."""

from __future__ import annotations

from typing import Any, Protocol


class Codec(Protocol):
    """Interface of a lossless compressor of buffers.

    It is called by several threads, and by forked or spawned processes, to which it is sent
    by multiprocessing's own pickle: threads and locks it makes where it needs them.

    Attributes:
        name: in words; it is in a tier's files, and another codec does not read them.
    """

    name: str

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        """Return the compressed bytes of a buffer, or None to keep the buffer as it is.

        Args:
            buffer: bytes, in one dimension.
            dtype: of the numbers, as NumPy writes it: ``"<f4"``; ``"|u1"`` for bytes.
        """

    def decompress(self, data: memoryview, nbytes: int) -> Any:
        """Return the ``nbytes`` that `compress` was given, as a new buffer that the caller owns.

        Raises:
            ValueError: they are no such bytes.
        """


class RawCodec:
    """A codec that compresses nothing."""

    name = "raw"

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        return None

    def decompress(self, data: memoryview, nbytes: int) -> Any:
        raise ValueError("nothing is written by the codec 'raw'")
