"""Many small rows, stored compressed in memory in blocks.

A row of 256 bytes hardly shrinks alone, but a block of many rows is decoded whole for one of them.
The block's size trades one cost for the other; both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from umem._common.as_json import named
from umem._common.locks import safe_lock
from umem.data.codec_report import CodecReport
from umem.data.compression import BloscCodec
from umem.data.dataset_mixin import DatasetMixin
from umem.errors import UnsupportedError
from umem.units import format_bytes, parse_bytes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowsReport:
    """Stored and decoded bytes of a `CompressedRows` dataset in this process.

    Attributes:
        array_bytes: uncompressed bytes of the rows.
        stored_bytes: compressed bytes of the rows.
        block_bytes: uncompressed bytes of each block but the last.
        used_bytes: bytes of the requested rows.
        decoded_bytes: bytes that were decoded for them.
        codec: the codec's figures.
    """

    array_bytes: int
    stored_bytes: int
    block_bytes: int
    used_bytes: int
    decoded_bytes: int
    codec: CodecReport

    @property
    def ratio(self) -> float:
        """Return stored bytes divided by array bytes."""
        return self.stored_bytes / self.array_bytes if self.array_bytes else 1.0

    @property
    def decoded_for_used(self) -> float | None:
        """Return decoded bytes divided by requested bytes; None before the first request."""
        return self.decoded_bytes / self.used_bytes if self.used_bytes else None

    def to_json(self) -> dict[str, Any]:
        names = ("array_bytes", "stored_bytes", "ratio", "block_bytes", "used_bytes")
        return named(self, (*names, "decoded_bytes", "decoded_for_used", "codec"))

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.stored_bytes)} for rows of {format_bytes(self.array_bytes)} "
            f"({self.ratio:.3f}), in blocks of {format_bytes(self.block_bytes)}"
        )
        if self.decoded_for_used is None:
            return text
        return f"{text}; {self.decoded_for_used:.1f} bytes decoded for each byte used"


class CompressedRows(DatasetMixin):
    """A dataset of the rows of an array, stored in memory in losslessly compressed blocks.

    ``rows[3]`` is a row, ``rows[2:5]`` and ``rows[[7, 1]]`` are arrays of several rows; each is a
    copy. A row costs the decoding of its block, unless that block was decoded last; a request for
    several rows decodes each block once. Use it beside labels in `chainer.datasets.TupleDataset`.
    Several threads may read.

    Args:
        rows: an array (n, ...), in memory or mapped; it is read block by block, and not kept.
        block: bytes of a block, which holds as many whole rows as fit, at least one. Larger blocks
            compress better; smaller ones cost less for single rows in random order.

    Raises:
        UnsupportedError: the array has no rows, or its dtype holds objects.
        SizeError: ``block`` is not a size.
        MissingDependencyError: blosc2 is not installed.
    """

    def __init__(self, rows: Array, block: str | int = "4KiB") -> None:
        if rows.ndim == 0 or rows.dtype.hasobject:
            raise UnsupportedError(
                f"rows must be an array of numbers with rows; got {rows.ndim} dimensions and dtype "
                f"{rows.dtype}"
            )
        self._count, self._shape, self._dtype = len(rows), rows.shape[1:], rows.dtype
        self._row_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._rows = max(1, parse_bytes(block, "block") // max(1, self._row_bytes))
        self._codec = BloscCodec()
        self._stored = list(self._compressed(rows))
        self._used_bytes = self._decoded_bytes = 0
        self._newest: tuple[int, Array] | None = None
        self._lock = safe_lock()

    def __getstate__(self) -> dict[str, Any]:
        without = {"_lock": None, "_newest": None, "_used_bytes": 0, "_decoded_bytes": 0}
        return self.__dict__ | without

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=safe_lock())

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the uncompressed array."""
        return (self._count, *self._shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the uncompressed array."""
        return self._dtype

    def get_example(self, i: int) -> Any:
        """Return row ``i`` as an array, or as a number if a row has no axes."""
        block, place = divmod(i, self._rows)
        return self._block(block, 1)[place].copy()

    def __getitem__(self, index: Any) -> Any:
        """Return a row for an integer; an array of rows for a slice, a list or an array."""
        if isinstance(index, slice):
            return self._several(np.arange(*index.indices(self._count)))
        if isinstance(index, (list, np.ndarray)) and np.ndim(index):
            return self._several(np.array([self._place(i) for i in index], np.int64))
        return super().__getitem__(index)

    def report(self) -> RowsReport:
        """Return stored and decoded bytes so far in this process."""
        with self._lock:
            return RowsReport(
                array_bytes=self._count * self._row_bytes,
                stored_bytes=sum(map(len, self._stored)),
                block_bytes=self._rows * self._row_bytes,
                used_bytes=self._used_bytes,
                decoded_bytes=self._decoded_bytes,
                codec=self._codec.report(),
            )

    def _compressed(self, rows: Array) -> Iterator[bytes]:
        """Yield the compressed blocks; a block that does not shrink stays uncompressed."""
        for start in range(0, self._count, self._rows):
            block = np.ascontiguousarray(rows[start : start + self._rows]).reshape(-1)
            data = block.view(np.uint8).data if self._row_bytes else memoryview(b"")
            yield self._codec.compress(data, self._dtype.str) or bytes(data)

    def _several(self, places: npt.NDArray[np.int64]) -> Array:
        found = np.empty((len(places), *self._shape), self._dtype)
        blocks = places // self._rows
        order = np.argsort(blocks, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1):
            if len(group):
                number = int(blocks[group[0]])
                found[group] = self._block(number, len(group))[places[group] % self._rows]
        return found

    def _block(self, number: int, used_count: int) -> Array:
        """Return a decoded block, read-only; the last block stays decoded for sequential reads."""
        newest, decoded_bytes = self._newest, 0
        if newest is None or newest[0] != number:
            rows = min(self._rows, self._count - number * self._rows)
            stored, nbytes = self._stored[number], rows * self._row_bytes
            raw = stored if len(stored) == nbytes else self._codec.decompress(stored, nbytes)
            decoded_bytes = 0 if raw is stored else nbytes
            newest = (number, np.ndarray((rows, *self._shape), self._dtype, buffer=raw))
            self._newest = newest if decoded_bytes else self._newest
        with self._lock:
            self._used_bytes += used_count * self._row_bytes
            self._decoded_bytes += decoded_bytes
        return newest[1]
