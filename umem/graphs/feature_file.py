"""Features of nodes in an .npy file, of which only the rows that are asked for are read.

The file is mapped. Rows are fetched in the order in which they lie, page by page, and given in the
order in which they were asked for. The system is told that accesses are at random, or it would read
some thirty pages around each, and which pages come next, so that it fetches them together.

The format is NumPy's: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
Nothing in it is executed.
"""

from __future__ import annotations

import io
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from umem.errors import DataError, StateError
from umem.files import open_regular, reason
from umem.graphs.csr import Array
from umem.printable import shown

LONGEST_HEADER = 1 << 16
CHUNK_BYTES = 1 << 22
"""So many bytes of rows are fetched and copied at a time."""
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Stamp(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


class FeatureFile:
    """The rows of an .npy file of floats, (N, F), each read when it is asked for.

    ``features[nodes]`` gives the rows of ``nodes`` (whole numbers, repeats allowed, a mask or a
    slice) as a new float32 array; ``features[3]`` one row. Floats of other widths and the other
    byte order are converted. ``numpy.asarray(features)`` reads everything. `umem.graphs.cut`
    takes one in the place of an array.

    The file is the one that was opened: a new one under its name is not seen. Each time rows are
    asked for, size and time of change are compared, before and after. Not noticed: what a program
    changes through a mapping of its own before the system has noted the time. A program that cuts
    the file short while rows are being copied ends this one, as with any mapping (SIGBUS).

    Thread-safe. Goes to other processes by its path, where it has to be the same file still.

    Args:
        path: a regular file, as `numpy.save` writes it, in C order.

    Raises:
        DataError: it cannot be read, is no .npy file, torn, of objects or of no floats, in Fortran
            order, or not of two dimensions of at least 1. Nothing stays open.
    """

    ndim = 2
    dtype: Any = np.dtype(np.float32)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        self._view: Array | None = None
        try:
            with open_regular(self._path) as file:
                self._handle = os.dup(file.fileno())
        except (OSError, ValueError) as error:
            raise self._wrong(f"cannot be read: {reason(error)}") from error
        self._let_go = weakref.finalize(self, os.close, self._handle)
        try:
            self._open(self._handle)
        except BaseException as error:
            self._let_go()
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, DataError):
                raise self._wrong(f"cannot be read: {reason(error)}") from error
            raise

    def _open(self, handle: int) -> None:
        if hasattr(os, "posix_fadvise"):  # before anything is read
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        shape, kind, start = self._header(handle)
        self.stamp = _stamp(handle)
        wanted = start + shape[0] * shape[1] * kind.itemsize
        if self.stamp.nbytes != wanted:
            raise self._wrong(
                f"has {self.stamp.nbytes} bytes, and {shape} of {kind} need {wanted}: it is torn, "
                "or more than one array; write it again"
            )
        self._map = mmap.mmap(handle, wanted, access=mmap.ACCESS_READ)
        self._advise("MADV_RANDOM", 0, wanted)
        self._start, self._row_bytes = start, shape[1] * kind.itemsize
        self.shape = shape
        self._view = np.frombuffer(self._map, kind, shape[0] * shape[1], start).reshape(shape)

    # -- the header ----------------------------------------------------------------------------

    def _header(self, handle: int) -> tuple[tuple[int, int], np.dtype[Any], int]:
        """The shape, the type and where the rows begin."""
        first = os.pread(handle, 12, 0)
        if first[:6] != b"\x93NUMPY" or tuple(first[6:8]) not in _READERS:
            raise self._wrong("is no .npy file of a plain array; numpy.save writes one")
        version = (first[6], first[7])
        width = 2 if version == (1, 0) else 4
        start = 8 + width + int.from_bytes(first[8 : 8 + width], "little")
        if start > LONGEST_HEADER:
            raise self._wrong(f"has a header of {start} bytes: it is damaged")
        text = io.BytesIO(os.pread(handle, start, 0)[8:])
        try:
            shape, is_fortran, kind = _READERS[version](text)
        except Exception as error:  # a damaged header can raise nearly anything
            raise self._wrong(f"has a damaged header: {shown(str(error))}") from error
        return self._checked(shape, is_fortran, kind), kind, start

    def _checked(
        self, shape: tuple[int, ...], is_fortran: bool, kind: np.dtype[Any]
    ) -> tuple[int, int]:
        if kind.hasobject:
            raise self._wrong("holds Python objects, which are pickles: they are not loaded")
        if kind.kind != "f":
            raise self._wrong(f"must hold floats; its dtype is {shown(str(kind))}")
        if len(shape) != 2 or min(shape) < 1:
            raise self._wrong(f"must have shape (nodes, features), both above 0; it has {shape}")
        if is_fortran and min(shape) > 1:
            raise self._wrong(
                "is in Fortran order, in which a row lies all over the file; write "
                "numpy.ascontiguousarray(array)"
            )
        return shape[0], shape[1]

    # -- rows ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        for start in range(0, len(self), self._rows_at_once):
            yield from self[start : start + self._rows_at_once]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("rows of a file are always a copy")
        return self[:].astype(np.float32 if dtype is None else dtype, copy=False)

    def __getitem__(self, which: Any) -> Array:
        """Some rows: float32 (n, F); of one whole number (F,).

        Cost: reads the pages that the rows lie in, each once, and no others.

        Raises:
            DataError: a number is no row, ``which`` is no selection of rows, a number in a row is
                not finite as float32, or the file was changed since it was opened.
            StateError: it was closed.
        """
        if isinstance(which, slice):
            return self._rows(np.arange(*which.indices(len(self))))
        rows = np.asarray(which)
        if rows.dtype.kind == "b" and rows.shape == (len(self),):
            return self._rows(np.flatnonzero(rows))
        if rows.size == 0 and rows.ndim == 1:
            return self._rows(np.empty(0, np.int64))
        if rows.dtype.kind not in "iu" or rows.ndim > 1:
            raise DataError(
                f"rows are whole numbers, a mask of {len(self)} or a slice; got {rows.dtype} of "
                f"{rows.shape}"
            )
        wrong = (rows < 0) | (rows >= len(self))
        if wrong.any():
            bad = int(rows[wrong][0] if rows.ndim else rows)
            raise DataError(f"{bad} is no row of {shown(self._path)}: it has 0 to {len(self) - 1}")
        found = self._rows(rows.reshape(-1))
        return found if rows.ndim else found[0]

    @property
    def _rows_at_once(self) -> int:
        return max(1, CHUNK_BYTES // self._row_bytes)

    def _rows(self, rows: Array) -> Array:
        self._check_unchanged()
        order = np.argsort(rows, kind="stable")
        found = np.empty((len(rows), self.shape[1]), np.float32)
        for start in range(0, len(rows), self._rows_at_once):
            places = order[start : start + self._rows_at_once]
            self._copy(rows[places], places, found)
        self._check_unchanged()
        return found

    def _copy(self, rows: Array, places: Array, found: Array) -> None:
        """Copy rows, which ascend, to their places in what is given."""
        view = self._view
        if view is None:
            raise StateError(f"{shown(self._path)} was closed; open it again")
        for first, last in self._pages(rows):
            self._advise("MADV_WILLNEED", first, last - first)
        with np.errstate(over="ignore"):
            part = view[rows].astype(np.float32, copy=False)
        if not np.isfinite(part).all():
            at, column = (int(i) for i in np.argwhere(~np.isfinite(part))[0])
            raise self._wrong(
                f"has {view[rows[at], column]} at [{rows[at]}, {column}], which is not a finite "
                "float32"
            )
        found[places] = part

    def _pages(self, rows: Array) -> Iterator[tuple[int, int]]:
        """Where runs of pages begin and end that rows, which ascend, lie in: bytes in the file."""
        starts = self._start + rows.astype(np.int64) * self._row_bytes
        first = starts // mmap.PAGESIZE
        last = -(-(starts + self._row_bytes) // mmap.PAGESIZE)
        apart = first[1:] > last[:-1]
        begins, ends = first[np.r_[True, apart]], last[np.r_[apart, True]]
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield begin * mmap.PAGESIZE, min(end * mmap.PAGESIZE, self.stamp.nbytes)

    def _advise(self, name: str, start: int, length: int) -> None:
        option = getattr(mmap, name, None)
        if option is not None:
            with suppress(OSError):  # advice, which some file systems do not take
                self._map.madvise(option, start, length)

    # -- the file ------------------------------------------------------------------------------

    def _check_unchanged(self) -> None:
        if self._view is None:
            raise StateError(f"{shown(self._path)} was closed; open it again")
        if _stamp(self._handle) != self.stamp:
            raise self._wrong("was changed since it was opened; open it again")

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{shown(self._path)} {what}")

    def close(self) -> None:
        """Let the file go; rows that were given stay."""
        if self._view is not None:
            self._view = None
            with suppress(BufferError):  # a thread is copying: it goes with the last of them
                self._map.close()
            self._let_go()

    def __enter__(self) -> FeatureFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (str(self._path), tuple(self.stamp))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"<FeatureFile {shown(self._path)}: {rows:,} rows of {columns:,}>"


def open_features(path: str | os.PathLike[str]) -> FeatureFile:
    """Open features of nodes that lie in an .npy file; no row is read.

    Args:
        path: of floats, (N, F), in C order, as `numpy.save` writes it.

    Raises:
        DataError: see `FeatureFile`.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/features.npy", np.arange(12.0).reshape(4, 3))
    ...     with open_features(f"{folder}/features.npy") as features:
    ...         features[[2, 0]]
    array([[6., 7., 8.],
           [0., 1., 2.]], dtype=float32)
    """
    return FeatureFile(path)


def _opened_again(path: str, stamp: tuple[int, ...]) -> FeatureFile:
    """Open a file in another process, where it has to be what it was."""
    found = FeatureFile(path)
    if found.stamp != Stamp(*stamp):
        found.close()
        raise DataError(f"{shown(Path(path))} is another file by now; open it again")
    return found


def _stamp(handle: int) -> Stamp:
    status = os.fstat(handle)
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
