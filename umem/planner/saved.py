"""The cost model of a tape: saved tensors, each freed as early as can be.

A block is *stored* (its saved tensors are kept, nothing is recomputed) or *recomputed* (its
boundary is kept; before its backward, the saved tensors that were not kept are recomputed) or
*cheaply recomputed* (outputs of calls that cost more than the average are kept, too). The last
block is stored. Blocks add up: while one runs forward or backward, all that was kept of the blocks
before it is in memory, and nothing else. On top of that come, in turn,

- forward: the block's values until their last use, and longer where they are kept;
- recomputation: the values that backward needs, other recomputed values until their last use,
  the gradients of the boundary;
- backward, in reverse order: the values still needed, and the gradients from the first step that
  adds to them to the step that reads them;

each with function state, with the gradients of parameters that backward has made so far (in
forward: those of the step before), and with the workspace of the call that runs. The largest of
these is the block's peak, so that freeing early is part of the optimisation: after Kusumoto et al.
(NeurIPS 2019), whose formula counts all of a block and every value, saved or not.

Models: retained values, function state, views at no bytes, workspace, steps of backward that add to
their inputs' gradients. Does not model: a gradient that is passed on without a copy, a kept value
that could be freed before its own block's backward.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from umem.planner.graph import Graph
from umem.planner.plans import Model
from umem.planner.prefixes import prefix_table
from umem.planner.step_table import INFINITE, Segment, Table, bits, mask_of, numbers, units

RECOMPUTED, CHEAPLY_RECOMPUTED, STORED = 0, 1, 2
"""The kinds of a block."""
NEVER = 1 << 40
"""A place beyond every node's."""


class SavedModel:
    """Costs of steps between lower sets of a graph, by the rules of a tape."""

    name: Model = "saved"
    kinds = 3

    def __init__(self, graph: Graph) -> None:
        self._graph, self.g = graph, graph.numbered
        g = self.g
        count = len(g.names)
        self.all = (1 << count) - 1
        self.users = [mask_of(users) for users in g.succs]
        self.needers = [0] * count
        for q, needs in enumerate(g.needs):
            for x in needs:
                self.needers[x] |= 1 << q
        self._group = [0] * count
        for v, root in enumerate(g.root):
            self._group[root] |= 1 << v

    # -- one block -------------------------------------------------------------------------

    def block(self, before: int, after: int, kind: int) -> Segment:
        """Return the nodes of a block, those that it keeps and those that it recomputes."""
        return _Target(self, after, kind, before).block(before)

    def cached(self, block: Segment) -> int:
        """Return the bytes of values and function state that a block keeps for its backward."""
        g = self.g
        return sum(g.size[v] for v in block.kept) + sum(g.stash[v] for v in block.stashed)

    def with_views(self, nodes: int, within: int) -> int:
        """Return the mask of nodes ``within`` a set that share bytes with any of ``nodes``."""
        found = 0
        for v in numbers(nodes):
            found |= self._group[self.g.root[v]]
        return found & within

    def kept(self, near: int, after: int, kind: int) -> int:
        """Return the mask of the nodes ``near``, with views, kept once set ``after`` is done."""
        g, kept, beyond = self.g, 0, self.all & ~after
        for v in numbers(near):
            keeps = self.users[v] & beyond or g.pinned[v]
            keeps = keeps or (kind == STORED and self.needers[v])
            if keeps or (kind == CHEAPLY_RECOMPUTED and g.costly[v]):
                kept |= self._group[g.root[v]]
        return kept & after

    def rerun(self, left: int, after: int, kind: int) -> int:
        """Return the mask of nodes to recompute: saved tensors not kept, and their inputs."""
        if kind == STORED:
            return 0
        rerun = 0
        for v in reversed(numbers(left)):
            if self.needers[v] & after or self.g.stash[v] or self.users[v] & rerun:
                rerun |= 1 << v
        return rerun

    # -- all steps -------------------------------------------------------------------------

    def table(self, sets: tuple[int, ...], *, exact: bool = False) -> Table:
        """Return the costs of every step between nested lower sets, which are sorted by size.

        In closed form where each set is a prefix of the node order; otherwise one step after the
        other, in time proportional to its nodes.
        """
        if all(mask & (mask + 1) == 0 for mask in sets):
            return prefix_table(self._graph, sets, exact=exact)
        return self.table_by_steps(sets, exact=exact)

    def table_by_steps(self, sets: tuple[int, ...], *, exact: bool = False) -> Table:
        """Return the same table for any lower sets, computed one step after the other."""
        g, cost = self.g, units(self.g.cost, exact=exact)
        count = len(sets)
        peak = np.full((3, count, count), INFINITE, np.int64)
        cached = np.zeros((3, count, count), np.int64)
        time = np.zeros((3, count, count), cost.costs.dtype)
        for target in range(1, count):
            for kind in (
                (STORED,) if target == count - 1 else (RECOMPUTED, CHEAPLY_RECOMPUTED, STORED)
            ):
                step = _Target(self, sets[target], kind)
                for source in range(target):
                    if sets[source] & ~sets[target] == 0:
                        at = kind, target, source
                        block = step.block(sets[source])
                        peak[at] = step.peak(block)
                        cached[at] = self.cached(block)
                        time[at] = sum(cost.costs[v] for v in block.rerun)
        return Table(sets, peak, cached, time, ~bits(sets, len(g.names)) @ cost.costs, cost.total)


