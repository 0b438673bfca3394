"""Planning recomputation: pure functions of a graph that know no device.

A `Graph` has a node for each function call of a forward pass. `plan` decides what to keep and
what to recompute or offload so that a step fits a budget, `simulate` carries a plan out on a toy
machine and checks it. An executor follows `umem.planner.schedule.actions`.
"""

from typing import TYPE_CHECKING

from umem.planner.chains import Family
from umem.planner.dispatch import min_budget, pareto, plan, register_method
from umem.planner.graph import Graph, Node
from umem.planner.link import Link, Move
from umem.planner.plans import Plan
from umem.planner.referee import simulate

__all__ = [
    "Family", "Graph", "Link", "Move", "Node", "Plan", "min_budget", "pareto", "plan",
    "register_method", "simulate",
]  # fmt: skip

if TYPE_CHECKING:
    from umem.planner.chains import forget_tables
    from umem.planner.from_trace import DRAWS, NOT_AGAIN, Cost
    from umem.planner.graph import Numbered
    from umem.planner.link import AHEAD_BYTES, IN_FLIGHT_BYTES
    from umem.planner.link_timetable import OffloadWindow, timetable
    from umem.planner.plans import Method
    from umem.planner.pool_gaps import FIRST_GAPS, LEAST_GAPS, PLAIN_GAPS, SETTLED, PoolGaps
    from umem.planner.problem import CallFacts, Problem, Solution
    from umem.planner.schedule import Kind, actions, agenda
    from umem.planner.usage_of_actions import ScheduleUsage, usage
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        chains="forget_tables",
        from_trace="Cost DRAWS NOT_AGAIN",
        graph="Numbered",
        link="AHEAD_BYTES IN_FLIGHT_BYTES",
        link_timetable="OffloadWindow timetable",
        plans="Method",
        pool_gaps="FIRST_GAPS LEAST_GAPS PLAIN_GAPS PoolGaps SETTLED",
        problem="CallFacts Problem Solution",
        schedule="Kind actions agenda",
        usage_of_actions="ScheduleUsage usage",
    )
