"""The rows of a partitioned graph that each rank has, receives and sends.

A rank has a contiguous range of parts. Because the graph is undirected, another rank needs exactly
the rows of a part that have an entry in that rank's columns. So each rank derives both the rows
that it sends and the rows that it receives from its own parts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from umem.errors import SizeError
from umem.graphs.csr import Array
from umem.graphs.cut_folder import Cut, GraphPart


def parts_of_ranks(parts: int, ranks: int) -> tuple[range, ...]:
    """Assign each rank a range of consecutive parts; the first ranks get one more if uneven.

    Raises:
        SizeError: there are more ranks than parts.
    """
    if ranks > parts:
        raise SizeError(
            f"{ranks} ranks for a graph in {parts} parts: each needs at least one part. Start at "
            f"most {parts}, or cut the graph into more parts (umem graph cut --parts {ranks})"
        )
    ends = [rank * (parts // ranks) + min(rank, parts % ranks) for rank in range(ranks + 1)]
    return tuple(map(range, ends[:-1], ends[1:]))


class ColumnBlock(NamedTuple):
    """Entries of a rank's rows in some columns, as CSR with int32 indices.

    Attributes:
        part: the part of its columns; None for the rank's own parts.
        columns: the number of columns.
    """

    part: int | None
    columns: int
    indptr: Array
    indices: Array
    data: Array


@dataclass(frozen=True, eq=False)
class RankBlocks:
    """The rows of a rank, split into column blocks in the order in which their products are summed.

    For the rows of part p that order is p, p + 1, ..., the last part, 0, ..., p - 1, for any number
    of ranks: first the rank's own columns from p on, then other ranks' columns, and last its own
    columns before p.

    Attributes:
        rows: the slice of rows of each part of the rank.
        first: own columns, of the row's part or a later one.
        halo: the columns of received rows, a block for each part of another rank, in that order.
        last: own columns, of earlier parts.
        sent: int32, the rank's rows to send, by its part and the other rank.
    """

    rows: tuple[slice, ...]
    first: ColumnBlock
    halo: tuple[ColumnBlock, ...]
    last: ColumnBlock
    sent: Mapping[tuple[int, int], Array]


def rank_blocks(
    cut: Cut, ranks: Sequence[range], rank: int, parts: Sequence[GraphPart]
) -> RankBlocks:
    """Split the rows of a rank's parts into column blocks.

    Cost: a few passes over their entries, about 40 bytes per entry while it runs, 8 afterwards.
    """
    own, offsets = ranks[rank], cut.offsets
    bounds = offsets[own.start : own.stop + 1] - offsets[own.start]
    entries = _Entries(parts, offsets)
    order = (entries.part - own.stop) % len(cut.nodes) + 1  # of other parts; the next lines set own
    inside = (entries.part >= own.start) & (entries.part < own.stop)
    row_part = np.searchsorted(bounds[1:], entries.row, "right") + own.start
    order[inside & (entries.part >= row_part)] = 0
    order[inside & (entries.part < row_part)] = len(cut.nodes) + 1
    by_order = np.argsort(order, kind="stable")
    ends = np.cumsum(np.bincount(order, minlength=len(cut.nodes) + 2))
    picked = np.split(by_order, ends[:-1])
    own_columns = int(bounds[-1]), int(offsets[own.start])
    others = [(own.stop + step) % len(cut.nodes) for step in range(len(cut.nodes) - len(own))]
    blocks = zip(others, picked[1:], strict=False)
    return RankBlocks(
        tuple(map(slice, bounds[:-1].tolist(), bounds[1:].tolist())),
        entries.own_block(picked[0], *own_columns),
        tuple(entries.halo_block(part, which) for part, which in blocks if len(which)),
        entries.own_block(picked[-1], *own_columns),
        _sent(entries, ranks, rank, bounds),
    )


class _Entries:
    """The entries of a rank's rows as arrays: row, column, the column's part, value."""

    def __init__(self, parts: Sequence[GraphPart], offsets: Array) -> None:
        lengths = np.concatenate([np.diff(part.indptr) for part in parts])
        self._rows = len(lengths)
        self.row = np.repeat(np.arange(self._rows, dtype=np.int32), lengths)
        self.column = np.concatenate([part.indices for part in parts])
        self._data = np.concatenate([part.data for part in parts])
        self.part = np.searchsorted(offsets[1:], self.column, "right").astype(np.int32)

    def own_block(self, which: Array, columns: int, start: int) -> ColumnBlock:
        indices = (self.column[which] - start).astype(np.int32)
        return ColumnBlock(None, columns, self._indptr(which), indices, self._data[which])

    def halo_block(self, part: int, which: Array) -> ColumnBlock:
        needed, indices = np.unique(self.column[which], return_inverse=True)
        indices = indices.reshape(-1).astype(np.int32)
        return ColumnBlock(part, len(needed), self._indptr(which), indices, self._data[which])

    def _indptr(self, which: Array) -> Array:
        counts = np.bincount(self.row[which], minlength=self._rows)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _sent(
    entries: _Entries, ranks: Sequence[range], rank: int, bounds: Array
) -> dict[tuple[int, int], Array]:
    """Return, for each part and other rank, the rows that the other rank needs."""
    sent: dict[tuple[int, int], Array] = {}
    for other, its in enumerate(ranks):
        if other == rank:
            continue
        theirs = (entries.part >= its.start) & (entries.part < its.stop)
        rows = np.unique(entries.row[theirs])
        for part, found in zip(
            ranks[rank], np.split(rows, np.searchsorted(rows, bounds[1:-1])), strict=True
        ):
            if len(found):
                sent[part, other] = found
    return sent


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Rows that each rank sends in each exchange of features.

    Attributes:
        rows: int64 (parts, ranks): number of rows of a part that a rank needs; 0 for its own parts.
        ranks: the parts of each rank.
    """

    rows: Array
    ranks: tuple[range, ...]

    def sent_bytes(self, rank: int, widths: Iterable[int], itemsize: int = 4) -> int:
        """Return the bytes that a rank sends in one exchange for each width.

        Args:
            rank: from 0.
            widths: number of columns of each exchange; for a step they are in
                `umem.chainer.ParallelGCN.exchanged_widths`.
            itemsize: bytes per number.
        """
        own = self.ranks[rank]
        return int(self.rows[own.start : own.stop].sum()) * sum(widths) * itemsize

    def received_bytes(self, rank: int, widths: Iterable[int], itemsize: int = 4) -> int:
        """Return the bytes that a rank receives; see `sent_bytes`."""
        return int(self.rows[:, rank].sum()) * sum(widths) * itemsize


def halo_plan(cut: Cut, ranks: int) -> HaloPlan:
    """Compute from the files of a cut which rows ranks would send each other; starts no rank.

    Cost: reads all parts, without their features, one after the other.

    Raises:
        SizeError: there are more ranks than parts.
        DataError: a part cannot be read, or belongs to another cut.
    """
    runs = parts_of_ranks(len(cut.nodes), ranks)
    rows = np.zeros((len(cut.nodes), ranks), np.int64)
    for rank, run in enumerate(runs):
        for part in run:
            found = _Entries([cut.part(part, verify_features=False)], cut.offsets)
            for other, its in enumerate(runs):
                theirs = (found.part >= its.start) & (found.part < its.stop)
                rows[part, other] = 0 if other == rank else len(np.unique(found.row[theirs]))
    return HaloPlan(rows, runs)
