"""The optimum of recomputation, as an integer programme.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys
2020: stage by stage, which values are held (S), which are computed (R), and which are freed after
which computation (F). What differs: the stages of backward compute gradients once, in the order
of the plan that is compared with, so that the bytes of gradients are constants and the plan is
one of the programme's solutions; stashes are held (T) and freed (G) beside values; a view is
held with its base; and in forward every call runs once, because the program itself holds what it
still reads. The rules are those of the referee's tape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from umem.planner import Graph, Numbered, Plan

Key = tuple[object, ...]
Term = tuple[Key, float]
BUDGET: Key = ("B",)
"""The variable that stands for the budget where the least is asked for."""


class Optimum(NamedTuple):
    """The least that was found, overhead or bytes; a bound that nothing can be below."""

    least: float | None
    bound: float
    status: str


class IntegerProgram:
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
        """Solve the program by SciPy's branch and bound, within some seconds."""
        rows, columns, values = zip(*self._entries, strict=True)
        shape = (len(self._limits), len(self.columns))
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        weights = np.zeros(len(self.columns))
        whole = np.zeros(len(self.columns))
        for key, column in self.columns.items():
            weights[column] = cost.get(key, 0)
            whole[column] = key[0] in "RST"
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
    stages = stages_of(g, plan)
    p = integer_program(g, stages, budget_bytes)
    cost = {("R", s, v): g.cost[v] for s, stage in enumerate(stages) for v in stage.nodes}
    return _solved(p, cost, seconds, sum(g.cost))


def least_budget(graph: Graph, plan: Plan, seconds: float) -> Optimum:
    """The least bytes that anything can be done in, in the order of a plan for a tape."""
    g = graph.numbered
    unit = max(1, plan.peak_bytes) / 1000
    stages = stages_of(g, plan)
    p = integer_program(g, stages, None, unit)
    found = _solved(p, {BUDGET: 1}, seconds, 0)
    least = None if found.least is None else found.least * unit
    return Optimum(least, found.bound * unit, found.status)


def _solved(p: IntegerProgram, cost: dict[Key, float], seconds: float, beside: float) -> Optimum:
    found = p.solve(cost, seconds)
    bound = max(0.0, (found.mip_dual_bound or 0) - beside) if found.status in (0, 1) else 0.0
    least = None if found.x is None else found.fun - beside
    word = {0: "optimal", 1: "time-out", 2: "infeasible"}.get(found.status, "failed")
    return Optimum(least, bound, word)


