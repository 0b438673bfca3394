"""A partitioned graph on disk: a folder with a list, and a file for each part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from umem._common.checksums import SUMS, with_sums
from umem._common.files import open_regular, reason
from umem._common.printable import short
from umem.errors import DataError
from umem.graphs.csr import Array, GraphData
from umem.graphs.part_file import ArraysFile
from umem.graphs.verified_files import verify_once

LIST = "cut.json"
VERSION = 1


def part_name(part: int) -> str:
    """Return the name of a part's file."""
    return f"part-{part:05d}.safetensors"


@dataclass(frozen=True)
class Cut:
    """Description of a partitioned graph on disk; each part is in its own file.

    Attributes:
        folder: the folder of the files.
        graph: a hash of the graph, see `graph_hash`.
        identity: a hash of the graph and its partition.
        nodes: number of nodes in each part. In the order of parts, part p has the nodes from
            `offsets[p]` to `offsets[p + 1]`.
        entries: number of entries of the normalised adjacency in each part's rows, self loops
            included.
        tie_count: number of the graph's edges, without self loops and repeats.
        across_count: number of these edges that connect two parts.
        feature_count: F.
        class_count: one more than the highest label.
    """

    folder: Path
    graph: str
    identity: str
    nodes: tuple[int, ...]
    entries: tuple[int, ...]
    tie_count: int
    across_count: int
    feature_count: int
    class_count: int

    @property
    def offsets(self) -> Array:
        """Return the first node of each part in the order of parts: int64 (parts + 1,)."""
        return np.concatenate([[0], np.cumsum(self.nodes, dtype=np.int64)])

    @property
    def imbalance(self) -> float:
        """Return the entries of the largest part divided by the average."""
        return max(self.entries) * len(self.entries) / sum(self.entries)

    def part(self, part: int, *, verify_features: bool = True) -> GraphPart:
        """Open the file of one part.

        Cost: reads everything except the features, which stay in the file. The first time it reads
        them too, to compare them with their checksum. docs/reference/ranks.md explains how umem
        remembers that.

        Args:
            part: from 0.
            verify_features: False if they are not used.

        Raises:
            DataError: the file cannot be read, is incomplete or damaged, or belongs to another cut.
        """
        path = self.folder / part_name(part)
        file = ArraysFile(path)
        if (file.notes.get("cut"), file.notes.get("part")) != (self.identity, str(part)):
            raise DataError(
                f"{short(path)} is part {file.notes.get('part')} of another cut than "
                f"{short(self.folder / LIST)}; cut the graph again"
            )
        *others, features = GraphPart._fields
        found = GraphPart._make([*map(file.read, others), file.mapped(features)])
        if verify_features:
            try:
                verify_once(path, file.sums[features], lambda: file.verify(features))
            except OSError as error:
                raise DataError(f"{short(path)} cannot be read: {reason(error)}") from error
        return found


class GraphPart(NamedTuple):
    """The nodes of a part, in the order of parts, and their rows of the normalised adjacency.

    Attributes:
        indptr: int64 (n + 1,).
        indices: int32, columns in the order of parts, ascending in each row.
        data: float32, the entries of D^-1/2 (A + I) D^-1/2.
        nodes: int32 (n,), their numbers in the graph.
        labels: int32 (n,).
        train_mask: bool (n,).
        val_mask: bool (n,).
        test_mask: bool (n,).
        features: float32 (n, F), a memory map of the file; rows are read when they are used.
    """

    indptr: Array
    indices: Array
    data: Array
    nodes: Array
    labels: Array
    train_mask: Array
    val_mask: Array
    test_mask: Array
    features: Array


def open_cut(folder: str | Path, graph: GraphData | None = None) -> Cut:
    """Read the description of a cut; the files of parts are opened when they are used.

    Args:
        folder: an output of `umem.graphs.cut` or ``umem graph cut``.
        graph: check that the cut is of this graph; costs a pass over its arrays.

    Raises:
        DataError: the folder cannot be read, is not a cut, or is a cut of another graph.
    """
    path = Path(folder) / LIST
    try:
        with open_regular(path) as file:
            cut = _cut(Path(folder), json.load(file))
    except OSError as error:
        raise DataError(f"{short(path)}: not a cut of a graph: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{short(path)}: not the list of a cut: {short(repr(error))}") from error
    if graph is not None and graph_hash(graph) != cut.graph:
        raise DataError(f"{short(Path(folder))} is a cut of another graph; cut this one")
    return cut


def _cut(folder: Path, values: dict[str, Any]) -> Cut:
    """Make a `Cut` from the values of its list file.

    Raises:
        DataError: another version wrote it.
        ValueError, KeyError, TypeError: values are missing or wrong, or the checksum differs.
    """
    if values["version"] != VERSION:
        raise DataError(
            f"{short(folder / LIST)}: version {values['version']!r}, and this umem reads "
            f"{VERSION}; cut the graph again"
        )
    expected = values.pop(SUMS)
    if _sum_of_list(values) != expected:
        raise ValueError("its SHA-256 has changed since it was written")
    del values["version"]
    counts = tuple(values.pop("nodes")), tuple(values.pop("entries"))
    return Cut(folder, nodes=counts[0], entries=counts[1], **values)


def _sum_of_list(values: dict[str, Any]) -> str:
    """Return the checksum of a list's values."""
    return with_sums({name: json.dumps(value) for name, value in values.items()}, {})[SUMS]


def list_text(cut: Cut) -> str:
    """Write the list of a cut as text that `open_cut` reads."""
    values = {"version": VERSION, **asdict(cut)}
    del values["folder"]
    return json.dumps({**values, SUMS: _sum_of_list(values)}, indent=1) + "\n"


def graph_hash(graph: GraphData) -> str:
    """Compute the SHA-256 of a graph's arrays, their names, dtypes and shapes, as hexadecimal."""
    found = hashlib.sha256()
    for field in fields(GraphData):
        array = getattr(graph, field.name)
        found.update(f"{field.name} {array.dtype} {array.shape} ".encode())
        for start in range(0, len(array), 1 << 16):
            found.update(np.ascontiguousarray(array[start : start + (1 << 16)]).data)
    return found.hexdigest()
