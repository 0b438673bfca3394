"""Partitions a graph into files on disk."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from umem._common.files import reason
from umem._common.printable import short
from umem.errors import DataError, FileError, SizeError
from umem.graphs.csr import Array, GraphData
from umem.graphs.cut_folder import LIST, Cut, graph_hash, list_text, part_name
from umem.graphs.part_file import PickedRows, write_arrays
from umem.graphs.partition import partition, symmetric_pattern


def cut(
    graph: GraphData, parts: int, folder: str | os.PathLike[str], *, assignment: Array | None = None
) -> Cut:
    """Partition a graph for ranks that train on it together, and write one file for each part.

    METIS cuts few edges, and gives all parts about the same number of entries. A cut into P parts
    works with any number of ranks up to P, and results are bit for bit the same for all of them. 12
    parts divide evenly among 1, 2, 3, 4, 6 and 12 ranks.

    Cost: about 40 bytes of memory per entry plus METIS's own, in one process. Features are read a
    few rows at a time, so `graph.features` may be a memory map.

    Args:
        graph: an undirected graph: each edge has an entry for both directions.
        parts: 1 to N.
        folder: a new folder; it is written completely or not at all.
        assignment: int (N,), the part of each node, from another partitioner; parts may then
            be empty.

    Raises:
        SizeError: more parts than nodes, or fewer than 1.
        DataError: an edge has only one direction, or `assignment` does not give each node a part.
        FileError: the folder exists, or cannot be written; an incomplete folder is removed.
        MissingDependencyError: pymetis is not installed, and there is no `assignment`.

    >>> import tempfile
    >>> from umem.graphs import karate_club
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = cut(karate_club(), 2, f"{folder}/karate")
    >>> sum(found.nodes), found.tie_count, found.across_count
    (34, 78, 10)
    """
    if not 1 <= parts <= graph.node_count:
        raise SizeError(
            f"a graph of {graph.node_count} nodes can be cut into 1 to {graph.node_count} parts; "
            f"got {parts}"
        )
    target = Path(folder)
    _check_target(target)
    indptr, indices = symmetric_pattern("the graph", graph)
    if assignment is None:
        assignment = partition(indptr, indices, parts)
    _check_assignment(assignment, graph.node_count, parts)
    found = _describe(graph, indptr, indices, assignment, parts, target)
    _write(found, _parts(graph, indptr, indices, assignment, found))
    return found


def _check_target(folder: Path) -> None:
    if os.path.lexists(folder):
        raise FileError(f"{short(folder)} exists; name another folder, or remove it")
    if not folder.parent.is_dir():
        raise FileError(f"{short(folder.parent)} is not a folder; create it, or name another")


def _check_assignment(assignment: Array, nodes: int, parts: int) -> None:
    fits = assignment.shape == (nodes,) and assignment.dtype.kind in "iu"
    if not fits or not 0 <= assignment.min() <= assignment.max() < parts:
        raise DataError(
            f"assignment: must be {nodes} integers from 0 to {parts - 1}, a part for each node; "
            f"got {assignment.dtype} of {assignment.shape}"
        )


def _describe(
    graph: GraphData, indptr: Array, indices: Array, assignment: Array, parts: int, folder: Path
) -> Cut:
    """Compute the description of a cut: hashes, node and entry counts, edges between parts."""
    degrees = np.diff(indptr)
    across = int((np.repeat(assignment, degrees) != assignment[indices]).sum()) // 2
    entries = np.bincount(assignment, degrees + 1, parts).astype(np.int64)
    identity = hashlib.sha256(graph_hash(graph).encode())
    identity.update(f" {parts} ".encode() + assignment.astype("<i4").tobytes())
    return Cut(
        folder,
        graph_hash(graph),
        identity.hexdigest(),
        tuple(np.bincount(assignment, minlength=parts).tolist()),
        tuple(entries.tolist()),
        len(indices) // 2,
        across,
        graph.features.shape[1],
        graph.class_count,
    )


def _parts(
    graph: GraphData, indptr: Array, indices: Array, assignment: Array, cut: Cut
) -> Iterator[Mapping[str, Array | PickedRows]]:
    """Yield the arrays of each part's file."""
    order = np.argsort(assignment, kind="stable").astype(np.int32)
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    scale = (1.0 / np.sqrt(np.diff(indptr) + 1)).astype(np.float32)
    for start, stop in zip(cut.offsets[:-1], cut.offsets[1:], strict=True):
        nodes = order[start:stop]
        starts, columns = _rows_of(indptr, indices, nodes)
        row = np.repeat(np.arange(len(nodes)), np.diff(starts))
        by_position = np.lexsort((position[columns], row))
        columns = columns[by_position]
        yield {
            "features": PickedRows(graph.features, nodes),
            "indptr": starts,
            "indices": position[columns],
            "data": scale[nodes][row] * scale[columns],
            "nodes": nodes,
            "labels": graph.labels[nodes].astype(np.int32),
            "train_mask": graph.train_mask[nodes].astype(np.bool_),
            "val_mask": graph.val_mask[nodes].astype(np.bool_),
            "test_mask": graph.test_mask[nodes].astype(np.bool_),
        }


def _rows_of(indptr: Array, indices: Array, nodes: Array) -> tuple[Array, Array]:
    """Return indptr and column indices of some rows of the adjacency, with self loops."""
    lengths = np.diff(indptr)[nodes].astype(np.int64) + 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    columns = np.repeat(nodes, lengths)  # the loop comes first
    others = within > 0
    columns[others] = indices[np.repeat(indptr[nodes], lengths)[others] + within[others] - 1]
    return starts, columns


def _write(cut: Cut, parts: Iterator[Mapping[str, Array | PickedRows]]) -> None:
    """Write a folder under a temporary name, and rename it when it is complete."""
    temporary = cut.folder.parent / f".umem-{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir()
        for part, arrays in enumerate(parts):
            with open(temporary / part_name(part), "xb") as file:
                write_arrays(file, arrays, {"cut": cut.identity, "part": str(part)})
                _synchronize(file)
        with open(temporary / LIST, "x", encoding="utf-8") as listed:
            listed.write(list_text(cut))
            _synchronize(listed)
        os.rename(temporary, cut.folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise FileError(
                f"the cut cannot be written to {short(cut.folder)}: {reason(error)}; free space, "
                "or name another folder. No file was left"
            ) from error
        raise


def _synchronize(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
