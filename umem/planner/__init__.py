"""Plan recomputation and offload, by pure functions of a graph that use no device.

A `Graph` has a node for each function call of a forward pass. `plan` decides which values to keep,
recompute or offload so that a step fits a budget; `simulate` carries a plan out on a toy machine
and checks it. An executor follows `umem.planner.schedule.actions`. chainer and onnx use it.

    graph.py, node.py   are the graph to plan: a node a function call
    from_trace.py       makes a graph of a recorded step
    problem.py          is a whole pass: its calls, the bytes beside them, floor and plain step
    checks.py           checks users' arguments
    dispatch.py         has `plan`, `min_budget` and `pareto`, and chooses the algorithm
    lower_sets.py       has the families of lower sets between which chains of blocks step
    step_table.py       has the costs of all steps between them, as bit masks
    chains.py           makes plans of chains, one method a family
    search.py           is the one search for a chain
    backward_order.py   is a second order of the calls, whose backward may need fewer bytes
    saved.py            is the cost model of a tape: saved tensors, freed as early as can be
    kusumoto/           is the cost model and the planners of a paper, unchanged
    rematerialize.py    makes plans that recompute a call several times
    beam.py             is their search, beam_facts.py its states
    keep_recompute_offload.py  makes plans that keep, recompute or offload each value
    link.py             is the link to the offload target, and the time that copies take
    link_timetable.py   has a plan's computations in order, and the windows for offloading
    offload_schedule.py decides when each value is sent, and when it is fetched
    plans.py            is a plan: blocks of calls, or recomputations before each step
    schedule.py         turns a plan into a stream of actions
    usage_of_actions.py counts the bytes of actions, for all planners
    referee.py          carries a plan out and checks each action
    pool_gaps.py        estimates the share of gaps in a GPU's pool
    prefetch/           plans paging

- Bytes are counted in two places: by `usage`, for all planners, and by the referee, which checks
  the planners with its own counts.
- Only problem.py defines the budgets, the floor and the plain step of a pass.
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
