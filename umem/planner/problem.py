"""What there is to plan in one pass: its calls with all that they need, and the bytes beside them.

Both sides plan with it: `umem.chainer.Recompute`, from what it sees of a running pass, and
`umem.choose`, from a trace. What a step holds all the time is a constant: parameters, optimizer
state and inputs, what calls have drawn at random (a dropout's mask, packed to one bit an element
or not), and what must not run twice. The rest is a `Graph`, and a plan is for that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from umem.errors import BudgetError
from umem.planner.call_facts import CallFacts
from umem.planner.dispatch import least_once
from umem.planner.dispatch import plan as make_plan
from umem.planner.graph import Graph
from umem.planner.node import Node
from umem.planner.plans import Method, Plan
from umem.planner.referee import Simulation, referee, simulate
from umem.planner.schedule import Action, actions
from umem.units import format_apart, format_bytes

UPDATE = "the optimizer's update"
"""What forces the floor where no call does."""


class Solution(NamedTuple):
    """A plan, the graph that it is for, and what is there beside it all the time.

    ``packs``: whether masks are kept as bits. ``update_peak_bytes``: the most bytes during the
    optimizer's update, in all.
    """

    plan: Plan
    graph: Graph
    constant_bytes: int
    packs: bool
    update_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once, in all."""
        return max(self.constant_bytes + self.plan.peak_bytes, self.update_peak_bytes)


