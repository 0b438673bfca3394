"""The cost model of a tape: saved tensors, each freed as early as can be.

A block is *stored* (its saved tensors are kept, nothing is recomputed) or *recomputed* (its
boundary is kept; before its backward, the saved tensors that were not kept are recomputed) or
*cheaply recomputed* (outputs of calls that cost more than the average are kept, too). The last
block is stored. Blocks add up: while one runs forward or backward, memory holds the kept values of
all blocks before it, and of no other block. In addition it holds, in turn,

- forward: the block's values until their last use, and longer where they are kept;
- recomputation: the values that backward needs, other recomputed values until their last use,
  the gradients of the boundary;
- backward, in reverse order: the values still needed, and the gradients from the first step that
  adds to them to the step that reads them;

each with function state, with the gradients of parameters that backward has made so far (in
forward: the previous step's), and with the workspace of the call that runs. The largest of
these is the block's peak, so freeing early is part of the optimisation. After Kusumoto et al.
(NeurIPS 2019), whose formula counts all of a block and every value, saved or not.

Forward runs in the order of the nodes, because the program decides it, and backward in reverse, so
each lower set is a prefix of that order. The bytes in use at a node of backward do not depend on
the end of its block, and the bytes in forward hardly do, so all steps together cost
O(cuts * nodes); only recomputation costs a little for each pair of cuts. In a graph of more than
``2 * WINDOW`` nodes, a recomputed block has at most ``WINDOW`` nodes, unless the table must be
exact.

Models: retained values, function state, views without bytes, workspace, steps of backward that add
to their inputs' gradients. Does not model: a gradient that is passed on without a copy, a kept
value that could be freed before its own block's backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from umem.errors import GraphError
from umem.planner.graph import Graph
from umem.planner.step_table import INFINITE, Ints, Segment, Table, units
from umem.planner.usage_of_actions import gradient_bytes

RECOMPUTED, CHEAPLY_RECOMPUTED, STORED = 0, 1, 2
"""The kinds of a block."""
WINDOW = 256
"""In large graphs, a recomputed block has at most this many nodes.

With half of them, plans of long chains have up to 7 points of a forward pass more overhead; twice
as many win 0.3 at the most (bench/planner_constants.py).
"""
NEVER = 1 << 40
"""A place beyond every node's, for bytes that no step of backward needs."""
Flags = npt.NDArray[np.bool_]


