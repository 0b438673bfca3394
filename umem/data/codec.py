"""Compression of an item's buffers: the interface, and a codec that does nothing."""

from __future__ import annotations

from typing import Any, Protocol


class Codec(Protocol):
    """Interface of a lossless compressor of buffers.

    Several threads call it, and forked or spawned processes, which receive it by multiprocessing's
    own pickle: it makes threads and locks in the process that needs them.

    Attributes:
        name: the codec's name, stored in the disk tier's files; another codec cannot read them.
    """

    name: str

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        """Return the compressed bytes of a buffer, or None to keep the buffer as it is.

        Args:
            buffer: one-dimensional bytes.
            dtype: the numbers' dtype, as NumPy writes it: ``"<f4"``; ``"|u1"`` for bytes.
        """

    def decompress(self, data: memoryview, nbytes: int) -> Any:
        """Return the ``nbytes`` bytes that `compress` compressed, in a new buffer of the caller's.

        Raises:
            ValueError: `compress` did not return these bytes.
        """


class RawCodec:
    """A codec that compresses nothing."""

    name = "raw"

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        return None

    def decompress(self, data: memoryview, nbytes: int) -> Any:
        raise ValueError("the codec 'raw' compresses nothing")
