"""Graphs in .npz files: read without pickle, and checked before anything uses them."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from umem._common.files import open_regular, reason, whole
from umem._common.printable import short
from umem.errors import DataError
from umem.graphs.csr import Array, GraphData

_INT32_MAX = 2**31 - 1
_NAMES = tuple(field.name for field in fields(GraphData))


def save_npz(path: str | os.PathLike[str], graph: GraphData) -> None:
    """Write a graph so that `load_npz` reads it back; an existing file is replaced.

    Raises:
        DataError: `load_npz` would refuse it; nothing is written.
        OSError: it cannot be written; an existing file is as before.
    """
    path = Path(path)
    arrays = {field.name: np.asarray(getattr(graph, field.name)) for field in fields(GraphData)}
    _checked(short(path), arrays)
    with whole(path, force=True) as file:
        np.savez(file, **cast("dict[str, Any]", arrays))


def load_npz(
    path: str | os.PathLike[str], features: str | os.PathLike[str] | None = None
) -> GraphData:
    """Read a graph from an .npz file with the arrays of `GraphData`; other arrays are ignored.

    Nothing in the file is executed: pickled arrays are refused. Integers of any width and floats
    of any width are accepted and converted to int32 and float32; see docs/reference/graphs.md.

    Args:
        path: the file.
        features: an .npy file of the features instead, which may be larger than memory: it is
            mapped as `numpy.load(mmap_mode="r")` does, in the type that it has. `umem.graphs.cut`
            makes float32 of its rows, and checks that they are finite.

    Raises:
        DataError: it cannot be read, an array is missing, or an array is not what it should be;
            the message names the file, the array and the first position that is wrong.
    """
    source = short(Path(path))
    try:
        with open_regular(path) as file:
            arrays = _read_arrays(source, file, _needed(features is None))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{source}: cannot be read: {reason(error)}") from error
    if features is None:
        return _checked(source, arrays)
    return _checked(source, {**arrays, "features": _mapped(features)})


def _mapped(path: str | os.PathLike[str]) -> Array:
    """Memory-map the array of an .npy file."""
    source = short(Path(path))
    try:
        with open_regular(path):  # a pipe would wait
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(f"{source}: no .npy file to map: {_reason(error)}") from error
    if not isinstance(array, np.memmap):
        raise DataError(f"{source}: not one array; numpy.save writes a file that can be mapped")
    if not array.flags.c_contiguous:
        raise DataError(
            f"{source}: in Fortran order, so that a row lies all over the file; save "
            "numpy.ascontiguousarray(array)"
        )
    return array


def _needed(with_features: bool) -> tuple[str, ...]:
    return _NAMES if with_features else tuple(name for name in _NAMES if name != "features")


def _read_arrays(source: str, file: IO[bytes], names: Collection[str]) -> dict[str, Array]:
    """Read the named arrays of an .npz file, without pickle.

    Raises:
        DataError: the file is damaged, or is no .npz file.
    """
    # A damaged file can raise nearly anything here: BadZipFile, zlib.error, EOFError, ValueError,
    # SyntaxError, MemoryError, NotImplementedError, ... All mean the same to the caller.
    try:
        archive = np.load(file, allow_pickle=False)
    except Exception as error:
        raise DataError(f"{source}: not an .npz file: {_reason(error)}") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{source}: one .npy array, not an .npz file of several; use numpy.savez")
    with archive:
        return {name: _read_array(source, archive, name) for name in names}


def _read_array(source: str, archive: Any, name: str) -> Array:
    if name not in archive.files:
        found = short(", ".join(archive.files)) or "nothing"
        raise DataError(f"{source}: {name}: missing; the file has {found}")
    try:
        return np.asarray(archive[name])
    except Exception as error:
        raise DataError(f"{source}: {name}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return short(f"{type(error).__name__}: {error}".rstrip(": "))


def _checked(source: str, arrays: dict[str, Array]) -> GraphData:
    """Check arrays and make a graph of them; raises DataError for the first that is wrong."""
    where = {name: f"{source}: {name}" for name in arrays}
    indices = _integers(where["indices"], arrays["indices"])
    indptr = _checked_indptr(where["indptr"], arrays["indptr"], len(indices))
    nodes = len(indptr) - 1
    masks = ("train_mask", "val_mask", "test_mask")
    graph = GraphData(
        indptr,
        _in_range(where["indices"], indices, nodes, "node"),
        _checked_features(where["features"], arrays["features"], nodes),
        _checked_labels(where["labels"], arrays["labels"], nodes),
        *(_checked_mask(where[name], arrays[name], nodes) for name in masks),
    )
    if not graph.train_mask.any():
        raise DataError(f"{where['train_mask']}: no node is for training; set at least one")
    return graph


def _integers(where: str, array: Array) -> Array:
    """Return a 1-D array of integers that fit int32.

    Raises:
        DataError: it is not.
    """
    if array.ndim != 1:
        raise DataError(f"{where}: must have 1 dimension; its shape is {array.shape}")
    if array.dtype.kind not in "iu":
        raise DataError(f"{where}: must hold integers; its dtype is {array.dtype}")
    if len(array) > _INT32_MAX:
        raise DataError(f"{where}: {len(array)} elements are more than int32 can count")
    return array


def _in_range(where: str, array: Array, limit: int, what: str) -> Array:
    """Return an int32 array whose values are all from 0 to ``limit`` - 1.

    Raises:
        DataError: one is outside.
    """
    bad = (array < 0) | (array >= limit)
    if bad.any():
        at = int(bad.argmax())
        raise DataError(
            f"{where}: {array[at]} at [{at}] is no {what}; they go from 0 to {limit - 1}"
        )
    return array.astype(np.int32, copy=False)


def _checked_indptr(where: str, array: Array, entries: int) -> Array:
    """Check a CSR row pointer against the number of entries, and return it as int32.

    Raises:
        DataError: it does not start with 0, falls, or ends elsewhere.
    """
    indptr = _integers(where, array)
    if len(indptr) < 2:
        raise DataError(f"{where}: must have one element more than there are nodes, so at least 2")
    if indptr[0] != 0:
        raise DataError(f"{where}: must start with 0; [0] is {indptr[0]}")
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise DataError(f"{where}: must not fall; [{at}] is {indptr[at]} after {indptr[at - 1]}")
    if indptr[-1] != entries:
        last = len(indptr) - 1
        raise DataError(
            f"{where}: must end with the length of indices, {entries}; [{last}] is {indptr[-1]}"
        )
    return indptr.astype(np.int32, copy=False)


def _checked_features(where: str, array: Array, nodes: int) -> Array:
    """Check a feature matrix, and return it as float32; a memory map is returned as it is.

    Raises:
        DataError: its shape or dtype is wrong, or a value is not finite in float32.
    """
    if array.ndim != 2 or array.shape[0] != nodes or array.shape[1] == 0:
        raise DataError(f"{where}: must have shape ({nodes}, features); it has {array.shape}")
    if array.dtype.kind != "f":
        raise DataError(f"{where}: must hold floats; its dtype is {array.dtype}")
    if isinstance(array, np.memmap):
        return array
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(array, np.float32)
    bad = ~np.isfinite(features)
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(bad.argmax(), bad.shape))
        value = array[row, column]
        raise DataError(f"{where}: {value} at [{row}, {column}] is not a finite float32")
    return features


def _checked_labels(where: str, array: Array, nodes: int) -> Array:
    labels = _integers(where, array)
    _check_length(where, labels, nodes)
    return _in_range(where, labels, nodes, "class (at most as many as nodes)")


def _checked_mask(where: str, array: Array, nodes: int) -> Array:
    if array.dtype.kind != "b":
        raise DataError(f"{where}: must hold booleans; its dtype is {array.dtype}")
    if array.ndim != 1:
        raise DataError(f"{where}: must have 1 dimension; its shape is {array.shape}")
    _check_length(where, array, nodes)
    return array


def _check_length(where: str, array: Array, nodes: int) -> None:
    if len(array) != nodes:
        raise DataError(f"{where}: must have one element a node, {nodes}; it has {len(array)}")
