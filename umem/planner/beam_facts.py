"""The facts of a graph and the states of a beam search, as masks of up to `MOST` nodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.graph import Graph
from umem.planner.plans import Reruns
from umem.planner.step_table import mask_of, numbers
from umem.planner.usage_of_actions import gradient_bytes

Masks = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

MOST = 63
"""At most this many nodes, because a mask is one machine word."""
NEVER = 1e9
"""The cost of a call that must not run twice; other costs are shares of a forward pass."""
PARTIAL = 1e-9
"""Costs that differ by at most this much are equal."""
_CHUNK = 16
"""The number of nodes whose subsets share a table of summed costs."""
DOMINATED = 2000
"""At most this many rows are compared in pairs, because the work is their square."""
ONE = np.uint64(1)


def word(mask: int) -> np.uint64:
    """Convert a mask to a machine word."""
    return np.uint64(mask)


class Facts:
    """The nodes of a graph as masks: inputs, needs of backward, shared bytes; costs; gradients.

    Args:
        graph: the graph.
        alike: count the same cost for every call.

    Attributes:
        cost: by node, as a share of a forward pass; `NEVER` for one that must not run twice.
        below: by node, the mask of itself and all before it.
        preds: by node, the mask of its inputs.
        needs: by node, the mask of the values that its step of backward reads.
        stashed: the mask of nodes with function state.
        group: by node, the mask of all whose values share its bytes.
        wanted: by step of backward, the mask of the values that it and all later ones need.
        useful: by step, the same with all values from which these may be recomputed.
        beside: by step, the bytes of gradients before it and while it runs.
        last_user: by node, the last call of forward that reads its output; -1 if none does.
    """

    def __init__(self, graph: Graph, *, alike: bool = False) -> None:
        self.g = g = graph.numbered
        self.count = count = len(g.names)
        costs = [1.0] * count if alike else g.cost
        total = sum(costs) or 1
        self.cost = [
            cost / total if again else NEVER
            for cost, again in zip(costs, g.recomputable, strict=True)
        ]
        self.byte_share = 1 / (sum(g.size) + sum(g.stash) or 1)
        self.all = (1 << count) - 1
        self.below = [(2 << v) - 1 for v in range(count)]
        self.preds = [mask_of(preds) for preds in g.preds]
        self.needs = [mask_of(needs) for needs in g.needs]
        self.stashed = mask_of(v for v in range(count) if g.stash[v])
        of_root = [0] * count
        for v, root in enumerate(g.root):
            of_root[root] |= 1 << v
        self.group = [of_root[root] for root in g.root]
        self.roots = [v for v in range(count) if g.root[v] == v and g.size[v]]
        self.beside = gradient_bytes(graph)
        self.last_user = [max(g.succs[v], default=-1) for v in range(count)]

    @cached_property
    def wanted(self) -> list[int]:
        found, wanted = [], 0
        for needs in self.needs:
            wanted |= needs
            found.append(wanted)
        return found

    @cached_property
    def useful(self) -> list[int]:
        """Return by step the values that it and later steps may read or recompute from."""
        found = []
        for step, wanted in enumerate(self.wanted):
            useful = wanted
            for v in range(step, -1, -1):
                if (useful | self.stashed) >> v & 1:
                    useful |= self.preds[v]
            for v in numbers(useful):
                useful |= self.group[v]
            found.append(useful & self.below[step])
        return found

    # -- rows of masks ---------------------------------------------------------------------

    @cached_property
    def _costs(self) -> list[Floats]:
        """Return for each `_CHUNK` nodes the summed cost of every subset, indexed by its bits."""
        tables = []
        for start in range(0, self.count, _CHUNK):
            table = np.zeros(1)
            for cost in self.cost[start : start + _CHUNK]:
                table = np.concatenate([table, table + cost])
            tables.append(table)
        return tables

    def cost_of(self, masks: Masks) -> Floats:
        """Return the summed cost of the nodes in each mask."""
        total = np.zeros(masks.shape)
        for place, table in enumerate(self._costs):
            part = masks >> np.uint64(_CHUNK * place) & np.uint64(len(table) - 1)
            total += table[part.astype(np.int64)]
        return total

    def bytes_of(self, values: Masks, stashes: Masks) -> npt.NDArray[np.int64]:
        """Return the bytes of values and function state, for each pair of masks."""
        found = np.zeros(values.shape, np.int64)
        for v in self.roots:
            found += ((values & word(self.group[v])) != 0) * self.g.size[v]
        for v in numbers(self.stashed):
            found += has(stashes, v) * self.g.stash[v]
        return found

    def closure(self, wanted: Masks, values: Masks, step: int) -> Masks:
        """Return the calls to recompute for wanted values: those missing, and missing inputs."""
        missing = np.zeros_like(values)
        for v in range(step, -1, -1):
            lacks = (wanted & ~values) >> np.uint64(v) & ONE
            if lacks.any():
                missing |= lacks << np.uint64(v)
                wanted = wanted | lacks * word(self.preds[v])
        return missing

    def least_left(self, values: Masks, stashes: Masks, step: int) -> Floats:
        """Bound the cost of recomputation from a step on from below: each missing call once."""
        wanted, total = np.full(values.shape, word(self.wanted[step])), np.zeros(values.shape)
        for v in range(step, -1, -1):
            lacks: Any = wanted & ~values
            if self.stashed >> v & 1:
                lacks = lacks | ~stashes
            lacks = lacks >> np.uint64(v) & ONE
            if lacks.any():
                total += lacks * self.cost[v]
                wanted |= lacks * word(self.preds[v])
        return total

    def most_left(self, values: Masks, stashes: Masks, step: int) -> Floats:
        """Bound the same cost from above: no recomputed value is kept for a later step."""
        chains: list[Masks] = []  # the calls to run for each node's value, itself included
        for v in range(step + 1):
            chain = np.full(values.shape, word(1 << v))
            for x in self.g.preds[v]:
                chain |= chains[x] * (~values >> np.uint64(x) & ONE)
            chains.append(chain)
        total = np.zeros(values.shape)
        for v in range(step + 1):
            runs = np.zeros_like(values)
            for x in self.g.needs[v]:
                runs |= chains[x] * (~values >> np.uint64(x) & ONE)
            if self.stashed >> v & 1:
                runs |= chains[v] * (~stashes >> np.uint64(v) & ONE)
            total += self.cost_of(runs)
        return total


def has(masks: Masks, v: int) -> npt.NDArray[np.bool_]:
    """Tell which masks hold a node."""
    found: npt.NDArray[np.bool_] = (masks >> np.uint64(v) & ONE) != 0
    return found


class Known:
    """A plan that fits the budget, by step of backward.

    Attributes:
        reruns: the calls that are recomputed before each step, in order.
        runs: the same as masks.
        values, stashes: masks of the values and function state that must be in memory before a
            step's recomputations, for it and later steps; a step's masks are under ``step + 1``.
        cost: of all recomputations.
        so_far: by step, the cost of the recomputations up to its own; 0 before the first.
    """

    def __init__(self, facts: Facts, reruns: Reruns) -> None:
        self.reruns = reruns
        self.runs = [mask_of(rerun) for rerun in reruns]
        values = stashes = 0
        self.values, self.stashes = [0], [0]
        for step, rerun in enumerate(reruns):
            values |= facts.needs[step]
            stashes |= facts.stashed & 1 << step
            for v in reversed(rerun):
                values = values & ~(1 << v) | facts.preds[v]
                stashes &= ~(1 << v)
            self.values.append(values)
            self.stashes.append(stashes)
        costs = [sum(facts.cost[v] for v in rerun) for rerun in reruns]
        self.cost = sum(costs)
        self.so_far = [sum(costs[step:]) for step in range(len(costs) + 1)]


class Rows(NamedTuple):
    """States of the search at the same moment of the step, one a row.

    Attributes:
        values, stashes: masks of the values and function state in memory.
        pending: the calls still to be recomputed before the next step of backward.
        ran: the calls that were recomputed for that step already.
        spent: the calls that were recomputed at any step, where each may be once at most.
        cost: of all recomputations so far.
        used: the bytes of values and function state in memory.
        origin: the row, after the step before, that this state comes from.
    """

    values: Masks
    stashes: Masks
    pending: Masks
    ran: Masks
    spent: Masks
    cost: Floats
    used: npt.NDArray[np.int64]
    origin: npt.NDArray[np.int64]

    def some(self, which: Any) -> Rows:
        """Select rows by numbers, a slice or booleans."""
        return Rows(*(column[which] for column in self))

    def distinct(self) -> Rows:
        """Return, of all rows in the same state, the cheapest one."""
        order = np.lexsort((self.cost, self.spent, self.pending, self.stashes, self.values))
        rows = self.some(order)
        same = np.ones(len(order), bool)
        same[:1] = False
        for column in (rows.values, rows.stashes, rows.pending, rows.spent):
            same[1:] &= column[1:] == column[:-1]
        return rows.some(~same)

    def undominated(self) -> Rows:
        """Drop the rows that another row equals or beats, and return the rest.

        A row is beaten if another has all its values and function state in memory, cost no more,
        and has recomputed no call that it has not. With more than `DOMINATED` rows all stay.
        """
        count = len(self.cost)
        if not 1 < count <= DOMINATED:
            return self
        rows = self.some(np.lexsort((-self.used, self.cost)))
        within = (rows.values[:, None] & ~rows.values) == 0
        within &= (rows.stashes[:, None] & ~rows.stashes) == 0
        within &= (rows.spent & ~rows.spent[:, None]) == 0
        return rows.some(~np.tril(within, -1).any(axis=1))


def one_row() -> Rows:
    """Return the state before forward: empty memory, no cost."""
    none, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    return Rows(none, none, none, none, none, np.zeros(1), zero, zero)


def joined(parts: list[Rows]) -> Rows:
    """Concatenate rows."""
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
