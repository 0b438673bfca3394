"""The optimum of recomputation, as an integer programme.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys
2020: stage by stage, which values are held (S), which are computed (R), and which are freed after
which computation (F). What differs: the stages of backward compute gradients once, in the order
of the plan that is compared with, so that the bytes of gradients are constants and the plan is
one of the programme's solutions. The rules are those of the referee's tape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from umem.planner import Graph, Plan
from umem.planner.graph import Numbered

Key = tuple[object, ...]
Term = tuple[Key, float]


class Optimum(NamedTuple):
    """The least overhead, if it was found in time; a bound that nothing can be below."""

    overhead: float | None
    bound: float
    status: str


class _Programme:
    """Variables by key, and rows of coefficients."""

    def __init__(self) -> None:
        self.columns: dict[Key, int] = {}
        self.low: list[float] = []
        self.high: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []

    def variable(self, *key: object, low: float = 0, high: float = 1) -> None:
        self.columns[key] = len(self.columns)
        self.low.append(low)
        self.high.append(high)

    def at_most(self, terms: list[Term], limit: float) -> None:
        """Terms of variables that are not there are zero."""
        row = len(self._limits)
        self._limits.append(limit)
        for key, factor in terms:
            if key in self.columns:
                self._entries.append((row, self.columns[key], factor))

    def solve(self, cost: dict[Key, float], seconds: float) -> Any:
        rows, columns, values = zip(*self._entries, strict=True)
        shape = (len(self._limits), len(self.columns))
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        weights = np.zeros(len(self.columns))
        whole = np.zeros(len(self.columns))
        for key, column in self.columns.items():
            weights[column] = cost.get(key, 0)
            whole[column] = key[0] in "RS"
        return milp(
            weights,
            integrality=whole,
            bounds=Bounds(self.low, self.high),
            constraints=LinearConstraint(matrix, -np.inf, self._limits),
            options={"time_limit": seconds},
        )


def optimum(graph: Graph, plan: Plan, budget_bytes: int, seconds: float) -> Optimum:
    """The least overhead within a budget, in the order of a plan for a tape."""
    g = graph.numbered
    number = {name: v for v, name in enumerate(g.names)}
    forward = [number[name] for block in plan.blocks for name in block]
    backward = [number[name] for block in reversed(plan.blocks) for name in reversed(block)]
    stages = list(_stages(g, forward, backward, budget_bytes))
    p = _Programme()
    for s, stage in enumerate(stages):
        for v in stage.nodes:
            p.variable("R", s, v, low=1 if stage.runs == v else 0)
            if s and v in stages[s - 1].nodes:
                p.variable("S", s, v)
    for s, stage in enumerate(stages):
        _constrain(p, g, s, stage, max(1, budget_bytes) / 1000)
    cost = {("R", s, v): g.cost[v] for s, stage in enumerate(stages) for v in stage.nodes}
    found = p.solve(cost, seconds)
    once = sum(g.cost)
    bound = max(0.0, (found.mip_dual_bound or 0) - once) if found.status in (0, 1) else 0.0
    overhead = None if found.x is None else found.fun - once
    word = {0: "optimal", 1: "time-out", 2: "infeasible"}.get(found.status, "failed")
    return Optimum(overhead, bound, word)


class _Stage(NamedTuple):
    """A call of forward or a step of backward, and what may run again just before it.

    ``nodes`` are the values that may be there, in order; ``room`` is for them while things run
    again, ``last_room`` during the step of backward itself.
    """

    nodes: list[int]
    runs: int | None
    needs: set[int]
    room: int
    last_room: int | None


def _stages(g: Numbered, forward: list[int], backward: list[int], budget: int) -> Iterator[_Stage]:
    for s, v in enumerate(forward):
        yield _Stage(forward[: s + 1], v, set(), budget - g.forward_bytes, None)
    grads: set[int] = set()
    stayed = 0
    for s, v in enumerate(backward):
        done = set(backward[:s])
        before = sum(g.grad[x] for x in grads) + stayed
        grads |= {v, *g.preds[v]}
        stayed += g.stays[v]
        during = sum(g.grad[x] for x in grads) + stayed
        grads.remove(v)
        left = [x for x in forward if x not in done]  # nothing reads the others any more
        yield _Stage(left, None, set(g.needs[v]), budget - before, budget - during)


def _constrain(p: _Programme, g: Numbered, s: int, stage: _Stage, unit: float) -> None:
    """The rows of one stage; bytes are divided by a unit, so that rows are well scaled."""
    used: list[Term] = [(("S", s, v), g.size[v] / unit) for v in stage.nodes]
    for v in stage.nodes:
        p.at_most([(("S", s, v), 1), (("R", s - 1, v), -1), (("S", s - 1, v), -1)], 0)
        for x in g.preds[v]:
            p.at_most([(("R", s, v), 1), (("R", s, x), -1), (("S", s, x), -1)], 0)
        if v in stage.needs:
            p.at_most([(("R", s, v), -1), (("S", s, v), -1)], -1)
    for at, v in enumerate(stage.nodes):
        used.append((("R", s, v), g.size[v] / unit))
        p.at_most(used, stage.room / unit)
        for x in (*g.preds[v], v):
            if x not in stage.needs:
                _free(p, g, s, x, v, stage.nodes[at + 1 :])
                used.append((("F", s, x, v), -g.size[x] / unit))
    if stage.last_room is not None:
        p.at_most(used, stage.last_room / unit)


def _free(p: _Programme, g: Numbered, s: int, x: int, v: int, later: list[int]) -> None:
    """x may go after v has run, if it is not held any longer and nothing reads it later."""
    key = ("F", s, x, v)
    p.variable(*key)
    p.at_most([(key, 1), (("R", s, v), -1)], 0)
    p.at_most([(key, 1), (("S", s + 1, x), 1)], 1)
    for w in later:
        if w in g.succs[x]:
            p.at_most([(key, 1), (("R", s, w), 1)], 1)
