"""The file of a part: arrays with their checksums; features are memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from umem._common.checksums import SUMS, array_sum, sum_of, sums_in, with_sums
from umem._common.files import reason
from umem._common.printable import short
from umem._common.safetensors_file import SafetensorsFile, header
from umem.errors import DataError
from umem.graphs.csr import Array

_ALIGNMENT = 64
_ROWS = 4096


class PickedRows(NamedTuple):
    """Selected rows of a float array, converted to float32 when they are written."""

    array: Array
    rows: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32)

    def pieces(self) -> Iterator[Array]:
        """Yield the rows, a few thousand at a time.

        Raises:
            DataError: a number is not finite in float32.
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
    file: IO[bytes], arrays: Mapping[str, Array | PickedRows], notes: Mapping[str, str]
) -> None:
    """Write arrays and a description, with checksums of both.

    Reads the rows only once, while writing them, so the header gets its checksums last.

    Args:
        file: a seekable file.
    """
    unknown = array_sum("", bool, (), ())
    file.write(_header(arrays, with_sums(notes, dict.fromkeys(arrays, unknown))))
    sums = {
        name: array_sum(name, array.dtype, array.shape, _written(file, array))
        for name, array in arrays.items()
    }
    file.seek(0)
    file.write(_header(arrays, with_sums(notes, sums)))


def _header(arrays: Mapping[str, Array | PickedRows], notes: Mapping[str, str]) -> bytes:
    return header(arrays, notes, alignment=_ALIGNMENT, separators=(", ", ": "))


def _written(file: IO[bytes], array: Array | PickedRows) -> Iterator[Any]:
    """Write an array in pieces, and yield each."""
    for piece in array.pieces() if isinstance(array, PickedRows) else (array,):
        items = piece.astype(piece.dtype.newbyteorder("<"), copy=False).data
        file.write(items)
        yield items


class ArraysFile:
    """An open file of arrays, with a valid header.

    Attributes:
        notes: the description that was written with the arrays.
        sums: the checksum of each array.

    Raises:
        DataError: it cannot be read, is not such a file, or does not have the length that its
            header gives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._arrays = SafetensorsFile(path)
            self.notes = self._arrays.notes
            if SUMS not in self.notes:
                raise ValueError("its header has no checksums")
            self.sums = sums_in(self.notes, self._arrays)
        except OSError as error:
            raise self._wrong(f"cannot be read: {reason(error)}") from error
        except ValueError as error:
            raise self._wrong(f"is not a part of a cut: {error}") from error

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{short(self._path)} {what}; cut the graph again")

    def mapped(self, name: str) -> Array:
        """Memory-map an array.

        Raises:
            DataError: the file has no such array.
        """
        if name not in self.sums:
            raise self._wrong(f"has no {name}")
        return self._arrays.mapped(name)

    def read(self, name: str) -> Array:
        """Read an array and compare it with its checksum, which covers its type and shape too.

        Raises:
            DataError: the array is missing, or has changed since it was written.
        """
        array = np.array(self.mapped(name))
        self._compare(name, array)
        return array

    def verify(self, name: str) -> None:
        """Compare a memory-mapped array with its checksum; reads it once. Raises as `read`."""
        self._compare(name, self.mapped(name))

    def _compare(self, name: str, array: Array) -> None:
        if self.sums[name] != sum_of(name, array):
            raise self._wrong(f"is damaged: the checksum of {name} differs")