class SavedModel:
    """Costs of steps between prefixes of the node order, by the rules of a tape."""

    def __init__(self, graph: Graph) -> None:
        self.g = g = graph.numbered
        self.count = len(g.names)
        self.place = np.arange(self.count)
        self.root = np.array(g.root, np.int64)
        self.size = np.array(g.size, np.int64)
        self.stash = np.array(g.stash, np.int64)
        beside = np.array(gradient_bytes(graph), np.int64).reshape(-1, 2)
        self.before, self.during = beside.T
        pinned = np.array(g.pinned, bool) & (self.root == self.place)
        costly = np.zeros(self.count, bool)
        np.logical_or.at(costly, self.root, np.array(g.costly, bool))
        self._find_uses()
        self.always = pinned, pinned | costly, pinned | (self.need < NEVER)

    def _find_uses(self) -> None:
        """Find the last call of forward and of backward that reads each node's bytes.

        In backward it is the lowest number, because backward runs in reverse order.
        """
        g = self.g
        self.last = np.full(self.count, -1, np.int64)
        self.need = np.full(self.count, NEVER, np.int64)
        self.own_need = np.full(self.count, NEVER, np.int64)
        for v in range(self.count - 1, -1, -1):
            if g.succs[v]:
                self.last[g.root[v]] = max(self.last[g.root[v]], g.succs[v][-1])
            for x in g.needs[v]:
                self.own_need[x] = v
                self.need[g.root[x]] = min(self.need[g.root[x]], v)

    # -- one block -------------------------------------------------------------------------

    def block(self, before: int, after: int, kind: int) -> Segment:
        """Return the nodes of a block, those that it keeps and those that it recomputes."""
        ways = _Block(self, before.bit_length(), after.bit_length(), kind)
        nodes = tuple(range(ways.low, ways.end))
        kept = tuple((np.flatnonzero(ways.kept_node) + ways.low).tolist())
        rerun = tuple((np.flatnonzero(ways.rerun) + ways.low).tolist())
        return Segment(nodes, kept, rerun, nodes if kind == STORED else kept)

    # -- all steps -------------------------------------------------------------------------

    def table(self, sets: tuple[int, ...], *, exact: bool = False) -> Table:
        """Return the costs of every step between lower sets, which are sorted by size.

        Args:
            sets: prefixes of the node order, as bit masks.
            exact: keep costs as they are, and let blocks of any length be recomputed.

        Raises:
            GraphError: a lower set is not a prefix.
        """
        if any(mask & (mask + 1) for mask in sets):
            raise GraphError(
                "under the model 'saved' a tape runs in the order of the nodes: every lower set "
                'must be a prefix of it; pass model="kusumoto" for others'
            )
        cuts, cost = np.array([mask.bit_length() for mask in sets]), units(self.g.cost, exact=exact)
        window = self.count if exact or self.count <= 2 * WINDOW else WINDOW
        count = len(cuts)
        peak = np.full((3, count, count), INFINITE, np.int64)
        cached = np.zeros((3, count, count), np.int64)
        time = np.zeros((3, count, count), cost.dtype)
        backward = _highest(self._backward(cuts), cuts)
        stored = np.maximum(_highest(self._forward(cuts, STORED), cuts), backward)
        for target in range(1, count):
            cached[STORED, target, :target] = _Block(self, 0, int(cuts[target]), STORED).cached(
                cuts[:target]
            )
            peak[STORED, target, :target] = stored[:target, target]
        is_cheaper = (self.always[CHEAPLY_RECOMPUTED] != self.always[RECOMPUTED]).any()
        for kind in (RECOMPUTED, CHEAPLY_RECOMPUTED) if is_cheaper else (RECOMPUTED,):
            forward = self._forward(cuts, kind)
            for target in range(1, count - 1):
                end = int(cuts[target])
                first = min(int(np.searchsorted(cuts, end - window)), target - 1)
                some, sources = slice(first, target), cuts[first:target]
                block = _Block(self, int(cuts[first]), end, kind)
                again = block.peak(sources, forward[some, block.here])
                peak[kind, target, some] = np.maximum(again, backward[some, target])
                cached[kind, target, some] = block.cached(sources)
                time[kind, target, some] = block.time(sources, cost)
        return Table(sets, peak, cached, time, float(cost.sum()))

    # -- forward and backward --------------------------------------------------------------

    def _forward(self, cuts: Ints, kind: int) -> Ints:
        """Return by [cut, place] the bytes while a node runs, without nodes before the cut.

        If the block's end decides which function state is kept, only the running node's counts.
        """
        until = np.where(self.always[kind], self.count, np.maximum(self.last, self.place))
        found = self._intervals(cuts, self.place, until)
        found += _between(self.stash, cuts) if kind == STORED else self.stash
        return found + np.array(self.g.workspace, np.int64) + self.g.forward_bytes

    def _backward(self, cuts: Ints) -> Ints:
        """Return by [cut, place] the bytes in a node's backward, without nodes before the cut."""
        start = np.minimum(self.need, self.count)
        found = self._intervals(cuts, start, np.full(self.count, self.count))
        return found + _between(self.stash, cuts) + self.during

    def _intervals(self, cuts: Ints, starts: Ints, ends: Ints) -> Ints:
        """Sum by [cut, place] the bytes of nodes from the cut on that are live at the place.

        A node is live from its start to its end; its start is never before the node.
        """
        found = np.zeros((len(cuts), self.count + 1), np.int64)
        line = np.zeros(self.count + 1, np.int64)
        for row in range(len(cuts) - 1, -1, -1):
            low = cuts[row]
            high = cuts[row + 1] if row + 1 < len(cuts) else self.count
            nodes = self.place[low:high]
            np.add.at(line, starts[nodes], self.size[nodes])
            np.add.at(line, np.minimum(ends[nodes] + 1, self.count), -self.size[nodes])
            found[row] = line
        total: Ints = np.cumsum(found, axis=1)[:, :-1]
        return total


