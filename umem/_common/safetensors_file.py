"""Safetensors files: named arrays, written in pieces and read in place.

The format is defined in https://github.com/huggingface/safetensors: the length of a JSON header,
the header, and the arrays' bytes one after the other. It holds no code. `pieces` yields the same
bytes as the safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from umem._common.files import open_regular
from umem._common.printable import short
from umem.errors import UnsupportedError

_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The format's names for NumPy's dtypes, narrow types first as in the format."""
_OF_NUMPY = {theirs: ours for ours, theirs in _TYPES.items()}
_NOTES = "__metadata__"
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000
"""Most bytes of a header that the safetensors library reads."""
_PIECE = 4 << 20
"""Bytes written at once: enough for a disk, and few enough to allow interruption. A choice: no
measurement supports it."""

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


class Described(Protocol):
    """An array, or an object with the shape and dtype of an array that is written later."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


# -- writing -----------------------------------------------------------------------------------


def check_type(name: str, dtype: Any) -> None:
    """Check that arrays of a dtype can be saved.

    Raises:
        UnsupportedError: the format has no such type.
    """
    if str(dtype) not in _TYPES:
        raise UnsupportedError(
            f"{name!r} is an array of {dtype}, which safetensors cannot hold: convert it to one of "
            f"{', '.join(_TYPES)}"
        )


def size_of(arrays: Arrays) -> int:
    """Return the bytes of the whole file."""
    return len(header(_in_order(arrays))) + sum(array.nbytes for array in arrays.values())


def pieces(arrays: Arrays, notes: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the file's bytes in order.

    Args:
        arrays: C-contiguous arrays of types that the format has.
        notes: additional text in the header, which the format calls metadata.
    """
    in_order = _in_order(arrays)
    yield memoryview(header(in_order, notes))
    for array in in_order.values():
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def header(
    arrays: Mapping[str, Described],
    notes: Mapping[str, str] | None = None,
    *,
    alignment: int = _ALIGNMENT,
    separators: tuple[str, str] = (",", ":"),
) -> bytes:
    """Return the header; the arrays' bytes follow it in the given order.

    Args:
        arrays: arrays of types that the format has.
        notes: additional text in the header.
        alignment: the first array begins at a multiple of this many bytes.
        separators: as in `json.dumps`.
    """
    described: dict[str, Any] = {_NOTES: dict(notes)} if notes else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + _nbytes(array.dtype, array.shape)
        kind = _TYPES[str(array.dtype)]
        described[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _in_order(arrays: Arrays) -> Arrays:
    """Sort by type, widest first, so that every array is aligned to the size of its items."""
    ranks = {name: rank for rank, name in enumerate(_TYPES)}
    names = sorted(arrays, key=lambda name: (-ranks[str(arrays[name].dtype)], name))
    return {name: arrays[name] for name in names}


def _nbytes(dtype: Any, shape: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize * math.prod(shape))


# -- reading -----------------------------------------------------------------------------------


class SafetensorsFile(Mapping[str, Array]):
    """An open safetensors file whose arrays are read on demand; `close` closes it.

    Opening reads the header, and checks it against the length of the file.

    Attributes:
        notes: additional text in the header.
        described: the shape of each array and NumPy's name of its type.

    Raises:
        OSError: the file cannot be opened. ValueError: it is not a safetensors file, has arrays of
            types that NumPy lacks, or does not have the length that its header gives.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            self.notes, entries, start = _read_header(file)
            content = np.memmap(file, np.uint8, "r")[start:]
        try:
            self._mapped = {name: entry.of(content) for name, entry in entries.items()}
        except (ValueError, OverflowError) as error:  # empty shapes that NumPy does not support
            raise ValueError(f"its header: {error}") from None
        self.described = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}

    def __getitem__(self, name: str) -> Array:
        """Return a copy of one array."""
        return np.array(self._mapped[name])

    def mapped(self, name: str) -> Array:
        """Return one array as a read-only memory map."""
        return self._mapped[name]

    def part(self, name: str, span: slice) -> Array:
        """Return a copy of a part of an array, by index in C order."""
        return np.array(self._mapped[name].reshape(-1)[span])

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def close(self) -> None:
        """Close the file once no array of `mapped` is referenced."""
        self._mapped = {}


class _Entry(NamedTuple):
    """A header's entry of one array."""

    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]

    def of(self, content: Array) -> Array:
        """View the array in the bytes behind the header."""
        kind = np.dtype(self.dtype).newbyteorder("<")
        return content[self.start : self.stop].view(kind).reshape(self.shape)


def _read_header(file: IO[bytes]) -> tuple[dict[str, str], dict[str, _Entry], int]:
    """Read and check a header; returns its notes, its entries and the offset of the arrays' bytes.

    Raises:
        ValueError: the file is not a safetensors file, or incomplete.
    """
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        raise ValueError("it does not begin with a header")
    try:
        said = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header: {error}") from None
    if not isinstance(said, dict):
        raise ValueError("its header is not a dictionary")
    notes = said.pop(_NOTES, {})
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise ValueError("its header's notes are not all text")
    entries = {name: _entry(name, array) for name, array in said.items()}
    start, end = 8 + length, 0
    for entry in sorted(entries.values()):
        if entry.start != end:
            raise ValueError(f"its header leaves out or repeats bytes at {entry.start}")
        end = entry.stop
    if size != start + end:
        raise ValueError(f"it has {size} bytes instead of {start + end}: it is damaged")
    return notes, entries, start


def _entry(name: str, said: Any) -> _Entry:
    """Check a header's entry of one array.

    Raises:
        ValueError: it is not valid.
    """
    try:
        dtype, shape = _OF_NUMPY[said["dtype"]], tuple(said["shape"])
        start, stop = said["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header: {short(name)} is {short(repr(said))}") from None
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"its header: {short(name)} is {short(repr(said))}")
    if stop - start != _nbytes(dtype, shape):
        raise ValueError(f"its header: {short(name)} of {shape} has {stop - start} bytes")
    return _Entry(start, stop, dtype, shape)
