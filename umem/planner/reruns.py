"""Plans as lists of the calls that are recomputed before each step of backward."""

from __future__ import annotations

from dataclasses import replace

from umem.planner.graph import Graph
from umem.planner.link import Link, Move
from umem.planner.plans import Plan
from umem.planner.schedule import actions
from umem.planner.usage import usage

Reruns = tuple[tuple[int, ...], ...]
"""By node, the calls to recompute before its step of backward, in order."""


def plan_of(
    graph: Graph,
    reruns: Reruns,
    budget_bytes: int | None,
    method: str,
    moves: tuple[Move, ...] = (),
    link: Link | None = None,
) -> Plan:
    """Make a plan with one block a node, whose backward has the reverse order of the nodes.

    Every value is freed after its last use, kept or not. A budget of None is the plan's peak.
    """
    names, cost = graph.numbered.names, graph.numbered.cost
    kept, stashed = _kept(graph, reruns)
    found = Plan(
        blocks=tuple((name,) for name in names),
        kept=tuple(names[v] for v in sorted(kept)),
        recomputed=tuple(tuple(names[v] for v in rerun) for rerun in reruns),
        stashed=tuple(names[v] for v in sorted(stashed)),
        overhead=sum(cost[v] for rerun in reruns for v in rerun),
        peak_bytes=0,
        method=method,
        objective="time",
        model="saved",
        budget_bytes=0,
        frees_early=True,
        moves=moves,
        link=link,
    )
    peak = usage(graph, actions(graph, found)).peak_bytes
    return replace(
        found, peak_bytes=peak, budget_bytes=peak if budget_bytes is None else budget_bytes
    )


def _kept(graph: Graph, reruns: Reruns) -> tuple[set[int], set[int]]:
    """Return nodes by numbers: whose value is kept from forward on, whose function state is."""
    g = graph.numbered
    kept, stashed = set[int](), set[int]()
    made = set[int]()
    for v in reversed(range(len(reruns))):
        for w in reruns[v]:
            kept.update(x for x in g.preds[w] if x not in made)
            made.add(w)
        kept.update(x for x in g.needs[v] if x not in made)
        if g.stash[v] and v not in made:
            stashed.add(v)
    return kept, stashed


def reruns_of(graph: Graph, plan: Plan) -> Reruns:
    """Return the recomputations of a plan whose forward has the order of the nodes."""
    number = {name: v for v, name in enumerate(graph.numbered.names)}
    found: list[tuple[int, ...]] = [()] * len(number)
    for block, names in zip(plan.blocks, plan.recomputed, strict=True):
        if names:
            found[number[block[-1]]] = tuple(number[name] for name in names)
    return tuple(found)


def in_order_of(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with its nodes in the order of a plan's forward."""
    order = tuple(name for block in plan.blocks for name in block)
    if order == graph.names:
        return graph
    nodes = {node.name: node for node in graph.nodes}
    return Graph([nodes[name] for name in order], graph.edges, graph.forward_bytes)
