"""The plan, a planner's decision, and the names of methods, objectives and models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from umem.errors import GraphError
from umem.planner.checks import shown
from umem.planner.link import Link, Move

Method = str
"""The name of a method, see `umem.planner.dispatch.METHODS`; ``auto`` takes the best of several."""
Objective = Literal["time", "memory"]
Model = Literal["kusumoto", "saved"]
OBJECTIVES = ("time", "memory")
MODELS: tuple[Model, ...] = ("kusumoto", "saved")


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
        budget_bytes: the budget that the plan was made for.
        frees_early: True if a kept value is freed after its last use; otherwise it stays until the
            backward of its own block begins.
        moves: the kept values and function state that are offloaded over a link in between, and
            when.
        link: the link that the plan was made for; None: it was made without one.
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
    renamed = "; 'paper' is called 'kusumoto' now" if model == "paper" else ""
    raise GraphError(f"model is one of {', '.join(MODELS)}; got {shown(model)}{renamed}")
