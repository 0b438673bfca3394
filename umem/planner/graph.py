"""The graph to plan: one node for each function call of the forward pass.

Models: bytes and costs of a training step's forward values, the values that backward needs, views,
gradients as large as their values, gradients of parameters as backward makes them. Does not model:
contents, devices, parameters (a constant that the caller adds to a budget).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from umem.errors import GraphError
from umem.planner.checks import each_of, shown, whole_number
from umem.planner.node import SIZES, Node

if TYPE_CHECKING:
    from umem.planner.from_trace import Cost
    from umem.trace import Trace

__all__ = ["Graph", "Node", "Numbered"]

MAX_TOTAL = 1 << 53
"""Sums of sizes stay below this (8 PiB), so they are exact in double precision."""


class Numbered(NamedTuple):
    """A graph by numbers: a node's number is its place in the order of forward."""

    names: tuple[str, ...]
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    root: tuple[int, ...]
    """The node that holds the bytes of a node's output: itself, unless it is a view."""
    size: tuple[int, ...]
    grad: tuple[int, ...]
    stash: tuple[int, ...]
    workspace: tuple[int, ...]
    backward_workspace: tuple[int, ...]
    stays: tuple[int, ...]
    forward_bytes: int
    cost: tuple[float, ...]
    backward_cost: tuple[float, ...]
    needs: tuple[tuple[int, ...], ...]
    recomputable: tuple[bool, ...]
    pinned: tuple[bool, ...]
    """True for a node whose bytes belong to a node that must not run twice."""
    costly: tuple[bool, ...]
    """True for a node that costs more than the average."""


