"""The costs of `umem.planner.saved` in closed form, for blocks contiguous in the node order.

With blocks of the form [a, b), forward runs in the order of the nodes and backward in reverse,
whatever the blocks are. Then the bytes in use at a node of backward do not depend on b, and those
in forward hardly, so that all steps together cost O(cuts * nodes); only recomputation costs a
little for each pair of cuts. In a graph of more than ``2 * WINDOW`` nodes, a block that is
recomputed has at most ``WINDOW`` nodes, unless the table has to be exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from umem.planner.graph import Graph
from umem.planner.step_table import INFINITE, Ints, Table, units
from umem.planner.usage_of_actions import gradient_bytes

WINDOW = 128
"""At most this many nodes in a block that is recomputed, in large graphs."""
NEVER = 1 << 40
"""A place beyond every node's, for bytes that no step of backward needs."""


def prefix_table(graph: Graph, sets: tuple[int, ...], *, exact: bool = False) -> Table:
    """Return the costs of every step between prefixes of the node order, sorted by size."""
    return _Prefixes(graph, [mask.bit_length() for mask in sets], exact).table(sets)


class _Prefixes:
    """A graph as arrays by node; rows of two-dimensional arrays are cuts, where blocks may end."""

    def __init__(self, graph: Graph, cuts: list[int], exact: bool) -> None:
        self.g = g = graph.numbered
        self.cuts = np.array(cuts, np.int64)
        self.count = len(g.names)
        self.place = np.arange(self.count)
        self.root = np.array(g.root, np.int64)
        self.size = np.array(g.size, np.int64)
        self.stash = np.array(g.stash, np.int64)
        beside = np.array(gradient_bytes(graph), np.int64).reshape(-1, 2)
        self.before, self.during = beside.T
        self.pinned = np.array(g.pinned, bool) & (self.root == self.place)
        self.costly = np.zeros(self.count, bool)
        np.logical_or.at(self.costly, self.root, np.array(g.costly, bool))
        self.units = units(g.cost, exact=exact)
        self.window = self.count if exact or self.count <= 2 * WINDOW else WINDOW
        self._find_uses()

    def _find_uses(self) -> None:
        """Find the last call of forward and of backward that reads each node's bytes.

        That of backward is the lowest number, since backward runs in reverse order.
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

    # -- the whole table -------------------------------------------------------------------

    def table(self, sets: tuple[int, ...]) -> Table:
        """Return the costs of every step between two cuts."""
        count = len(self.cuts)
        peak = np.full((3, count, count), INFINITE, np.int64)
        cached = np.zeros((3, count, count), np.int64)
        time = np.zeros((3, count, count), self.units.costs.dtype)
        backward = _highest(self._backward(), self.cuts)
        stored = _highest(self._forward(self.pinned | (self.need < NEVER)), self.cuts)
        stored = np.maximum(stored, backward)
        for target in range(1, count):
            end = int(self.cuts[target])
            cached[-1, target, :target] = self._stored_bytes(end, self.cuts[:target])
            peak[-1, target, :target] = stored[:target, target]
        for kind, always in enumerate((self.pinned, self.pinned | self.costly)):
            forward = self._forward(always, stashes=False)
            for target in range(1, count - 1 if kind == 0 or self.costly.any() else 0):
                again = _RerunRuns(self, int(self.cuts[target]), forward, always)
                some = slice(again.first, target)
                sources = self.cuts[some]
                below = backward[some, target]
                peak[kind, target, some] = np.maximum(again.peak(sources), below)
                cached[kind, target, some] = again.cached(sources)
                time[kind, target, some] = again.time(sources)
        rest = _after(self.units.costs, self.cuts)
        return Table(sets, peak, cached, time, rest, self.units.total)

    def _stored_bytes(self, end: int, sources: Ints) -> Ints:
        kept = (self.last >= end) | (self.need < NEVER) | self.pinned
        return _after(np.where(kept, self.size, 0)[:end] + self.stash[:end], sources)

    # -- forward and backward --------------------------------------------------------------

    def _forward(self, always: npt.NDArray[np.bool_], stashes: bool = True) -> Ints:
        """Return by [cut, place] the bytes while a node runs, without nodes before the cut.

        Args:
            always: by node, True if its value is kept wherever the block ends.
            stashes: count the function state of all nodes since the cut. False where the block's
                end decides which is kept: only the running node's is counted.
        """
        until = np.where(always, self.count, np.maximum(self.last, self.place))
        found = self._intervals(self.place, until)
        found += self._since_cuts(self.stash) if stashes else self.stash
        return found + np.array(self.g.workspace, np.int64) + self.g.forward_bytes

    def _backward(self) -> Ints:
        """Return by [cut, place] the bytes in a node's backward, without nodes before the cut."""
        start = np.minimum(self.need, self.count)
        found = self._intervals(start, np.full(self.count, self.count))
        found += self._since_cuts(self.stash)
        return found + self.during

    def _intervals(self, starts: Ints, ends: Ints) -> Ints:
        """Sum by [cut, place] the bytes of nodes from the cut on that are live at the place.

        A node is live from its start to its end; its start is never before the node.
        """
        found = np.zeros((len(self.cuts), self.count + 1), np.int64)
        line = np.zeros(self.count + 1, np.int64)
        for row in range(len(self.cuts) - 1, -1, -1):
            low = self.cuts[row]
            high = self.cuts[row + 1] if row + 1 < len(self.cuts) else self.count
            nodes = self.place[low:high]
            np.add.at(line, starts[nodes], self.size[nodes])
            np.add.at(line, np.minimum(ends[nodes] + 1, self.count), -self.size[nodes])
            found[row] = line
        total: Ints = np.cumsum(found, axis=1)[:, :-1]
        return total

    def _since_cuts(self, amounts: Ints) -> Ints:
        """Sum amounts by [cut, place] from the cut to the place, the place included."""
        total = np.concatenate(([0], np.cumsum(amounts)))
        found: Ints = np.maximum(total[1:][None, :] - total[self.cuts][:, None], 0)
        return found


