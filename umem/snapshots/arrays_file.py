"""Arrays as a safetensors file, written piece by piece, so that no second copy is made of them.

The format is that of https://github.com/huggingface/safetensors: the length of a JSON header, the
header, and the arrays' bytes one after the other. The bytes are those that the library writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from umem.errors import MissingDependencyError, UnsupportedError
from umem.extras import command

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
"""What the format calls NumPy's types, in its own order: narrow ones first."""
_ALIGNMENT = 8
_PIECE = 4 << 20
"""Bytes that are written at once: long enough for a disk, short enough to stop in between."""

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def check_type(name: str, dtype: Any) -> None:
    """See that arrays of a type can be saved.

    Raises:
        UnsupportedError: the format has no such type.
    """
    if str(dtype) not in _TYPES:
        raise UnsupportedError(
            f"{name!r} is an array of {dtype}, which a snapshot does not hold: safetensors has "
            f"{', '.join(_TYPES)}"
        )


def size_of(arrays: Arrays) -> int:
    """Return the bytes of the whole file."""
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def pieces(arrays: Arrays, notes: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the bytes of the file in order.

    Args:
        arrays: C-contiguous, of a type that has a name.
        notes: what else the header says, which the format calls metadata.
    """
    yield memoryview(_header(arrays, notes))
    for name in _in_order(arrays):
        data = arrays[name].reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def _header(arrays: Arrays, notes: Mapping[str, str] | None = None) -> bytes:
    described: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for name in _in_order(arrays):
        array = arrays[name]
        start, end = end, end + array.nbytes
        described[name] = {
            "dtype": _TYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _in_order(arrays: Arrays) -> list[str]:
    """The widest types first, so that every array lies at a multiple of its items' size."""
    ranks = {name: rank for rank, name in enumerate(_TYPES)}
    return sorted(arrays, key=lambda name: (-ranks[str(arrays[name].dtype)], name))


# -- reading -----------------------------------------------------------------------------------


class ArraysInFile(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of a file that is whole, each read when it is asked for; `close` lets it go.

    Raises:
        MissingDependencyError: safetensors is missing. Exception: the file is none of its format.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingDependencyError(
                f"snapshots are read with safetensors, which is missing: "
                f"{command('chainer', 'safetensors')}"
            ) from error
        self._stack = ExitStack()
        self._file: Any = self._stack.enter_context(safe_open(path, "np"))
        self.notes: dict[str, str] = self._file.metadata() or {}
        """What else the header says."""
        ours = {theirs: ours for ours, theirs in _TYPES.items()}
        self.described: dict[str, tuple[tuple[int, ...], str]] = {}
        """The shape and the type of each array."""
        for name in self._file.keys():
            part = self._file.get_slice(name)
            self.described[name] = tuple(part.get_shape()), ours[part.get_dtype()]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Read one array; it is the caller's own."""
        if name not in self.described:
            raise KeyError(name)
        array: np.ndarray[Any, Any] = self._file.get_tensor(name)
        return array

    def part(self, name: str, span: slice) -> np.ndarray[Any, Any]:
        """Read a stretch of an array in C's order, and no more than the rows that it is in."""
        shape, dtype = self.described[name]
        if span.start == span.stop:
            return np.empty(0, dtype)
        width = int(np.prod(shape[1:]))
        first = span.start // width
        rows: np.ndarray[Any, Any] = self._file.get_slice(name)[first : -(-span.stop // width)]
        return rows.reshape(-1)[span.start - first * width : span.stop - first * width]

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def close(self) -> None:
        """Let the file go."""
        self._file = None
        self._stack.close()
