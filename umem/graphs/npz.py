"""Graphs in .npz files: read without pickle, and checked before use."""

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
from umem.graphs.draws import INT32_MAX

_NAMES = tuple(field.name for field in fields(GraphData))


def save_npz(path: str | os.PathLike[str], graph: GraphData) -> None:
    """Write a graph to a file for `load_npz`; an existing file is replaced.

    Raises:
        DataError: `load_npz` would refuse the graph; no file was written.
        OSError: the file cannot be written; an existing file stays.
    """
    path = Path(path)
    arrays = {field.name: np.asarray(getattr(graph, field.name)) for field in fields(GraphData)}
    _checked(short(path), arrays)
    with whole(path, force=True) as file:
        np.savez(file, **cast("dict[str, Any]", arrays))


def load_npz(
    path: str | os.PathLike[str], features: str | os.PathLike[str] | None = None
) -> GraphData:
    """Read a graph from an .npz file with the arrays of `Graph`; other arrays are ignored.

    Refuses pickled arrays, so the file cannot execute code. Integers and floats of any width are
    converted to int32 and float32. docs/reference/graphs.md has the table.

    Args:
        path: the file.
        features: a separate .npy file of features, which may be larger than memory: it is mapped
            like `numpy.load(mmap_mode="r")` and keeps its type. `umem.graphs.cut` converts its rows
            to float32, and checks that they are finite.

    Raises:
        DataError: the file cannot be read, or an array is missing or invalid; the message names the
            file, the array and the first wrong position.
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
        with open_regular(path):  # opening a pipe would block
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(f"{source}: not an .npy file to map: {_reason(error)}") from error
    if not isinstance(array, np.memmap):
        raise DataError(f"{source}: not a single array; write it with numpy.save")
    if not array.flags.c_contiguous:
        raise DataError(
            f"{source}: in Fortran order, so each row is scattered over the file; save "
            "numpy.ascontiguousarray(array)"
        )
    return array


def _needed(with_features: bool) -> tuple[str, ...]:
    return _NAMES if with_features else tuple(name for name in _NAMES if name != "features")


def _read_arrays(source: str, file: IO[bytes], names: Collection[str]) -> dict[str, Array]:
    """Read the named arrays of an .npz file, without pickle.

    Raises:
        DataError: the file is damaged, or is not an .npz file.
    """
    # A damaged file can raise nearly any error here: BadZipFile, zlib.error, EOFError, ValueError,
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
    """Check arrays and make a graph of them; raises DataError for the first invalid one."""
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
    """Check that an array is 1-D, of integers, and no longer than int32 can count; returns it.

    Raises:
        DataError: it is not.
    """
    if array.ndim != 1:
        raise DataError(f"{where}: must have 1 dimension; its shape is {array.shape}")
    if array.dtype.kind not in "iu":
        raise DataError(f"{where}: must hold integers; its dtype is {array.dtype}")
    if len(array) > INT32_MAX:
        raise DataError(f"{where}: {len(array)} elements are more than int32 can count")
    return array


def _in_range(where: str, array: Array, limit: int, what: str) -> Array:
    """Return an int32 array whose values are all from 0 to ``limit`` - 1.

    Raises:
        DataError: a value is out of range.
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
        DataError: it does not start with 0, decreases, or does not end with ``entries``.
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
    """Check a feature matrix, and return it as float32; a memory map is returned unchanged.

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
