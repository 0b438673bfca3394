"""Planning recomputation: pure functions of a graph that know no device.

A `Graph` has a node for each function call of a forward pass. `plan` decides what to keep and
what to recompute or offload so that a step fits a budget, `simulate` carries a plan out on a toy
machine and checks it. An executor follows `umem.planner.schedule.actions`.
"""

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