@dataclass(frozen=True)
class Graph:
    """A forward pass: its calls as nodes, and an edge from each input to its user.

    Nodes are in the order in which forward runs them. Only nodes that are out of order are sorted.
    A view depends on its base even without an edge.

    Args:
        nodes: the calls, as `Node`.
        edges: pairs of names: an input and its user.
        forward_bytes: bytes in use during forward only, such as the previous step's gradients.

    Raises:
        GraphError: there is a cycle, a duplicate name, or an edge or base that names no node; names
            the node.

    >>> Graph([Node("a", 4, 1), Node("b", 4, 1)], [("a", "b")]).names
    ('a', 'b')
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]
    forward_bytes: int = 0

    def __init__(
        self, nodes: Iterable[Node], edges: Iterable[tuple[str, str]], forward_bytes: int = 0
    ) -> None:
        pairs = dict.fromkeys(_pair(edge) for edge in each_of(edges, "edges", "pairs of names"))
        object.__setattr__(self, "nodes", tuple(each_of(nodes, "nodes", "Node objects")))
        object.__setattr__(self, "edges", tuple(pairs))
        object.__setattr__(self, "forward_bytes", forward_bytes)
        self._check()
        object.__setattr__(self, "_order", self._sorted())
        self._check_needs()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the nodes' names, in the order in which forward runs them."""
        return self.numbered.names

    def __len__(self) -> int:
        return len(self.nodes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, computed once, because caches look graphs up often."""
        return hash((self.nodes, self.edges, self.forward_bytes))

    # -- checks ----------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise `GraphError` for invalid nodes, edges or sizes."""
        known: set[str] = set()
        for node in self.nodes:
            if not isinstance(node, Node):
                raise GraphError(f"nodes must be Node objects; got {node!r}")
            if node.name in known:
                raise GraphError(f"node {node.name!r} is there twice")
            known.add(node.name)
        for source, target in self.edges:
            for name in (source, target):
                if name not in known:
                    raise GraphError(f"edge {(source, target)} leads to {name!r}, no node")
        for node in self.nodes:
            if node.alias_of is not None and node.alias_of not in known:
                raise GraphError(f"node {node.name!r} is a view of {node.alias_of!r}, no node")
        forward = whole_number(self.forward_bytes)
        if forward is None or forward < 0:
            raise GraphError(f"forward_bytes is {shown(self.forward_bytes)}, not a count of bytes")
        object.__setattr__(self, "forward_bytes", forward)
        if sum(float(node.cost) for node in self.nodes) > sys.float_info.max:
            raise GraphError("the costs add up to more than a floating-point number holds")
        sizes = (n.grad_bytes or n.nbytes for n in self.nodes)
        every = (getattr(n, key) for n in self.nodes for key in SIZES)
        if sum(sizes) + sum(every) + self.forward_bytes >= MAX_TOTAL:
            raise GraphError("the sizes add up to 8 PiB or more")

    def _check_needs(self) -> None:
        """Raise `GraphError` if backward needs a value that is not an input or not saved."""
        saved = {node.name: node.saved for node in self.nodes}
        inputs = self._inputs()
        for node in self.nodes:
            for name in node.needs or ():
                if name != node.name and name not in inputs[node.name]:
                    raise GraphError(f"node {node.name!r} needs {name!r}, which it does not read")
                if not saved[name]:
                    raise GraphError(f"node {node.name!r} needs {name!r}, which is not saved")

    def _inputs(self) -> dict[str, list[str]]:
        """Return by node the names of its inputs, a view's base among them."""
        inputs: dict[str, dict[str, None]] = {node.name: {} for node in self.nodes}
        for source, target in self.edges:
            inputs[target][source] = None
        for node in self.nodes:
            if node.alias_of is not None:
                inputs[node.name][node.alias_of] = None
        return {name: list(found) for name, found in inputs.items()}

    def _sorted(self) -> tuple[int, ...]:
        """Sort the places in `nodes`: inputs first, then as given; `GraphError` for a cycle."""
        place = {node.name: i for i, node in enumerate(self.nodes)}
        sorter = TopologicalSorter(
            {place[name]: [place[x] for x in names] for name, names in self._inputs().items()}
        )
        try:
            sorter.prepare()
        except CycleError as error:
            name = self.nodes[error.args[1][0]].name
            raise GraphError(f"node {name!r} depends on itself") from None
        order: list[int] = []
        ready = sorted(sorter.get_ready())
        while ready:
            order.append(heapq.heappop(ready))
            sorter.done(order[-1])
            for i in sorter.get_ready():
                heapq.heappush(ready, i)
        return tuple(order)

    # -- by numbers ------------------------------------------------------------------------

    @cached_property
    def numbered(self) -> Numbered:
        """Return the graph by numbers, on which the algorithms work; computed once."""
        order: tuple[int, ...] = self._order  # type: ignore[attr-defined]
        nodes = [self.nodes[i] for i in order]
        number = {node.name: v for v, node in enumerate(nodes)}
        inputs = self._inputs()
        preds = tuple(tuple(sorted(number[n] for n in inputs[node.name])) for node in nodes)
        succs: list[list[int]] = [[] for _ in nodes]
        root: list[int] = []
        for v, node in enumerate(nodes):
            root.append(v if node.alias_of is None else root[number[node.alias_of]])
            for x in preds[v]:
                succs[x].append(v)
        total_cost = sum(node.cost for node in nodes)
        pinned = {root[v] for v, node in enumerate(nodes) if not node.recomputable}
        alias = [node.alias_of is not None for node in nodes]
        grads = [0 if a else n.nbytes for n, a in zip(nodes, alias, strict=True)]
        return Numbered(
            names=tuple(number),
            preds=preds,
            succs=tuple(map(tuple, succs)),
            root=tuple(root),
            size=tuple(0 if a else n.nbytes for n, a in zip(nodes, alias, strict=True)),
            grad=tuple(
                g if n.grad_bytes is None else n.grad_bytes
                for n, g in zip(nodes, grads, strict=True)
            ),
            stash=tuple(node.stash_bytes for node in nodes),
            workspace=tuple(node.workspace_bytes for node in nodes),
            backward_workspace=tuple(node.backward_workspace_bytes for node in nodes),
            stays=tuple(node.stays_bytes for node in nodes),
            forward_bytes=self.forward_bytes,
            cost=tuple(node.cost for node in nodes),
            backward_cost=tuple(
                min(2 * float(n.cost), sys.float_info.max)
                if n.backward_cost is None
                else float(n.backward_cost)
                for n in nodes
            ),
            needs=tuple(
                tuple(x for x in (*preds[v], v) if nodes[x].saved)
                if node.needs is None
                else tuple(sorted({number[name] for name in node.needs}))
                for v, node in enumerate(nodes)
            ),
            recomputable=tuple(node.recomputable for node in nodes),
            pinned=tuple(root[v] in pinned for v in range(len(nodes))),
            costly=tuple(node.cost * len(nodes) > total_cost for node in nodes),
        )

    @classmethod
    def from_trace(cls, trace: Trace, cost: Cost = "paper") -> Graph:
        """Make the graph of a trace's first forward pass; see `umem.planner.from_trace`."""
        from umem.planner.from_trace import nodes_and_edges

        return cls(*nodes_and_edges(trace, cost))


def _pair(edge: Any) -> tuple[str, str]:
    """Check that an edge is a pair of names; raise `GraphError` otherwise."""
    try:
        source, target = edge
    except (TypeError, ValueError):
        raise GraphError(f"an edge must be a pair of names; got {shown(edge)}") from None
    if not isinstance(source, str) or not isinstance(target, str):
        raise GraphError(f"an edge must be a pair of names; got {shown(edge)}")
    return source, target