class _Block:
    """The blocks of a kind that end at one cut, one for each source: the cut they begin at.

    Args:
        model: the graph as arrays by node.
        low, end: the first node of the longest block, and the end of all.
        kind: the blocks' kind.
    """

    def __init__(self, model: SavedModel, low: int, end: int, kind: int) -> None:
        self.model, self.low, self.end = model, low, end
        self.here = slice(low, end)
        kept = (model.last >= end) | model.always[kind]
        self.kept = kept[self.here]
        self.kept_node = kept[model.root[self.here]]
        self.size, self.stash = model.size[self.here], model.stash[self.here]
        self.stashed = np.where(self.kept_node | (kind == STORED), self.stash, 0)
        self.rerun = np.zeros(end - low, bool)
        if kind != STORED:
            self._find_rerun()

    def _find_rerun(self) -> None:
        """Find the calls to recompute, and the last of them that reads each node's bytes."""
        g, low = self.model.g, self.low
        self.last = np.full(self.end - low, -1, np.int64)
        target = (self.model.own_need[self.here] < self.end) | (self.stash > 0)
        wanted = (target & ~self.kept_node).tolist()
        kept = self.kept_node.tolist()
        for v in range(self.end - 1, low - 1, -1):
            if wanted[v - low]:
                self.rerun[v - low] = True
                for x in g.preds[v]:
                    if x >= low:
                        wanted[x - low] = not kept[x - low]
                    if g.root[x] >= low:
                        at = g.root[x] - low
                        self.last[at] = max(self.last[at], v)

    def cached(self, sources: Ints) -> Ints:
        """Return by source the bytes that the block keeps."""
        return _after(np.where(self.kept, self.size, 0) + self.stashed, sources - self.low)

    def time(self, sources: Ints, cost: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return by source the overhead of the block, in units of cost."""
        return _after(np.where(self.rerun, cost[self.here], 0), sources - self.low)

    def peak(self, sources: Ints, forward: Ints) -> Ints:
        """Return by source the peak of the block's forward and recomputation.

        ``forward``: by [source, place], the bytes in forward without kept function state.
        """
        starts = sources - self.low
        begun = np.arange(self.end - self.low) >= starts[:, None]
        forward = forward + _between(self.stashed, starts) - self.stashed
        rebuild = np.where(begun & self.rerun, self._rebuilding(starts), 0)
        found: Ints = np.maximum(np.where(begun, forward, 0), rebuild).max(axis=1)
        return found

    def _rebuilding(self, starts: Ints) -> Ints:
        """Return by [source, place] the bytes while the node at the place is recomputed."""
        model = self.model
        own = model.root[self.here] == model.place[self.here]
        needed = model.need[self.here] < self.end
        held = np.where(self.kept & needed, self.size, 0) + self.stashed
        made = np.where(self.rerun & own & needed, self.size, 0)
        made += np.where(self.rerun, self.stash, 0)
        passing = own & ~needed & (self.kept | self.rerun) & (self.size > 0)
        found = _after(held, starts)[:, None] + _between(made, starts)
        found += self._passing(passing, starts)
        found += np.array(model.g.workspace[self.low : self.end], np.int64)
        found += int(model.before[self.end - 1])
        return found

    def _passing(self, passing: Flags, starts: Ints) -> Ints:
        """Return by [source, place] the bytes of values dropped once their last reader has run."""
        nodes = np.flatnonzero(passing)
        changes = np.zeros((len(starts), self.end - self.low + 1), np.int64)
        row = np.searchsorted(starts, nodes, side="right") - 1
        begin = np.where(self.kept[nodes], 0, nodes)
        end = np.maximum(self.last[nodes] - self.low, begin - self.kept[nodes])
        np.add.at(changes, (row, begin), self.size[nodes])
        np.add.at(changes, (row, end + 1), -self.size[nodes])
        by_cut = np.cumsum(changes[::-1], axis=0)[::-1]
        return np.cumsum(by_cut, axis=1)[:, :-1]


def _after(amounts: npt.NDArray[Any], starts: Ints) -> npt.NDArray[Any]:
    """Sum amounts from each start to the end."""
    total = np.concatenate((np.zeros(1, amounts.dtype), np.cumsum(amounts)))
    found: npt.NDArray[Any] = total[-1] - total[starts]
    return found


def _between(amounts: Ints, starts: Ints) -> Ints:
    """Sum amounts by [start, place] from start to place; places before a start have less than 0."""
    total = np.concatenate(([0], np.cumsum(amounts)))
    found: Ints = total[1:][None, :] - total[starts][:, None]
    return found


def _highest(by_place: Ints, cuts: Ints) -> Ints:
    """Return by [source, target] the largest value from one cut to another; 0 for no node."""
    place = np.arange(by_place.shape[1])
    begun = np.where(place >= cuts[:, None], by_place, 0)
    highest = np.maximum.accumulate(begun, axis=1)
    found: Ints = np.concatenate((np.zeros((len(cuts), 1), np.int64), highest), axis=1)[:, cuts]
    return found
