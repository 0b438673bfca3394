"""The shares of ranks in a graph that is cut into parts, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

INDEX_BYTES = FLOAT_BYTES = 4
NODE_BYTES = 2 * INDEX_BYTES + 3
"""Of a node, its number, its label and three masks."""


class RankRows(Protocol):
    """The numbers of rows that ranks send each other, such as `umem.graphs.halo.HaloPlan`."""

    @property
    def rows(self) -> Any:
        """int (parts, ranks): the rows of a part that a rank needs; 0 where the part is its own."""

    @property
    def ranks(self) -> Sequence[range]:
        """By rank, its parts."""


class GraphInParts(Protocol):
    """A graph in parts, such as `umem.graphs.PlannedCut`."""

    @property
    def nodes(self) -> Sequence[int]:
        """By part."""

    @property
    def entries(self) -> Sequence[int]:
        """By part, those of its rows of the adjacency, loops included."""

    def plan(self, ranks: int) -> RankRows:
        """Return the rows that a number of ranks send each other."""


@dataclass(frozen=True)
class RankShare:
    """The part of a graph that one rank has, and the rows that it exchanges.

    Attributes:
        nodes: rows; ``entries`` those of the adjacency in them.
        part_count: its parts; ``part_nodes`` the rows of the largest.
        block_count: parts of others that it needs rows of.
        sent_rows: rows that it sends, together; ``received_rows`` that it gets.
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
            row_bytes: the widest row that is exchanged.
        """
        matrices = self.entries * (INDEX_BYTES + FLOAT_BYTES)
        matrices += (2 + self.block_count) * (self.nodes + 1) * INDEX_BYTES
        buffers = (self.sent_message + self.received_message) * row_bytes
        return matrices + self.sent_rows * INDEX_BYTES + buffers + self.nodes * NODE_BYTES


@dataclass(frozen=True)
class Rounds:
    """The messages of an exchange, one round after the other; a round ends with its longest.

    Attributes:
        count: rounds in which anybody sends.
        rows: the rows of the longest message of each, together.
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
    """The rounds of an exchange: in step k each rank gets the k-th next one's parts, one a round.

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
    """A rank with the most of everything: at each exchange all wait for the one that is last."""
    fields = vars(shares[0])
    return RankShare(**{name: max(getattr(share, name) for share in shares) for name in fields})