class _Target:
    """The facts that all steps into the set ``after`` share, or of the one step from ``before``."""

    def __init__(self, model: SavedModel, after: int, kind: int, before: int = 0) -> None:
        self.model, self.g, self.after, self.kind = model, model.g, after, kind
        new = after & ~before
        near = model.with_views(new, after) if before else after
        self.kept = model.kept(near, after, kind)
        self.rerun = model.rerun(new & ~self.kept, after, kind)

    @cached_property
    def grads(self) -> set[int]:
        """Return the nodes whose gradients are in memory before the block's backward."""
        beyond = self.model.all & ~self.after
        return {v for v in numbers(self.after) if self.model.users[v] & beyond}

    @cached_property
    def stayed(self) -> int:
        """Return the bytes of parameters' gradients that backward makes before reaching the set."""
        return sum(self.g.stays[v] for v in numbers(self.model.all & ~self.after))

    @cached_property
    def _first_need(self) -> dict[int, int]:
        """Return by node with bytes the lowest step that needs them: the last one to run."""
        first: dict[int, int] = {}
        for v in numbers(self.after):
            needers = self.model.needers[v] & self.after
            if needers:
                root, place = self.g.root[v], (needers & -needers).bit_length() - 1
                first[root] = min(first.get(root, NEVER), place)
        return first

    def block(self, before: int) -> Segment:
        """Return the block of the nodes in this set and not in ``before``."""
        new = self.after & ~before
        found, kept = tuple(numbers(new)), tuple(numbers(new & self.kept))
        stashed = found if self.kind == STORED else kept
        return Segment(found, kept, tuple(numbers(new & self.rerun)), stashed)

    def peak(self, block: Segment) -> int:
        """Return a block's peak above the kept bytes of blocks before: forward to backward."""
        return max(self._forward(block), self._rebuild(block), self._backward(block))

    def _forward(self, block: Segment) -> int:
        """Return the peak of a block's forward."""
        g = self.g
        last = self._last_use(block.nodes, block.nodes)
        freed = self._freed_after(set(block.nodes) - set(block.kept), last)
        stashed = set(block.stashed)
        live = peak = 0
        for v in block.nodes:
            live += g.size[v] + g.stash[v]
            peak = max(peak, live + g.workspace[v])
            live -= freed.get(v, 0) + (0 if v in stashed else g.stash[v])
        return peak + g.forward_bytes

    def _rebuild(self, block: Segment) -> int:
        """Return the peak of a block's recomputation; 0 if it has none."""
        g = self.g
        if not block.rerun:
            return 0
        last = self._last_use(block.rerun, block.nodes)
        for v in block.rerun:
            last.setdefault(g.root[v], v)
        held = {v for v in block.kept if g.root[v] == v}
        held = {v for v in held if v in self._first_need or v in last}
        rebuilt = {v for v in block.rerun if g.root[v] == v}
        freed = self._freed_after({v for v in held | rebuilt if v not in self._first_need}, last)
        live = sum(g.size[v] for v in held) + sum(g.stash[v] for v in block.stashed)
        live += sum(g.grad[v] for v in self.grads) + self.stayed
        peak = 0
        for v in block.rerun:
            live += g.size[v] + g.stash[v]
            peak = max(peak, live + g.workspace[v])
            live -= freed.get(v, 0)
        return peak

    def _backward(self, block: Segment) -> int:
        """Return the peak of a block's backward."""
        g = self.g
        grads, nodes = set(self.grads), set(block.nodes)
        first = {v: place for v, place in self._first_need.items() if v in nodes}
        freed: dict[int, int] = {}
        for v, place in first.items():
            freed[place] = freed.get(place, 0) + g.size[v]
        live = sum(g.grad[v] for v in grads) + sum(g.size[v] for v in first)
        live += sum(g.stash[v] for v in block.nodes) + self.stayed
        peak = 0
        for p in reversed(block.nodes):
            live += g.stays[p]
            for v in (p, *g.preds[p]):
                if v not in grads:
                    grads.add(v)
                    live += g.grad[v]
            peak = max(peak, live + g.backward_workspace[p])
            live -= g.grad[p] + g.stash[p] + freed.get(p, 0)
        return peak

    def _last_use(self, users: tuple[int, ...], nodes: tuple[int, ...]) -> dict[int, int]:
        """Return by node with bytes in a block the last of ``users`` that reads them."""
        g, own = self.g, set(nodes)
        last: dict[int, int] = {}
        for w in users:
            for x in g.preds[w]:
                if g.root[x] in own:
                    last[g.root[x]] = w
        return last

    def _freed_after(self, which: set[int], last: dict[int, int]) -> dict[int, int]:
        """Return by node the bytes of the values in ``which`` that are freed after it has run."""
        freed: dict[int, int] = {}
        for v in which:
            if self.g.root[v] == v:
                place = last.get(v, v)
                freed[place] = freed.get(place, 0) + self.g.size[v]
        return freed