# -- stages ------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A call of forward or a step of backward, and what may run again just before it.

    ``nodes`` are the values that may be there, in order; ``beside`` are the bytes that are there
    beside them while things run again, ``last`` those during the step of backward itself.
    """

    nodes: list[int]
    runs: int | None
    steps: int | None
    needs: set[int]
    beside: int
    last: int


def stages_of(g: Numbered, plan: Plan) -> list[Stage]:
    number = {name: v for v, name in enumerate(g.names)}
    order = [number[name] for block in plan.blocks for name in block]
    return list(_stages(g, order))


def _stages(g: Numbered, forward: list[int]) -> Iterator[Stage]:
    """Yield the stages of a pass: a call forward each, then a call backward each."""
    for s, v in enumerate(forward):
        yield Stage(forward[: s + 1], v, None, set(), g.forward_bytes, 0)
    grads: set[int] = set()
    stayed = 0
    for s, v in enumerate(reversed(forward)):
        before = sum(g.grad[x] for x in grads) + stayed
        grads |= {v, *g.preds[v]}
        stayed += g.stays[v]
        during = sum(g.grad[x] for x in grads) + stayed + g.backward_workspace[v]
        grads.remove(v)
        left = forward[: len(forward) - s]  # nothing reads the others any more
        yield Stage(left, None, v, set(g.needs[v]), before, during)


# -- rows --------------------------------------------------------------------------------------


def integer_program(
    g: Numbered, stages: list[Stage], budget: int | None, unit: float | None = None
) -> IntegerProgram:
    """All rows; bytes are divided by a unit, so that they are well scaled."""
    p = IntegerProgram()
    if budget is None:
        p.variable(*BUDGET, high=np.inf)
    unit = unit or max(1, budget or 0) / 1000
    for s, stage in enumerate(stages):
        for v in stage.nodes:
            may = g.recomputable[v] and stage.runs is None
            if may or stage.runs == v:
                p.variable("R", s, v, low=1 if stage.runs == v else 0)
            if s and v in stages[s - 1].nodes:
                p.variable("S", s, v)
                if g.stash[v]:
                    p.variable("T", s, v)
    for s, stage in enumerate(stages):
        _hold(p, g, s, stage)
        _count(p, g, s, stage, budget, unit)
    return p


def _hold(p: IntegerProgram, g: Numbered, s: int, stage: Stage) -> None:
    """What is held was made or held before; what runs or goes backward finds what it reads."""
    for v in stage.nodes:
        for kind in "ST":
            held = [(("R", s - 1, v), -1), ((kind, s - 1, v), -1)]
            p.at_most([((kind, s, v), 1), *held], 0)
        if g.root[v] != v:
            p.at_most([(("S", s, v), 1), (("S", s, g.root[v]), -1)], 0)
        for x in g.preds[v]:
            p.at_most([(("R", s, v), 1), (("R", s, x), -1), (("S", s, x), -1)], 0)
        if v in stage.needs:
            p.at_most([(("R", s, v), -1), (("S", s, v), -1)], -1)
        if v == stage.steps and g.stash[v]:
            p.at_most([(("R", s, v), -1), (("T", s, v), -1)], -1)


def _count(
    p: IntegerProgram, g: Numbered, s: int, stage: Stage, budget: int | None, unit: float
) -> None:
    """The bytes during each computation of a stage, and during its step of backward."""
    used: list[Term] = [(("S", s, v), g.size[v] / unit) for v in stage.nodes]
    used += [(("T", s, v), g.stash[v] / unit) for v in stage.nodes]
    if budget is None:
        used.append((BUDGET, -1))
    readers, needed = _readers(g), {g.root[x] for x in stage.needs}
    for at, v in enumerate(stage.nodes):
        if ("R", s, v) not in p.columns:
            continue
        used.append((("R", s, v), (g.size[v] + g.stash[v]) / unit))
        workspace = (("R", s, v), g.workspace[v] / unit)
        p.at_most([*used, workspace], ((budget or 0) - stage.beside) / unit)
        for x in {g.root[x] for x in (*g.preds[v], v)} - needed:
            if g.size[x]:
                later = [w for w in stage.nodes[at + 1 :] if w in readers[x]]
                _free(p, ("F", s, x, v), s, ("S", s + 1, x), later)
                used.append((("F", s, x, v), -g.size[x] / unit))
        if g.stash[v] and v != stage.steps:
            _free(p, ("G", s, v, v), s, ("T", s + 1, v), [])
            used.append((("G", s, v, v), -g.stash[v] / unit))
    if stage.steps is not None:
        p.at_most(used, ((budget or 0) - stage.last) / unit)


def _readers(g: Numbered) -> list[set[int]]:
    """Who reads each node's bytes, through its views too."""
    found: list[set[int]] = [set() for _ in g.names]
    for v, root in enumerate(g.root):
        found[root].update(g.succs[v])
    return found


def _free(p: IntegerProgram, key: Key, s: int, held: Key, later: list[int]) -> None:
    """x may go after v has run, if it is not held any longer and nothing reads it later."""
    p.variable(*key)
    p.at_most([(key, 1), (("R", s, key[-1]), -1)], 0)
    p.at_most([(key, 1), (held, 1)], 1)
    for w in later:
        p.at_most([(key, 1), (("R", s, w), 1)], 1)
