"""The planning problem of one pass: its calls, and the bytes beside them.

`umem.chainer.Recompute` makes one from the passes that it observes, `umem.onnx` from a trace. A
constant is always in use: parameters, optimizer state and inputs, random numbers that calls have
drawn (a dropout's mask, packed to one bit an element or not), and outputs of calls that must not be
recomputed. The rest is a `Graph`, for which plans are made.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from umem.errors import BudgetError
from umem.planner.dispatch import least_once
from umem.planner.dispatch import plan as make_plan
from umem.planner.graph import Graph
from umem.planner.link import Link
from umem.planner.node import Node
from umem.planner.plans import Method, Plan
from umem.planner.schedule import Action, actions
from umem.planner.usage_of_actions import ScheduleUsage, usage
from umem.planner.usage_of_actions import floor as floor_of
from umem.trace.analysis import CONVOLUTIONS
from umem.units import format_apart, format_bytes

UPDATE = "the optimizer's update"
"""The name given instead of a call's if the optimizer's update forces the floor."""


@dataclass(frozen=True)
class CallFacts:
    """One call of a forward pass, and its backward.

    Attributes:
        label: the function's name.
        nbytes: bytes of the memory of its outputs that the call itself allocated.
        cost: the cost of recomputing it.
        grad_bytes: bytes of the gradient of its outputs.
        alias: the call whose output its output is a view of.
        stash_bytes: bytes of recomputable function state that its backward reads.
        drawn_bytes: bytes of function state drawn at random, which is never drawn again.
        mask_bytes, packed_bytes: the part of ``drawn_bytes`` that is a dropout's mask, and the
            mask's bytes at one bit an element.
        again: True if it may be recomputed; otherwise its outputs are never dropped.
        workspace_bytes, backward_workspace_bytes: temporary memory while it or its backward runs.
        stays_bytes: bytes of the parameters' gradients that its backward is the first to make.
        needs: the calls whose outputs its backward reads.
        dead: True if backward does not reach it.
        backward_cost: the cost of its backward; None: twice its cost.
    """

    label: str
    nbytes: int
    cost: float
    grad_bytes: int
    alias: int | None = None
    stash_bytes: int = 0
    drawn_bytes: int = 0
    mask_bytes: int = 0
    packed_bytes: int = 0
    again: bool = True
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    stays_bytes: int = 0
    needs: tuple[int, ...] = ()
    dead: bool = False
    backward_cost: float | None = None


class Solution(NamedTuple):
    """A plan, the graph that it was made for, and the bytes beside it.

    Attributes:
        plan: the plan; its peak does not include the constant.
        graph: the graph of the plan.
        constant_bytes: the bytes that are always in use.
        packs: True if dropout masks are kept as bits.
        update_peak_bytes: the peak during the optimizer's update, parameters and state included.
    """

    plan: Plan
    graph: Graph
    constant_bytes: int
    packs: bool
    update_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the step, constant and optimizer's update included."""
        return max(self.constant_bytes + self.plan.peak_bytes, self.update_peak_bytes)


