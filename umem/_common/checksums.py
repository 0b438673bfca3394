"""SHA-256 checksums of arrays and files, compared before a file is used.

They detect damage, not malice: an attacker who can write a file can write its checksums, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SUMS = "sha256"
"""Name of the note with a file's checksums: first the other notes', then the arrays'."""
_DIGITS = 16
"""Number of hexadecimal digits of SHA-256 to keep: damage is missed once in 2**64 cases."""

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class FileSum:
    """The length of a file, and its SHA-256 in hexadecimal."""

    size_bytes: int
    sha256: str


class Summing:
    """Computes a `FileSum` from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._size, self._sum = 0, hashlib.sha256()

    def add(self, piece: Any) -> None:
        """Add bytes, or a contiguous buffer."""
        piece = memoryview(piece)
        if piece.nbytes:  # hashlib refuses the strides of some empty buffers
            self._size += piece.nbytes
            self._sum.update(piece)

    def result(self) -> FileSum:
        """Return the sum of all bytes so far."""
        return FileSum(self._size, self._sum.hexdigest())


def array_sum(name: str, dtype: Any, shape: Iterable[int], pieces: Iterable[Any]) -> str:
    """Return the checksum of an array's name, dtype, shape and items in C order.

    Args:
        dtype: NumPy's dtype; the byte order does not matter.
        pieces: the items as contiguous buffers, one after the other, in little-endian order.
    """
    summing = Summing()
    summing.add(f"{name} {np.dtype(dtype).name} {[int(size) for size in shape]} ".encode())
    for piece in pieces:
        summing.add(piece)
    return summing.result().sha256[:_DIGITS]


def sum_of(name: str, array: np.ndarray[Any, Any]) -> str:
    """Return the checksum of a C-contiguous array; see `array_sum`."""
    return array_sum(name, array.dtype, array.shape, [array.reshape(-1).view(np.uint8).data])


# -- in the notes of a file ---------------------------------------------------------------------


def with_sums(notes: Mapping[str, str], sums: Mapping[str, str]) -> dict[str, str]:
    """Return notes with checksums of the named arrays and of the notes added."""
    in_order = [sums[name] for name in sorted(sums)]
    return {**notes, SUMS: " ".join([_sum_of_notes(notes), *in_order])}


def sums_in(notes: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Read the checksums of a file's arrays from its notes.

    Raises:
        ValueError: the notes have changed, or the number of arrays has.
    """
    first, *others = notes[SUMS].split(" ")
    if first != _sum_of_notes({name: text for name, text in notes.items() if name != SUMS}):
        raise ValueError("its header has changed since it was written")
    names = sorted(names)
    if len(names) != len(others):
        raise ValueError(f"it has {len(names)} arrays, and checksums of {len(others)}")
    return dict(zip(names, others, strict=True))


def check_arrays(notes: Mapping[str, str], arrays: Arrays) -> None:
    """Compare a file's notes and arrays with its checksums.

    Cost: reads every array once.

    Raises:
        ValueError: a note or an array differs; the message names it.
    """
    for name, expected in sums_in(notes, arrays).items():
        if sum_of(name, arrays[name]) != expected:
            raise ValueError(f"{name} has changed since it was written: its SHA-256 differs")


def _sum_of_notes(notes: Mapping[str, str]) -> str:
    summing = Summing()
    for name, text in sorted(notes.items()):
        summing.add(f"{len(name)} {len(text)} {name}{text}".encode())
    return summing.result().sha256[:_DIGITS]
