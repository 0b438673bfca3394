"""The facts of a graph and the states of a beam search, as masks of up to `MOST` nodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.graph import Graph
from umem.planner.masks import mask_of, numbers
from umem.planner.reruns import Reruns
from umem.planner.usage import gradient_bytes

Masks = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

MOST = 63
"""A mask is one machine word."""
NEVER = 1e9
"""The cost of what must not run twice; all other costs are shares of a forward pass."""
PARTIAL = 1e-9
"""Costs that are further apart differ."""
_CHUNK = 16
DOMINATED = 2000
"""The most rows of which each is compared with each other: that takes their square."""
ONE = np.uint64(1)


def word(mask: int) -> np.uint64:
    """A mask as a machine word."""
    return np.uint64(mask)


class Facts:
    """A graph on a tape: by node, masks of what it reads, needs and lies in; costs; gradients.

    Args:
        graph: the graph.
        alike: whether all calls count the same, whatever they cost.

    Attributes:
        below: by node, itself and all before it.
        group: by node, all that lie in the same bytes.
        wanted: by step of backward, the values that it and all later ones need.
        useful: by step, those and all that they may have to be recomputed from.
        beside: by step, the bytes of gradients before it and while it runs.
        last_user: by node, the last call of forward that reads its bytes; -1 where none does.
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
        """By step of backward, the values that it and all later ones may read or recompute from."""
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
        """Sums of costs, by each pattern of some nodes after one another."""
        tables = []
        for start in range(0, self.count, _CHUNK):
            table = np.zeros(1)
            for cost in self.cost[start : start + _CHUNK]:
                table = np.concatenate([table, table + cost])
            tables.append(table)
        return tables

    def cost_of(self, masks: Masks) -> Floats:
        """The sum of costs of the nodes in each mask."""
        total = np.zeros(masks.shape)
        for place, table in enumerate(self._costs):
            part = masks >> np.uint64(_CHUNK * place) & np.uint64(len(table) - 1)
            total += table[part.astype(np.int64)]
        return total

    def bytes_of(self, values: Masks, stashes: Masks) -> npt.NDArray[np.int64]:
        """The bytes of some values and stashes, for each pair of masks."""
        found = np.zeros(values.shape, np.int64)
        for v in self.roots:
            found += ((values & word(self.group[v])) != 0) * self.g.size[v]
        for v in numbers(self.stashed):
            found += has(stashes, v) * self.g.stash[v]
        return found

    def closure(self, wanted: Masks, values: Masks, step: int) -> Masks:
        """Return the missing values of those wanted and of all they are recomputed from."""
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
        """Bound it from above: no recomputed value is held for a later step."""
        chains: list[Masks] = []  # what has to run for each node, itself included
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
    """A plan that fits: what it holds before each step, what it recomputes, and the cost so far.

    ``values[step + 1]`` has the values that must be there before the step, for it and later ones.
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
    """States of a step, at the same moment of it.

    Attributes:
        values, stashes: masks of those in memory.
        pending: the calls still to be recomputed before the next step of backward.
        ran: those that were recomputed before it already.
        spent: those that must not be recomputed once more, where each may be once.
        cost: of all recomputations so far.
        used: the bytes of values and stashes in memory.
        origin: the row of the step before that it comes from.
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
        """The rows of an index."""
        return Rows(*(column[which] for column in self))

    def distinct(self) -> Rows:
        """Of the rows in the same state, the one of least cost."""
        order = np.lexsort((self.cost, self.spent, self.pending, self.stashes, self.values))
        rows = self.some(order)
        same = np.ones(len(order), bool)
        same[:1] = False
        for column in (rows.values, rows.stashes, rows.pending, rows.spent):
            same[1:] &= column[1:] == column[:-1]
        return rows.some(~same)

    def undominated(self) -> Rows:
        """Without the rows that hold no more than another one, and cost no less."""
        count = len(self.cost)
        if not 1 < count <= DOMINATED:
            return self
        rows = self.some(np.lexsort((-self.used, self.cost)))
        within = (rows.values[:, None] & ~rows.values) == 0
        within &= (rows.stashes[:, None] & ~rows.stashes) == 0
        within &= (rows.spent & ~rows.spent[:, None]) == 0
        return rows.some(~np.tril(within, -1).any(axis=1))


def one_row() -> Rows:
    """The state before forward."""
    none, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    return Rows(none, none, none, none, none, np.zeros(1), zero, zero)


def joined(parts: list[Rows]) -> Rows:
    """All rows of some parts."""
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
