"""The cost model of Kusumoto et al., NeurIPS 2019, as published.

Their equations 1 and 2, for a chain L_1 < ... < L_k = V of lower sets with the blocks
V_i = L_i - L_(i-1), the boundaries dL_i, and U_i the union of dL_j, j <= i::

    overhead  sum_i T(V_i - dL_i)
    peak      max_i M(U_(i-1)) + 2 M(V_i) + M(succ(L_i) - L_i) + M(pred(succ(L_i)) - L_i)

Differences: a view has no bytes, a base is kept with its views, and a node that must not be
recomputed is kept like a boundary. Function state and workspace do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from umem.planner.graph import Graph
from umem.planner.step_table import INFINITE, Segment, Table, bits, nested, numbers, units

Matrix = npt.NDArray[Any]


class KusumotoModel:
    """The formula's costs of steps between lower sets of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.g = g = graph.numbered
        count = len(g.names)
        self._views = [v for v in range(count) if g.root[v] != v]
        self._root = np.array(g.root, np.int64)
        self._members: list[list[int]] = [[] for _ in range(count)]
        for v, root in enumerate(g.root):
            self._members[root].append(v)
        pairs = [(v, w) for v, users in enumerate(g.succs) for w in users]
        edges = np.array(pairs, np.int64).reshape(-1, 2)
        self._by_source = edges
        self._by_target = edges[np.argsort(edges[:, 1], kind="stable")]

    # -- one block -------------------------------------------------------------------------

    def block(self, before: int, after: int, kind: int = 0) -> Segment:
        """Return the nodes of a block, those that it keeps and those that it recomputes."""
        nodes = numbers(after & ~before)
        inside = set(numbers(after)) if self._views else None
        beyond = ~after
        roots = {
            root
            for root in {self.g.root[v] for v in nodes}
            for v in self._members[root]
            if (inside is None or v in inside)
            and (self.g.pinned[v] or any(beyond >> w & 1 for w in self.g.succs[v]))
        }
        kept = tuple(v for v in nodes if self.g.root[v] in roots)
        rerun = tuple(v for v in nodes if self.g.root[v] not in roots)
        return Segment(tuple(nodes), kept, rerun, kept)

    # -- all steps -------------------------------------------------------------------------

    def table(self, sets: tuple[int, ...], *, exact: bool = False) -> Table:
        """Return the peak, cached bytes and recomputation time of each step between lower sets.

        A step whose first set is not a subset of the second has an infinite peak.

        Args:
            sets: lower sets as bit masks, sorted by size.
            exact: keep the operations' times unrounded, not as whole units.
        """
        g = self.g
        inside = bits(sets, len(g.names))
        kept = self._kept(inside)
        size, grad = np.array(g.size, np.float64), np.array(g.grad, np.float64)
        cost = units(g.cost, exact=exact)
        outside = (~inside).astype(np.float64)
        cached = (kept * size) @ outside.T
        time = (inside & ~kept[:, self._root]) * cost.astype(np.float64) @ outside.T
        own = inside @ (size + grad)
        peak = own[:, None] - own[None, :] + self._fixed(inside, size, grad)[:, None]
        possible = nested(inside)
        peak[~possible] = INFINITE
        cached[~possible] = time[~possible] = 0
        return Table(
            sets,
            peak.astype(np.int64)[None],
            cached.astype(np.int64)[None],
            time.astype(cost.dtype)[None],
            float(cost.sum()),
        )

    def _kept(self, inside: Matrix) -> Matrix:
        """Mark [set, node] whose bytes are kept after the set: its boundary and pinned nodes."""
        read_later = _any(~inside, self._by_source[:, 1], self._by_source[:, 0])
        kept: Matrix = inside & (read_later | np.array(self.g.pinned, bool))
        for v in self._views:
            kept[:, self.g.root[v]] |= kept[:, v]
            kept[:, v] = False
        return kept

    def _fixed(self, inside: Matrix, size: Matrix, grad: Matrix) -> Matrix:
        """Return M(succ(L) - L) + M(pred(succ(L)) - L) of each set L, in bytes."""
        users = _any(inside, self._by_target[:, 0], self._by_target[:, 1]) & ~inside
        inputs = _any(users, self._by_source[:, 1], self._by_source[:, 0])
        for v in self._views:
            inputs[:, self.g.root[v]] |= inputs[:, v]
        fixed: Matrix = users @ grad + (inputs & ~inside) @ size
        return fixed


def _any(rows: Matrix, ends: Matrix, nodes: Matrix) -> Matrix:
    """Tell for each row and node if the row holds the other end of any of the node's edges.

    Edges are sorted by ``nodes``.
    """
    found: Matrix = np.zeros_like(rows)
    if len(nodes):
        firsts = np.flatnonzero(np.diff(nodes, prepend=-1))
        found[:, nodes[firsts]] = np.logical_or.reduceat(rows[:, ends], firsts, axis=1)
    return found
