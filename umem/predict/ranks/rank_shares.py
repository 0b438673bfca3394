"""The nodes, entries and exchanged rows of each rank of a graph that is cut into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

INDEX_BYTES = FLOAT_BYTES = 4
NODE_BYTES = 2 * INDEX_BYTES + 3
"""Bytes of a node: its number, its label and three masks."""


class RankRows(Protocol):
    """The numbers of rows that ranks send each other, such as `umem.graphs.halo.HaloPlan`."""

    @property
    def rows(self) -> Any:
        """Return the rows of each part that each rank needs, int (parts, ranks); 0 of its own."""

    @property
    def ranks(self) -> Sequence[range]:
        """Return the parts of each rank, as a range."""


class GraphInParts(Protocol):
    """A graph in parts, such as `umem.graphs.PlannedCut`."""

    @property
    def nodes(self) -> Sequence[int]:
        """Return the number of nodes of each part."""

    @property
    def entries(self) -> Sequence[int]:
        """Return the number of adjacency entries in each part's rows, self-loops included."""

    def plan(self, ranks: int) -> RankRows:
        """Return the rows that a number of ranks send each other."""


@dataclass(frozen=True)
class RankShare:
    """The part of a graph that one rank has, and the rows that it exchanges.

    Attributes:
        nodes: its rows; ``entries`` the adjacency's entries in these rows.
        part_count: its parts; ``part_nodes`` the rows of the largest.
        block_count: parts of other ranks that it needs rows of.
        sent_rows: all rows that it sends; ``received_rows`` all that it receives.
        sent_message, received_message: the rows of the longest message.
    """

    nodes: int
    entries: int
    part_count: int
    part_nodes: int
    block_count: int = 0
    sent_rows: int = 0
    received_rows: int = 0
    sent_message: int = 0
    received_message: int = 0

    def fixed_bytes(self, row_bytes: int) -> int:
        """Return the bytes of the rank's graph: CSR blocks, rows it sends, labels, two buffers.

        Args:
            row_bytes: bytes of the widest exchanged row.
        """
        matrices = self.entries * (INDEX_BYTES + FLOAT_BYTES)
        matrices += (2 + self.block_count) * (self.nodes + 1) * INDEX_BYTES
        buffers = (self.sent_message + self.received_message) * row_bytes
        return matrices + self.sent_rows * INDEX_BYTES + buffers + self.nodes * NODE_BYTES


@dataclass(frozen=True)
class Rounds:
    """The messages of an exchange, one round after the other; a round ends with its longest.

    Attributes:
        count: rounds in which a rank sends.
        rows: the rows of each round's longest message, summed over rounds.
    """

    count: int
    rows: int


def shares_of(graph: GraphInParts, ranks: int) -> tuple[RankShare, ...]:
    """Return the share of each of a number of ranks.

    Raises:
        SizeError: there are more ranks than parts.
    """
    return tuple(_share(graph, graph.plan(ranks), rank) for rank in range(ranks))


def _share(graph: GraphInParts, plan: RankRows, rank: int) -> RankShare:
    """Return the share of one rank."""
    own = plan.ranks[rank]
    going, coming = np.asarray(plan.rows)[own.start : own.stop], np.asarray(plan.rows)[:, rank]
    nodes = [graph.nodes[part] for part in own]
    return RankShare(
        sum(nodes),
        sum(graph.entries[part] for part in own),
        len(own),
        max(nodes),
        int((coming > 0).sum()),
        int(going.sum()),
        int(coming.sum()),
        int(going.max(initial=0)),
        int(coming.max(initial=0)),
    )


def rounds_of(graph: GraphInParts, ranks: int) -> Rounds:
    """Return the rounds of an exchange: in step k each rank receives from the k-th rank after it.

    A round is one part from each sender.

    One remote part at a time is Mostafa's sequential aggregation (SAR), MLSys 2022.
    """
    plan = graph.plan(ranks)
    rows, runs = np.asarray(plan.rows), plan.ranks
    longest = [
        max(
            (int(rows[run[at], (source - step) % ranks]) for source, run in enumerate(runs)
             if at < len(run)),
            default=0,
        )
        for step in range(1, ranks)
        for at in range(max(map(len, runs)))
    ]  # fmt: skip
    return Rounds(sum(found > 0 for found in longest), sum(longest))


def composite(shares: Sequence[RankShare]) -> RankShare:
    """Return the maximum of each field over ranks: at each exchange all wait for the last rank."""
    fields = vars(shares[0])
    return RankShare(**{name: max(getattr(share, name) for share in shares) for name in fields})
