"""Arrays in one file, of which a large one can be read where it lies, row by row.

The format is that of https://github.com/huggingface/safetensors: the length of a JSON header, the
header, and the arrays' bytes one after the other. Nothing in it is executed.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from umem.checksums import SUMS, array_sum, sum_of, sums_in, with_sums
from umem.errors import DataError
from umem.files import open_regular, reason
from umem.graphs.csr import Array
from umem.printable import shown

_TYPES = {"int64": "I64", "int32": "I32", "float32": "F32", "bool": "BOOL"}
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 20
_ROWS = 4096
_PIECE = 4 << 20


class PickedRows(NamedTuple):
    """Some rows of an array of floats, which are read and made float32 as they are written."""

    array: Array
    rows: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32)

    def pieces(self) -> Iterator[Array]:
        """Yield the rows, some at a time.

        Raises:
            DataError: a number is not finite as float32.
        """
        for start in range(0, len(self.rows), _ROWS):
            rows = self.rows[start : start + _ROWS]
            with np.errstate(over="ignore"):
                piece = np.ascontiguousarray(self.array[rows], np.float32)
            if not (good := np.isfinite(piece)).all():
                row, column = np.argwhere(~good)[0]
                raise DataError(f"features: [{rows[row]}, {column}] is not a finite float32")
            yield piece


def write_arrays(
    file: IO[bytes], arrays: Mapping[str, Array | PickedRows], words: Mapping[str, str]
) -> None:
    """Write arrays, and words about them with checksums of both.

    Rows are read once, as they are written, so that the header gets its checksums last.

    Args:
        file: one that can be sought in.
    """
    unknown = array_sum("", bool, (), ())
    file.write(_header(arrays, with_sums(words, dict.fromkeys(arrays, unknown))))
    sums = {
        name: array_sum(name, array.dtype, array.shape, _written(file, array))
        for name, array in arrays.items()
    }
    file.seek(0)
    file.write(_header(arrays, with_sums(words, sums)))


def _header(arrays: Mapping[str, Array | PickedRows], words: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(words)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + _size(array.dtype, array.shape)
        kind = _TYPES[str(array.dtype)]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _written(file: IO[bytes], array: Array | PickedRows) -> Iterator[Any]:
    """Write an array, piece by piece, and yield each."""
    for piece in array.pieces() if isinstance(array, PickedRows) else (array,):
        items = piece.astype(piece.dtype.newbyteorder("<"), copy=False).data
        file.write(items)
        yield items


def _size(dtype: Any, shape: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize * math.prod(shape))


class _Entry(NamedTuple):
    """What a header says of an array."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _entry(said: dict[str, Any]) -> _Entry:
    start, stop = map(int, said["data_offsets"])
    return _Entry(str(said["dtype"]), tuple(map(int, said["shape"])), start, stop)


class ArraysFile:
    """A file of arrays; its header was read and found to fit the length of the file.

    Raises:
        DataError: it cannot be read, is no such file, or is shorter or longer than it says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_regular(path) as file:
                self._read_header(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            why = reason(error) if isinstance(error, OSError) else f"its header: {error}"
            raise self._wrong(f"cannot be read: {why}") from error

    def _read_header(self, file: IO[bytes]) -> None:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LONGEST_HEADER:
            raise self._wrong("is no part of a cut: it does not begin with a header")
        header = json.loads(file.read(length))
        self.words: dict[str, str] = header.pop("__metadata__")
        self._arrays = {name: _entry(said) for name, said in header.items()}
        self.sums: dict[str, str] | None = None
        """The checksum of each array; None: an earlier umem wrote none of the features."""
        if SUMS in self.words:
            self.sums = sums_in(self.words, self._arrays)
        self._start = 8 + length
        end = max(entry.stop for entry in self._arrays.values())
        size = file.seek(0, 2)
        if size != self._start + end:
            raise self._wrong(f"has {size} bytes, and should have {self._start + end}: it is torn")

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{shown(self._path)} {what}; cut the graph again")

    def mapped(self, name: str, dtype: str, ndim: int) -> Array:
        """An array as it lies in the file: what is not touched is not read.

        Raises:
            DataError: it is missing, or of another type or another number of dimensions.
        """
        entry = self._arrays.get(name)
        if entry is None or entry.dtype != _TYPES[dtype] or len(entry.shape) != ndim:
            raise self._wrong(f"has no {name} of {dtype} with {ndim} dimensions")
        _, shape, start, end = entry
        if min(start, *shape, 0) < 0 or end - start != _size(dtype, shape):
            raise self._wrong(f"says that {name} of {shape} has {end - start} bytes")
        if start == end:
            return np.empty(shape, dtype)
        kind = np.dtype(dtype).newbyteorder("<")
        return np.memmap(self._path, kind, "r", self._start + start, shape)

    def read(self, name: str, dtype: str, ndim: int = 1) -> Array:
        """An array, read and compared with its checksum.

        Raises:
            DataError: as `mapped`, or its bytes are not those that were written.
        """
        array = np.array(self.mapped(name, dtype, ndim))
        if self.sums is None:  # an earlier umem's file
            is_right = self.words.get(f"crc32 of {name}") == str(zlib.crc32(array.data))
        else:
            is_right = self.sums.get(name) == sum_of(name, array)
        if not is_right:
            raise self._wrong(f"is damaged: the checksum of {name} is another")
        return array

    def verify(self, name: str, dtype: str, ndim: int) -> None:
        """Compare an array that stays in the file with its checksum.

        Cost: reads it once, piece by piece.

        Raises:
            DataError: as `read`.
        """
        assert self.sums is not None
        array = self.mapped(name, dtype, ndim)
        try:
            found = array_sum(name, dtype, array.shape, self._pieces(name))
        except OSError as error:
            raise self._wrong(f"cannot be read: {reason(error)}") from error
        if self.sums[name] != found:
            raise self._wrong(f"is damaged: the checksum of {name} is another")

    def _pieces(self, name: str) -> Iterator[bytes]:
        entry = self._arrays[name]
        left = entry.stop - entry.start
        with open_regular(self._path) as file:
            file.seek(self._start + entry.start)
            while piece := file.read(min(left, _PIECE)):
                left -= len(piece)
                yield piece
