"""Arrays of which each rank has written a part, for any number of reading ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from umem._common.safetensors_file import SafetensorsFile
from umem.errors import SnapshotError

SPAN = " span"
"""Suffix of the value with the span of the whole array that a rank has saved."""


class ArraysOfRanks(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of a snapshot of several ranks, as one rank reads them; `close` closes the files.

    A rank has its own arrays, and for other names the first rank's, because arrays that are equal
    on both were written once.

    Args:
        files: the files of all ranks.
        values: all ranks' JSON values.
        rank: the rank that reads; one that did not write reads another rank's arrays.
    """

    def __init__(
        self, files: Sequence[SafetensorsFile], values: Sequence[Mapping[str, Any]], rank: int
    ) -> None:
        self._files = files
        self._mine = [files[rank % len(files)], files[0]]
        self._spans = [
            {name[: -len(SPAN)]: span for name, span in each.items() if name.endswith(SPAN)}
            for each in values
        ]
        self.described = {**self._mine[1].described, **self._mine[0].described}
        self.described |= {n: (tuple(s[2:]), self._type(n)) for n, s in self._spans[0].items()}

    def _type(self, name: str) -> str:
        return self._files[0].described[name][1]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Read a whole array."""
        if not self._is_shared(name):
            return self._owner(name)[name]
        shape = self.described[name][0]
        return self.part(name, slice(0, int(np.prod(shape)))).reshape(shape)

    def mapped(self, name: str) -> np.ndarray[Any, Any]:
        """Return a whole array, as a read-only memory map if it is in one file."""
        return self[name] if self._is_shared(name) else self._owner(name).mapped(name)

    def _is_shared(self, name: str) -> bool:
        return any(name in spans for spans in self._spans)

    def _owner(self, name: str) -> SafetensorsFile:
        """Return the file that has the whole array; raises KeyError if there is none."""
        for file in self._mine:
            if name in file.described:
                return file
        raise KeyError(name)

    def part(self, name: str, span: slice) -> np.ndarray[Any, Any]:
        """Read a span of an array, in C order, from the files that overlap it.

        Raises:
            KeyError: there is no such array. SnapshotError: a part of it is in no file.
        """
        pieces = [
            (max(span.start, start), min(span.stop, stop), start, file)
            for file, spans in zip(self._files, self._spans, strict=True)
            if name in spans
            for start, stop, *_ in [spans[name]]
        ]
        if not pieces:
            return self._owner(name).part(name, span)
        pieces = sorted((p for p in pieces if p[0] < p[1]), key=lambda piece: piece[0])
        ends = [span.start, *(stop for _, stop, _, _ in pieces)]
        starts = [*(start for start, *_ in pieces), span.stop]
        if ends != starts:
            raise SnapshotError(f"some elements of {name!r} are in no file of the snapshot")
        found = np.empty(span.stop - span.start, self._type(name))
        for first, last, start, file in pieces:
            there = slice(first - start, last - start)
            found[first - span.start : last - span.start] = file.part(name, there)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
