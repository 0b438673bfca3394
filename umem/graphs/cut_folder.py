"""A graph in parts on disk: a folder with a list, and a file for each part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from umem.checksums import SUMS, with_sums
from umem.errors import DataError, UnverifiedWarning, warn_at_program
from umem.files import open_regular, reason
from umem.graphs.csr import Array, GraphData
from umem.graphs.part_file import ArraysFile
from umem.graphs.verified_files import verify_once
from umem.printable import short

LIST = "cut.json"
VERSION = 1


def part_name(part: int) -> str:
    """Return the name of a part's file."""
    return f"part-{part:05d}.safetensors"


@dataclass(frozen=True)
class Cut:
    """Description of a partitioned graph on disk; each part is in a file of its own.

    Attributes:
        folder: where it lies.
        graph: a hash of the graph that was cut, see `graph_hash`.
        identity: a hash of the graph and of who belongs to which part.
        nodes: by part, how many it has. Parts in order are the order of nodes: part p has those
            from `offsets[p]` to `offsets[p + 1]`.
        entries: by part, those of its rows of the normalised adjacency, loops included.
        tie_count: ties of the graph, without loops and repeats.
        across_count: how many of them lead from one part to another.
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
        """Return where each part begins in the order of parts: int64 (parts + 1,)."""
        return np.concatenate([[0], np.cumsum(self.nodes, dtype=np.int64)])

    @property
    def imbalance(self) -> float:
        """Return the entries of the largest part, divided by those of an average one."""
        return max(self.entries) * len(self.entries) / sum(self.entries)

    def part(self, part: int, *, verify_features: bool = True) -> GraphPart:
        """Open the file of one part.

        Cost: reads all of it but the features, which stay in the file; the first time those too, to
        compare them with their checksum. See docs/ranks.md for how that is remembered.

        Args:
            part: from 0.
            verify_features: False where they are not used.

        Raises:
            DataError: it cannot be read, is torn or damaged, or is a part of another cut.
        """
        path = self.folder / part_name(part)
        file = ArraysFile(path)
        if (file.words.get("cut"), file.words.get("part")) != (self.identity, str(part)):
            raise DataError(
                f"{short(path)} is part {file.words.get('part')} of another cut than "
                f"{short(self.folder / LIST)}; cut the graph again"
            )
        found = _read(file)
        self._check(path, part, found)
        if verify_features:
            self._verify_features(path, file)
        return found

    def _verify_features(self, path: Path, file: ArraysFile) -> None:
        """Compare a part's memory-mapped features with their checksum, once for each version of the
        file.

        Raises:
            DataError: they differ, or the file cannot be read.
        """
        if file.sums is None:
            warn_at_program(
                f"{short(self.folder)} has no checksums of its features: an earlier umem wrote "
                "it, and damage in them would not be seen. Cut the graph again to have them",
                UnverifiedWarning,
            )
            return
        try:
            verify_once(path, file.sums["features"], lambda: file.verify("features", "float32", 2))
        except OSError as error:
            raise DataError(f"{short(path)} cannot be read: {reason(error)}") from error

    def _check(self, path: Path, part: int, found: GraphPart) -> None:
        """Check that a part's arrays are consistent with the cut, so that indexing them is safe.

        Raises:
            DataError: they are not.
        """
        count, entries, total = self.nodes[part], self.entries[part], sum(self.nodes)
        lengths = {field: len(getattr(found, field)) for field in GraphPart._fields}
        wanted = dict.fromkeys(GraphPart._fields, count) | {
            "indptr": count + 1,
            "indices": entries,
            "data": entries,
        }
        starts, indices = found.indptr, found.indices
        if (
            lengths != wanted
            or found.features.shape[1] != self.feature_count
            or starts[0] != 0
            or starts[-1] != entries
            or (np.diff(starts) < 0).any()
            or (entries and not 0 <= indices.min() <= indices.max() < total)
        ):
            raise DataError(
                f"{short(path)} has arrays that do not belong together, or not to "
                f"{short(self.folder / LIST)}; cut the graph again"
            )


_LISTED = {"version", *(field.name for field in fields(Cut))} - {"folder"}


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
        features: float32 (n, F), in the file: what is not touched is not read.
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


def _read(file: ArraysFile) -> GraphPart:
    """Read the arrays of a part; features are memory-mapped."""
    train, val, test = (file.read(f"{name}_mask", "bool") for name in ("train", "val", "test"))
    return GraphPart(
        file.read("indptr", "int64"),
        file.read("indices", "int32"),
        file.read("data", "float32"),
        file.read("nodes", "int32"),
        file.read("labels", "int32"),
        train,
        val,
        test,
        file.mapped("features", "float32", 2),
    )


def open_cut(folder: str | Path, graph: GraphData | None = None) -> Cut:
    """Read the description of a cut; the files of parts are opened when they are used.

    Args:
        folder: an output of `umem.graphs.cut` or ``umem graph cut``.
        graph: see that it is this one that was cut; costs a pass over its arrays.

    Raises:
        DataError: it cannot be read, is no cut, or is one of another graph.
    """
    path = Path(folder) / LIST
    try:
        with open_regular(path) as file:
            cut = _cut(Path(folder), json.load(file))
    except OSError as error:
        raise DataError(f"{short(path)}: no cut of a graph: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{short(path)}: no list of a cut: {short(repr(error))}") from error
    if graph is not None and graph_hash(graph) != cut.graph:
        raise DataError(f"{short(Path(folder))} is a cut of another graph; cut this one")
    return cut


def _cut(folder: Path, values: dict[str, Any]) -> Cut:
    """Make a `Cut` from the values of its list file.

    Raises:
        DataError: another version wrote it.
        ValueError, KeyError, TypeError: values are missing or wrong.
    """
    if values["version"] != VERSION:
        raise DataError(
            f"{short(folder / LIST)}: version {values['version']!r}, and this umem reads "
            f"{VERSION}; cut the graph again"
        )
    _check_list(folder, values)
    cut = Cut(
        folder,
        str(values["graph"]),
        str(values["identity"]),
        _counts(values["nodes"]),
        _counts(values["entries"]),
        int(values["tie_count"]),
        int(values["across_count"]),
        int(values["feature_count"]),
        int(values["class_count"]),
    )
    if len(cut.nodes) != len(cut.entries) or not cut.nodes:
        raise ValueError("parts without a number of nodes or entries")
    return cut


def _check_list(folder: Path, values: dict[str, Any]) -> None:
    """Compare a list with its checksum; lists of an earlier umem have none.

    Raises:
        ValueError: the checksum differs.
    """
    said = {name: json.dumps(value) for name, value in values.items() if name != SUMS}
    if set(said) != _LISTED:
        raise ValueError(f"it has or lacks {', '.join(sorted(set(said) ^ _LISTED))}")
    if SUMS not in values:
        warn_at_program(
            f"{short(folder / LIST)} has no checksum: an earlier umem wrote it, and damage in it "
            "would not be seen. Cut the graph again to have one",
            UnverifiedWarning,
        )
    elif with_sums(said, {})[SUMS] != values[SUMS]:
        raise ValueError("its SHA-256 is another than when it was written")


def _counts(values: Any) -> tuple[int, ...]:
    counts = tuple(map(int, values))
    if min(counts, default=0) < 0:
        raise ValueError("a negative count")
    return counts


def list_text(cut: Cut) -> str:
    """Write the list of a cut as text that `open_cut` reads."""
    values = {"version": VERSION, **asdict(cut)}
    del values["folder"]
    said = {name: json.dumps(value) for name, value in values.items()}
    return json.dumps({**values, SUMS: with_sums(said, {})[SUMS]}, indent=1) + "\n"


def graph_hash(graph: GraphData) -> str:
    """Compute the SHA-256 of a graph's arrays, their names, dtypes and shapes, as hexadecimal."""
    found = hashlib.sha256()
    for field in fields(GraphData):
        array = getattr(graph, field.name)
        found.update(f"{field.name} {array.dtype} {array.shape} ".encode())
        for start in range(0, len(array), 1 << 16):
            found.update(np.ascontiguousarray(array[start : start + (1 << 16)]).data)
    return found.hexdigest()
