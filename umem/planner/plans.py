"""A plan, as blocks of calls and as recomputations before each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from umem.errors import GraphError
from umem.planner.checks import shown
from umem.planner.graph import Graph
from umem.planner.link import Link, Move

Method = str
"""The name of a method, see `umem.planner.chains.METHODS`; ``auto``: the best of several."""
Objective = Literal["time", "memory"]
Model = Literal["kusumoto", "saved"]
OBJECTIVES = ("time", "memory")
MODELS: tuple[Model, ...] = ("kusumoto", "saved")
Reruns = tuple[tuple[int, ...], ...]
"""By node, the calls to recompute before its step of backward, in order."""


@dataclass(frozen=True)
class Plan:
    """The values that are kept or offloaded, and the calls to recompute for each block.

    Attributes:
        blocks: the nodes of each block, in the order in which forward runs them.
        kept: the nodes whose outputs are kept from forward into backward, offloaded or not.
        recomputed: for each block, the calls to recompute before its backward, in order.
        stashed: the nodes whose function state is kept from forward on.
        overhead: the cost of all recomputations.
        peak_bytes: the most bytes that the model counts at once.
        method: the algorithm that found the plan.
        objective: ``time`` or ``memory``, see `umem.planner.plan`.
        model: the cost model by which bytes were counted.
        budget_bytes: the budget for which the plan was made.
        frees_early: True if a kept value is freed after its last use; otherwise it stays until the
            backward of its own block begins.
        moves: the kept values and function state that are offloaded in between, with the times.
        link: the link for which the plan was made; None: it was made without one.
    """

    blocks: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]
    recomputed: tuple[tuple[str, ...], ...]
    stashed: tuple[str, ...]
    overhead: float
    peak_bytes: int
    method: Method
    objective: Objective
    model: Model
    budget_bytes: int
    frees_early: bool = False
    moves: tuple[Move, ...] = ()
    link: Link | None = None


def checked_model(model: str) -> Model:
    """Return the model of a name.

    Raises:
        GraphError: no model has that name.
    """
    for known in MODELS:
        if model == known:
            return known
    raise GraphError(f"model must be one of {', '.join(MODELS)}; got {shown(model)}")


def reruns_of(graph: Graph, plan: Plan) -> Reruns:
    """Return the recomputations of a plan whose forward has the order of the nodes."""
    number = {name: v for v, name in enumerate(graph.numbered.names)}
    found: list[tuple[int, ...]] = [()] * len(number)
    for block, names in zip(plan.blocks, plan.recomputed, strict=True):
        if names:
            found[number[block[-1]]] = tuple(number[name] for name in names)
    return tuple(found)


def plan_by_reruns(graph: Graph, reruns: Reruns, method: Method) -> Plan:
    """Make a plan with one block a node, whose backward has the reverse order of the nodes.

    Every value is freed after its last use, kept or not. The plan's bytes are not counted: they are
    0.
    """
    g = graph.numbered
    kept, stashed, made = set[int](), set[int](), set[int]()
    for v in reversed(range(len(reruns))):
        for w in reruns[v]:
            kept.update(x for x in g.preds[w] if x not in made)
            made.add(w)
        kept.update(x for x in g.needs[v] if x not in made)
        if g.stash[v] and v not in made:
            stashed.add(v)
    return Plan(
        blocks=tuple((name,) for name in g.names),
        kept=tuple(g.names[v] for v in sorted(kept)),
        recomputed=tuple(tuple(g.names[v] for v in rerun) for rerun in reruns),
        stashed=tuple(g.names[v] for v in sorted(stashed)),
        overhead=sum(g.cost[v] for rerun in reruns for v in rerun),
        peak_bytes=0,
        method=method,
        objective="time",
        model="saved",
        budget_bytes=0,
        frees_early=True,
    )