@dataclass(frozen=True)
class Problem:
    """One forward pass and its backward.

    Attributes:
        calls: in the order of forward.
        edges: pairs of calls: the second reads an output of the first.
        outside_bytes: parameters, state, inputs, and gradients that stay from step to step.
        forward_bytes: the previous step's gradients, which are cleared after forward.
        backward_order: by call, its place in a plain backward; calls that backward does not reach
            are missing.
        keeps_order: True if backward must run its calls in that order.
        outlives: True if the pass's graph is still alive during the next pass.
        update_bytes: temporary memory of the optimizer's update, which runs in chunks if its rule
            allows it.
        whole_update_bytes: the same in a plain step, whose rules compute with whole arrays.
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
        """Return the names of the calls' nodes: label and number."""
        return tuple(f"{call.label}#{index}" for index, call in enumerate(self.calls))

    @cached_property
    def _named_edges(self) -> list[tuple[str, str]]:
        return [(self.names[a], self.names[b]) for a, b in self.edges]

    @cached_property
    def _held(self) -> dict[int, int]:
        """Return by call the bytes of calls never recomputed, which stay as long as the graph.

        They are a call's function state and outputs; if the outputs are views, the base's outputs,
        under the base's number. Other calls are missing.
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

    @cached_property
    def _summed(self) -> frozenset[int]:
        """Return the calls whose outputs only `Sum` reads: their gradient is a broadcast view."""
        users: dict[int, set[str]] = {}
        for source, user in self.edges:
            users.setdefault(source, set()).add(self.calls[user].label)
        return frozenset(source for source, labels in users.items() if labels == {"Sum"})

    @property
    def held_bytes(self) -> int:
        """Return the bytes of calls never recomputed; doubled if the graph outlives its pass."""
        return sum(self._held.values()) * (2 if self.outlives else 1)

    def constant_bytes(self, *, packs: bool, plain: bool = False, moves: bool = False) -> int:
        """Return the bytes that are always in use: outside, drawn at random, and `held_bytes`.

        In a ``plain`` step, and if a plan ``moves`` values to the offload target, outputs of calls
        that must not be recomputed are a part of the graph instead.
        """
        drawn = 0 if plain or moves else self.held_bytes
        for call in self.calls:
            drawn += call.drawn_bytes
            if packs:
                drawn += call.packed_bytes - call.mask_bytes
        return self.outside_bytes + drawn

    def _nodes(self, *, packs: bool, plain: bool = False, moves: bool = False) -> list[Node]:
        """Make the nodes of the calls; for the arguments see `constant_bytes`.

        A dropout's mask that is kept as bits takes workspace to pack and unpack. If values may be
        offloaded, a call that must not be recomputed keeps its outputs until its own backward, in
        memory or offloaded.
        """
        names, held = self.names, {} if plain or moves else self._held
        nodes = []
        for index, call in enumerate(self.calls):
            mask = call.mask_bytes if packs else 0
            no_stash = call.dead or call.alias is not None or index in held
            own = (index,) if moves and not call.again else ()
            needs = dict.fromkeys((*(() if call.dead else call.needs), *own))
            node = Node(
                name=names[index],
                nbytes=0 if index in held else call.nbytes,
                cost=call.cost,
                alias_of=None if call.alias is None else names[call.alias],
                recomputable=call.again,
                stash_bytes=0 if no_stash else call.stash_bytes,
                grad_bytes=0 if call.dead or index in self._summed else call.grad_bytes,
                workspace_bytes=call.workspace_bytes + mask + mask // 4,  # a byte an element
                backward_workspace_bytes=call.backward_workspace_bytes + mask,
                stays_bytes=0 if call.dead else call.stays_bytes,
                needs=tuple(names[i] for i in needs),
                backward_cost=0 if call.dead else call.backward_cost,
            )
            nodes.append(node)
        return nodes

    def _graph(self, *, packs: bool, plain: bool = False, moves: bool = False) -> Graph:
        """Make the graph, with masks packed or not.

        A plan's backward runs in the reverse order of the nodes, unless the plan takes branches one
        by one. If backward must keep a plain backward's order, the nodes are in its reverse order.
        """
        nodes = self._nodes(packs=packs, plain=plain, moves=moves)
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

    @cached_property
    def _moving(self) -> Graph:
        return self._graph(packs=True, moves=True)

    # -- a plain step ----------------------------------------------------------------------

    @cached_property
    def plain_step(self) -> ScheduleUsage:
        """Return the bytes of a step without a plan, above `constant_bytes` of a plain one.

        Saved tensors are freed after all of backward, and backward has Chainer's own order, in
        which calls that read only inputs come last: their gradients stay until then.
        """
        graph = self._graph(packs=False, plain=True)
        stream = list(actions(graph, make_plan(graph, None, "store_all", model="saved")))
        start = next((i for i, a in enumerate(stream) if a.kind == "backward"), len(stream))
        late = [a for a in stream[start:] if a.kind in ("drop", "drop_stash")]
        frees = {a.node: a for a in stream[start:] if a.kind == "free"}
        backward: list[Action] = []
        for name in self._plain_order(graph):
            backward += [Action("backward", name), *([frees[name]] if name in frees else [])]
        return usage(graph, [*stream[:start], *backward, *late])

    @property
    def plain_bytes(self) -> int:
        """Return the peak of a plain step, constant included; budgets in percent refer to it."""
        whole = self.update_peak_bytes - self.update_bytes + self.whole_update_bytes
        return max(self.left_alone_bytes, whole)

    @property
    def left_alone_bytes(self) -> int:
        """Return the peak of a plain step with the update in chunks, constant included."""
        plain = self.constant_bytes(packs=False, plain=True) + self.plain_step.peak_bytes
        return max(plain, self.update_peak_bytes)

    @property
    def update_peak_bytes(self) -> int:
        """Return the peak during the optimizer's update, which runs after the graph is freed.

        Parameters, their gradients and the state are included.
        """
        stays = sum(call.stays_bytes for call in self.calls if not call.dead)
        return self.outside_bytes + stays + self.update_bytes

    def _plain_order(self, graph: Graph) -> Iterator[str]:
        """Yield names in the order of backward: users first, then as observed; unobserved ones
        early.

        A later backward of the same graph may reach a call that was not observed.
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
        """Return the plan that recomputes nothing, and frees saved tensors during backward."""
        found = make_plan(self._whole, None, "store_all", model="saved")
        return self._solution(found, self._whole, None)

    def least(
        self, method: Method = "auto", *, any_cost: bool = False, link: Link | None = None
    ) -> Solution:
        """Return the plan of least bytes, for at most one more forward pass or at any cost.

        Cached by its arguments. With a link to the offload target the plan may offload values
        instead, and is the quickest one found for these bytes.
        """
        any_cost = any_cost or link is not None
        key = method, any_cost, link
        if key not in self._found:
            graph, chosen = self._planned(link), self._method(method)
            if any_cost:
                plan = make_plan(graph, method=chosen, model="saved", link=link)
            else:
                plan = least_once(graph, chosen)
            least = self._solution(plan, graph, link)
            if least.peak_bytes > least.constant_bytes + plan.peak_bytes:
                least = self.within(least.peak_bytes, method, link)  # the update needs it anyway
            self._found[key] = least
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[Method, bool, Link | None], Solution]:
        return {}

    def _planned(self, link: Link | None) -> Graph:
        return self._packing if link is None else self._moving

    def _solution(self, plan: Plan, graph: Graph, link: Link | None) -> Solution:
        packs = graph is not self._whole
        constant = self.constant_bytes(packs=packs, moves=link is not None)
        return Solution(plan, graph, constant, packs, self.update_peak_bytes)

    def within(
        self, budget_bytes: int | None, method: Method = "auto", link: Link | None = None
    ) -> Solution:
        """Return the plan for a budget, constant included; None: `least`.

        With a link to the offload target, each value is kept, recomputed or offloaded; outputs of
        calls that must not be recomputed are kept until their own backward or offloaded; drawn
        random numbers stay in memory.

        Raises:
            BudgetError: no plan fits; names the least budget.
        """
        if budget_bytes is None:
            return self.least(method, link=link)
        if budget_bytes >= self.keep_all.peak_bytes:
            return self.keep_all
        graph = self._planned(link)
        constant = self.constant_bytes(packs=True, moves=link is not None)
        if budget_bytes <= constant or budget_bytes < self.update_peak_bytes:
            raise self._too_small(budget_bytes, method, link)
        room, method = budget_bytes - constant, self._method(method)
        try:
            found = make_plan(graph, room, method, model="saved", link=link)
        except BudgetError:
            raise self._too_small(budget_bytes, method, link) from None
        return self._solution(found, graph, link)

    def _method(self, method: Method) -> Method:
        if self.keeps_order and method == "auto":
            return "rematerialize"  # which leaves the order of the nodes as it is
        return method

    def _too_small(self, budget_bytes: int, method: Method, link: Link | None) -> BudgetError:
        """Return the error for a budget that is too small; it names the least budget.

        The least budget is for plans with at most one more forward pass. If plans that recompute
        more need less memory, the error names their budget and their number of passes too.
        """
        least, whole = self.least(method, link=link).peak_bytes, self.plain_bytes
        lowest = self.least(method, any_cost=True, link=link)
        asked, needed, plain = format_apart(budget_bytes, least, whole)
        below = ""
        if lowest.peak_bytes < least:
            passes = lowest.plan.overhead / (sum(call.cost for call in self.calls) or 1)
            below = f"; {lowest.peak_bytes} bytes for {passes:.1f} more forward passes"
        return BudgetError(
            f"a budget of {asked} ({budget_bytes / whole:.0%} of the plain step's {plain}) is too "
            f"small: the least budget is {needed} ({math.ceil(100 * least / whole)}%, {least} bytes"
            f"{below})"
        )

    def why_not_less(self, method: Method = "auto", link: Link | None = None) -> str:
        """Name the action that forces the least budget, and the floor, as a sentence's end."""
        least, (size, node) = self.least(method, link=link), self.floor(link)
        if least.peak_bytes == self.update_peak_bytes:
            return (
                "which the optimizer's update forces: beside parameters, gradients and state it "
                f"needs {format_bytes(self.update_bytes)} while it runs, and no plan changes that"
            )
        forced = usage(least.graph, actions(least.graph, least.plan)).highest
        return (
            f"which {forced.kind} of {forced.node!r} forces. Parameters, state and inputs are "
            f"{format_bytes(least.constant_bytes)} of it; no plan whatever gets below the floor of "
            f"{format_bytes(size)}, which {node!r} forces{self._columns_in(node)}"
        )

    def _columns_in(self, node: str) -> str:
        """Return a text on a convolution's columns in the floor; empty for another call."""
        if node not in self.names:
            return ""
        call = self.calls[self.names.index(node)]
        inside = max(call.workspace_bytes, call.backward_workspace_bytes)
        if call.label not in CONVOLUTIONS or not inside:
            return ""
        return (
            f" with {format_bytes(inside)} of workspace for its columns (im2col), which "
            "umem.chainer.workspace cuts"
        )

    def floor(self, link: Link | None = None) -> tuple[int, str]:
        """Return the bytes that every plan needs, constant included, and the call that forces them.

        They are the most that one call needs at once, with the gradients of parameters that
        backward has made by then, or the optimizer's update.
        """
        size, node = floor_of(self._planned(link))
        size += self.constant_bytes(packs=True, moves=link is not None)
        return max((size, node), (self.update_peak_bytes, UPDATE))