@dataclass(frozen=True)
class Problem:
    """One forward pass and its backward.

    Attributes:
        calls: in the order of forward.
        edges: pairs of calls: what one makes, the other reads.
        outside_bytes: parameters, state, inputs, and gradients that stay from step to step.
        forward_bytes: gradients of the step before, which are cleared when forward is over.
        backward_order: by call, its place in a plain backward; those that it does not come to
            are missing.
        keeps_order: whether backward has to take its calls in that order.
        outlives: whether the pass's graph is still there during the next one.
        update_bytes: what the optimizer's update needs only while it runs.
        whole_update_bytes: the same in a plain step, where rules compute with whole arrays.
    """

    calls: tuple[CallFacts, ...]
    edges: tuple[tuple[int, int], ...]
    outside_bytes: int = 0
    forward_bytes: int = 0
    backward_order: Mapping[int, int] = field(default_factory=dict)
    keeps_order: bool = False
    outlives: bool = False
    update_bytes: int = 0
    whole_update_bytes: int = 0

    # -- the graph -------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The calls' names as nodes."""
        return tuple(f"{call.label}#{index}" for index, call in enumerate(self.calls))

    @cached_property
    def _named_edges(self) -> list[tuple[str, str]]:
        return [(self.names[a], self.names[b]) for a, b in self.edges]

    @cached_property
    def _held(self) -> dict[int, int]:
        """By call, the bytes that stay as long as the graph: of what must not run twice.

        Where its outputs are views, those of what they lie in.
        """
        found: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            if call.again:
                continue
            found[index] = found.get(index, 0) + (0 if call.dead else call.stash_bytes)
            root = index
            while (base := self.calls[root].alias) is not None:
                root = base
            if root == index or self.calls[root].again:
                found[root] = found.get(root, 0) + self.calls[root].nbytes
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes of what must not run twice; doubled where the graph outlives its pass."""
        return sum(self._held.values()) * (2 if self.outlives else 1)

    def constant_bytes(self, *, packs: bool, plain: bool = False) -> int:
        """Bytes that are there all the time: what is outside, what was drawn, what is held.

        In a ``plain`` step nothing is held for the sake of running again.
        """
        drawn = 0 if plain else self.held_bytes
        for call in self.calls:
            drawn += call.drawn_bytes
            if packs:
                drawn += call.packed_bytes - call.mask_bytes
        return self.outside_bytes + drawn

    def _nodes(self, packs: bool, plain: bool) -> list[Node]:
        """The nodes: what is held is a constant, and takes nothing here.

        In a ``plain`` step nothing is held, and it is a part of its node.
        """
        held = {} if plain else self._held
        return [
            self._node(index, call, index in held, packs) for index, call in enumerate(self.calls)
        ]

    def _node(self, index: int, call: CallFacts, is_held: bool, packs: bool) -> Node:
        mask = call.mask_bytes if packs else 0
        no_stash = call.dead or call.alias is not None or is_held
        return Node(
            name=self.names[index],
            nbytes=0 if is_held else call.nbytes,
            cost=call.cost,
            alias_of=None if call.alias is None else self.names[call.alias],
            recomputable=call.again,
            stash_bytes=0 if no_stash else call.stash_bytes,
            grad_bytes=0 if call.dead or index in self._summed else call.grad_bytes,
            workspace_bytes=call.workspace_bytes + mask + mask // 4,  # a byte an element on the way
            backward_workspace_bytes=call.backward_workspace_bytes + mask,
            stays_bytes=0 if call.dead else call.stays_bytes,
            needs=() if call.dead else tuple(self.names[i] for i in call.needs),
        )

    @cached_property
    def _summed(self) -> frozenset[int]:
        """Calls whose outputs are summed up and nothing else: that gradient is a view of one."""
        users: dict[int, set[str]] = {}
        for source, user in self.edges:
            users.setdefault(source, set()).add(self.calls[user].label)
        return frozenset(source for source, labels in users.items() if labels == {"Sum"})

    def _graph(self, *, packs: bool, plain: bool = False) -> Graph:
        """The graph, with masks packed or not.

        A plan goes backward in the reverse order of its nodes, unless it takes branches one by
        one. Where the order of a plain backward has to stay, the nodes are in its reverse.
        """
        nodes = self._nodes(packs, plain)
        graph = Graph(nodes, self._named_edges, self.forward_bytes)
        if plain or not self.keeps_order:
            return graph
        by_name = {node.name: node for node in nodes}
        order = reversed(list(self._plain_order(graph)))
        return Graph([by_name[name] for name in order], self._named_edges, self.forward_bytes)

    @cached_property
    def _whole(self) -> Graph:
        return self._graph(packs=False)

    @cached_property
    def _packing(self) -> Graph:
        return self._graph(packs=True)

    # -- a plain step ----------------------------------------------------------------------

    @cached_property
    def plain_step(self) -> Simulation:
        """A step as Chainer takes it by itself, above `constant_bytes` of a plain one.

        What is saved goes when all of backward is over, and backward has Chainer's own order, in
        which what reads inputs alone comes last: its gradients wait.
        """
        graph = self._graph(packs=False, plain=True)
        stream = list(actions(graph, make_plan(graph, None, "store_all", model="saved")))
        start = next((i for i, a in enumerate(stream) if a.kind == "backward"), len(stream))
        late = [a for a in stream[start:] if a.kind in ("drop", "drop_stash")]
        frees = {a.node: a for a in stream[start:] if a.kind == "free"}
        backward: list[Action] = []
        for name in self._plain_order(graph):
            backward += [Action("backward", name), *([frees[name]] if name in frees else [])]
        return referee(graph, [*stream[:start], *backward, *late])

    @property
    def plain_bytes(self) -> int:
        """The peak of a plain step, in all; shares of a budget are of it."""
        whole = self.update_peak_bytes - self.update_bytes + self.whole_update_bytes
        return max(self.left_alone_bytes, whole)

    @property
    def left_alone_bytes(self) -> int:
        """The peak of a plain step whose updates go in chunks, in all."""
        plain = self.constant_bytes(packs=False, plain=True) + self.plain_step.peak_bytes
        return max(plain, self.update_peak_bytes)

    @property
    def update_peak_bytes(self) -> int:
        """The most bytes during the optimizer's update, in all: the graph is gone by then."""
        stays = sum(call.stays_bytes for call in self.calls if not call.dead)
        return self.outside_bytes + stays + self.update_bytes

    def _plain_order(self, graph: Graph) -> Iterator[str]:
        """Backward's order: users first, then as it was seen; what it missed as soon as can be.

        What was missed may be reached by a later backward of the same graph.
        """
        g, place = graph.numbered, {name: index for index, name in enumerate(self.names)}
        order = [self.backward_order.get(place[name], -1) for name in g.names]
        waits = [len(users) for users in g.succs]
        ready = [(order[v], v) for v in range(len(g.names)) if not waits[v]]
        heapq.heapify(ready)
        while ready:
            _, v = heapq.heappop(ready)
            yield g.names[v]
            for x in g.preds[v]:
                waits[x] -= 1
                if not waits[x]:
                    heapq.heappush(ready, (order[x], x))

    # -- plans -----------------------------------------------------------------------------

    @cached_property
    def keep_all(self) -> Solution:
        """The plan that runs nothing again; what was saved goes as backward goes along."""
        found = make_plan(self._whole, None, "store_all", model="saved")
        return self._solution(found, packs=False)

    def least(self, method: Method = "auto", *, any_cost: bool = False) -> Solution:
        """The plan of least bytes, for at most one more forward pass or at any cost; found once."""
        if (method, any_cost) not in self._found:
            find = make_plan if any_cost else least_once
            plan = find(self._packing, method=self._method(method), model="saved")
            least = self._solution(plan, packs=True)
            if least.peak_bytes > least.constant_bytes + plan.peak_bytes:
                least = self.within(least.peak_bytes, method)  # the update needs that much anyway
            self._found[method, any_cost] = least
        return self._found[method, any_cost]

    @cached_property
    def _found(self) -> dict[tuple[Method, bool], Solution]:
        return {}

    def _solution(self, plan: Plan, *, packs: bool) -> Solution:
        graph = self._packing if packs else self._whole
        return Solution(
            plan, graph, self.constant_bytes(packs=packs), packs, self.update_peak_bytes
        )

    def within(self, budget_bytes: int | None, method: Method = "auto") -> Solution:
        """The plan for a budget in all; None: the least that one more forward pass can do.

        Raises:
            BudgetError: there is none; names the least that there is one for.
        """
        if budget_bytes is None:
            return self.least(method)
        if budget_bytes >= self.keep_all.peak_bytes:
            return self.keep_all
        constant = self.constant_bytes(packs=True)
        if budget_bytes <= constant or budget_bytes < self.update_peak_bytes:
            raise self._too_small(budget_bytes, method)
        try:
            found = make_plan(
                self._packing, budget_bytes - constant, self._method(method), model="saved"
            )
        except BudgetError:
            raise self._too_small(budget_bytes, method) from None
        return self._solution(found, packs=True)

    def _method(self, method: Method) -> Method:
        if self.keeps_order and method in ("auto", "lower_sets_exact"):
            return "rematerialize"  # which leaves the order of the nodes as it is
        return method

    def _too_small(self, budget_bytes: int, method: Method) -> BudgetError:
        least, whole = self.least(method).peak_bytes, self.plain_bytes
        lowest = self.least(method, any_cost=True)
        asked, said, plain = format_apart(budget_bytes, least, whole)
        below = ""
        if lowest.peak_bytes < least:
            passes = lowest.plan.overhead / (sum(call.cost for call in self.calls) or 1)
            below = f"; {lowest.peak_bytes} bytes for {passes:.1f} more forward passes"
        return BudgetError(
            f"a budget of {asked} ({budget_bytes / whole:.0%} of the plain step's {plain}) is too "
            f"small: the least budget is {said} ({math.ceil(100 * least / whole)}%, {least} bytes"
            f"{below})"
        )

    def why_not_less(self, method: Method = "auto") -> str:
        """Say what forces the least budget, and the floor, as the end of a sentence."""
        least, (size, node) = self.least(method), self.floor
        if least.peak_bytes == self.update_peak_bytes:
            return (
                "which the optimizer's update forces: beside parameters, gradients and state it "
                f"needs {format_bytes(self.update_bytes)} while it runs, and no plan changes that"
            )
        moments = simulate(least.graph, least.plan).timeline
        forced = max(moments, key=lambda moment: moment.during_bytes).action
        return (
            f"which {forced.kind} of {forced.node!r} forces. Parameters, state and inputs are "
            f"{format_bytes(least.constant_bytes)} of it; no plan whatever gets below the floor of "
            f"{format_bytes(size)}, which {node!r} forces"
        )

    @cached_property
    def floor(self) -> tuple[int, str]:
        """The bytes below which no plan gets, in all, and the call that forces them.

        That is the most that one call needs at once; the gradients of parameters that are there by
        then are among it.
        """
        nodes = self._nodes(packs=True, plain=False)
        size = {node.name: 0 if node.alias_of else node.nbytes for node in nodes}
        grad = {node.name: node.grad_bytes or 0 for node in nodes}
        inputs: dict[str, list[str]] = {node.name: [] for node in nodes}
        for source, user in self._named_edges:
            inputs[user].append(source)
        floor = (0, "nothing")
        stayed = 0
        for call, node in reversed(list(zip(self.calls, nodes, strict=True))):
            stayed += node.stays_bytes
            read = inputs[node.name]
            forward = sum(size[n] for n in read) + size[node.name] + node.stash_bytes
            forward += node.workspace_bytes + self.forward_bytes
            backward = 0
            if not call.dead:
                backward = sum(size[n] for n in node.needs or ()) + node.stash_bytes
                backward += grad[node.name] + sum(grad[n] for n in read)
                backward += node.backward_workspace_bytes + stayed
            floor = max(floor, (max(forward, backward), node.name))
        whole = self.constant_bytes(packs=True) + floor[0]
        return max((whole, floor[1]), (self.update_peak_bytes, UPDATE))