class _RerunRuns:
    """The recomputed blocks that end at one cut, one for each source: the cut they begin at."""

    def __init__(
        self, whole: _Prefixes, end: int, forward: Ints, always: npt.NDArray[np.bool_]
    ) -> None:
        self.w, self.end, self.forward = whole, end, forward
        near = int(np.searchsorted(whole.cuts, end - whole.window))
        self.first = min(near, int(np.searchsorted(whole.cuts, end)) - 1)
        self.low = int(whole.cuts[self.first])
        self.here = slice(self.low, end)
        self.root = whole.root[self.here]
        self.size = whole.size[self.here]
        kept = (whole.last >= end) | always
        self.kept = kept[self.here]
        self.kept_node = kept[self.root]
        self.needed = whole.need[self.here] < end
        self._find_rerun()

    def _find_rerun(self) -> None:
        """Find the calls to recompute, and the last of them that reads each node's bytes."""
        g, low = self.w.g, self.low
        self.rerun = np.zeros(self.end - low, bool)
        self.last = np.full(self.end - low, -1, np.int64)
        target = (self.w.own_need[self.here] < self.end) | (self.w.stash[self.here] > 0)
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
        kept = np.where(self.kept, self.size, 0) + np.where(self.kept_node, self._stash, 0)
        return _after(kept, sources - self.low)

    def time(self, sources: Ints) -> npt.NDArray[Any]:
        """Return by source the overhead of the block, in units."""
        costs = self.w.units.costs[self.here]
        return _after(np.where(self.rerun, costs, 0), sources - self.low)

    def peak(self, sources: Ints) -> Ints:
        """Return by source the peak of the block's forward and recomputation."""
        starts = sources - self.low
        places = np.arange(self.end - self.low)
        forward: Ints = self.forward[self.first : self.first + len(sources), self.here].copy()
        if self._stash.any():
            forward += _between(np.where(self.kept_node, self._stash, 0), starts, before=True)
        begun = places >= starts[:, None]
        forward[~begun] = 0
        rebuild = self._rebuilding(starts, places)
        rebuild[~(begun & self.rerun)] = 0
        found: Ints = np.maximum(forward.max(axis=1), rebuild.max(axis=1))
        return found

    @property
    def _stash(self) -> Ints:
        return self.w.stash[self.here]

    def _rebuilding(self, starts: Ints, places: Ints) -> Ints:
        """Return by [source, place] the bytes while the node at the place is recomputed."""
        whole = self.w
        own = self.root == places + self.low
        rebuilt = self.rerun & own
        held = np.where(self.kept & self.needed, self.size, 0)
        held += np.where(self.kept_node, self._stash, 0)
        made = np.where(rebuilt & self.needed, self.size, 0)
        made += np.where(self.rerun, self._stash, 0)
        passing = own & ~self.needed & (self.kept | self.rerun) & (self.size > 0)
        found = _after(held, starts)[:, None] + _between(made, starts, before=False)
        found += self._passing(passing, starts)
        found += np.array(whole.g.workspace[self.low : self.end], np.int64)
        found += int(whole.before[self.end - 1])
        return found

    def _passing(self, passing: npt.NDArray[np.bool_], starts: Ints) -> Ints:
        """Return by [source, place] the bytes of values dropped once their last reader has run."""
        length = self.end - self.low
        nodes = np.flatnonzero(passing)
        changes = np.zeros((len(starts), length + 1), np.int64)
        row = np.searchsorted(starts, nodes, side="right") - 1
        kept = self.kept[nodes]
        begin = np.where(kept, 0, nodes)
        end = np.where(
            kept, self.last[nodes] - self.low, np.maximum(self.last[nodes] - self.low, nodes)
        )
        np.add.at(changes, (row, begin), self.size[nodes])
        np.add.at(changes, (row, np.maximum(end + 1, 0)), -self.size[nodes])
        by_cut = np.cumsum(changes[::-1], axis=0)[::-1]
        return np.cumsum(by_cut, axis=1)[:, :-1]


def _after(amounts: npt.NDArray[Any], starts: Ints) -> npt.NDArray[Any]:
    """Sum amounts from each start to the end."""
    total = np.concatenate((np.zeros(1, amounts.dtype), np.cumsum(amounts)))
    found: npt.NDArray[Any] = total[-1] - total[starts]
    return found


def _between(amounts: Ints, starts: Ints, *, before: bool) -> Ints:
    """Sum amounts by [start, place] from start to place, without the place if ``before``."""
    total = np.concatenate(([0], np.cumsum(amounts)))
    upto = total[:-1] if before else total[1:]
    found: Ints = upto[None, :] - total[starts][:, None]
    return found


def _highest(by_place: Ints, cuts: Ints) -> Ints:
    """Return by [source, target] the largest value from one cut to another; 0 for no node."""
    place = np.arange(by_place.shape[1])
    begun = np.where(place >= cuts[:, None], by_place, 0)
    highest = np.maximum.accumulate(begun, axis=1)
    found: Ints = np.concatenate((np.zeros((len(cuts), 1), np.int64), highest), axis=1)[:, cuts]
    return found
