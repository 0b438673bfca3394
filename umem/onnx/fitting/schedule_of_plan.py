"""A plan as a list of actions on the operators of a model, for an executor in any framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from umem.planner.problem import Problem, Solution
from umem.planner.schedule import actions


class ScheduledAction(NamedTuple):
    """An action on one call, see `umem.planner.schedule.Action`."""

    do: str
    node: str


@dataclass(frozen=True)
class Schedule:
    """A plan as a list of actions; simulated.

    Attributes:
        peak_bytes: the peak under the plan, workspace and optimizer state included.
        kept: the calls whose outputs stay from forward into backward, in memory or offloaded.
        recomputed: the calls that are recomputed in backward.
        offloaded: the calls of which outputs or function state are offloaded.
        actions: the actions of forward and backward, in order.
    """

    peak_bytes: int
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...]
    actions: tuple[ScheduledAction, ...]
    simulated: Literal[True] = True


def schedule_of(problem: Problem, solution: Solution, names: Sequence[str]) -> Schedule:
    """Return the schedule of a plan.

    Args:
        problem: what was planned.
        solution: the plan.
        names: the names of the problem's calls, in order.
    """
    by_node = dict(zip(problem.names, names, strict=True))
    plan = solution.plan
    return Schedule(
        solution.peak_bytes,
        tuple(by_node[node] for node in plan.kept),
        tuple(by_node[node] for block in plan.recomputed for node in block),
        tuple(dict.fromkeys(by_node[move.node] for move in plan.moves)),
        tuple(ScheduledAction(kind, by_node[n]) for kind, n in actions(solution.graph, plan)),
    )
