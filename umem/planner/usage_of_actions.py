"""The bytes of a schedule: one sum for all planners.

Planners that must weigh thousands of schedules keep tables of their own (`saved`, `prefixes`,
`timetable`, `beam_facts`), which take the bytes of gradients from here; tests hold that their sums
are `usage` of the plan's actions. `umem.planner.referee` counts for itself, because it checks the
planners.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from umem.planner.graph import Graph
from umem.planner.plans import Model
from umem.planner.schedule import Action


class ScheduleUsage(NamedTuple):
    """The bytes in use during each action of a schedule.

    Attributes:
        actions: the schedule.
        during_bytes: by action, the bytes in use while it runs, its workspace included.
    """

    actions: tuple[Action, ...]
    during_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use at once; 0 for no action."""
        return max(self.during_bytes, default=0)

    @property
    def highest(self) -> Action:
        """Return the first action that reaches the peak.

        Raises:
            ValueError: there is no action.
        """
        return self.actions[self.during_bytes.index(max(self.during_bytes))]


def usage(graph: Graph, actions: Iterable[Action], model: Model = "saved") -> ScheduleUsage:
    """Count the bytes in use during each action of a schedule.

    Nothing is checked; `umem.planner.referee.referee` refuses a schedule that cannot be carried
    out. Cost: proportional to the actions, and to the inputs of each step of backward.

    Args:
        graph: the graph that was planned.
        actions: its schedule, such as `umem.planner.schedule.actions` makes one.
        model: the model whose rules of backward hold: under ``saved`` a step of backward allocates
            the gradients of its inputs, under ``kusumoto`` that of its output; function state and
            workspace count under ``saved`` alone.
    """
    tally = _Tally(graph, model)
    done = tuple(actions)
    return ScheduleUsage(done, tuple([tally.act(action) for action in done]))


class _Tally:
    """The bytes that are allocated, action by action."""

    def __init__(self, graph: Graph, model: Model) -> None:
        self.g = graph.numbered
        self._is_tape = model == "saved"
        self._number = {name: v for v, name in enumerate(self.g.names)}
        self._views = [0] * len(self.g.names)  # by node, the live values that lie in its bytes
        self._offloaded: dict[int, int] = {}  # by node, the same when its bytes were offloaded
        self._gradients = set[int]()
        self._bytes = 0

    def act(self, action: Action) -> int:
        """Count one action; return the bytes in use while it runs."""
        kind, v = action.kind, self._number[action.node]
        before = self._bytes
        if kind in ("forward", "recompute"):
            return self._run(v, is_first=kind == "forward")
        if kind == "backward":
            return self._backward(v)
        if kind == "drop":
            self._hold(self.g.root[v], -1)
        elif kind == "leave":
            self._offloaded[v] = self._views[v]
            self._hold(v, -self._views[v])
        elif kind == "fetch":
            self._hold(v, self._offloaded.pop(v))
        elif kind in ("drop_stash", "leave_stash"):
            self._bytes -= self.g.stash[v]
        elif kind == "fetch_stash":
            self._bytes += self.g.stash[v]
        elif kind == "free":
            self._gradients.remove(v)
            self._bytes -= self.g.grad[v]
        return max(before, self._bytes)

    def _run(self, v: int, *, is_first: bool) -> int:
        g = self.g
        self._hold(g.root[v], 1)
        if not self._is_tape:
            return self._bytes
        self._bytes += g.stash[v]
        return self._bytes + g.workspace[v] + (g.forward_bytes if is_first else 0)

    def _backward(self, v: int) -> int:
        """Allocate the gradients that a step of backward makes; return the bytes in use then."""
        g = self.g
        made = (v, *g.preds[v]) if self._is_tape else (v,)
        for x in made:
            if x not in self._gradients:
                self._gradients.add(x)
                self._bytes += g.grad[x]
        if not self._is_tape:
            return self._bytes
        self._bytes += g.stays[v]
        return self._bytes + g.backward_workspace[v]

    def _hold(self, root: int, views: int) -> None:
        """Count ``views`` more live values in a node's bytes, which are freed with the last."""
        had = self._views[root] > 0
        self._views[root] += views
        self._bytes += self.g.size[root] * ((self._views[root] > 0) - had)


class GradientBytes(NamedTuple):
    """The bytes beside values and function state at one step of backward.

    Attributes:
        before: gradients in memory before the step, those of parameters included.
        during: the same while the step runs, with the gradients that it makes and its workspace.
    """

    before: int
    during: int


@lru_cache(maxsize=8)
def gradient_bytes(graph: Graph) -> tuple[GradientBytes, ...]:
    """Return the bytes of gradients at each step of backward, in the reverse order of the nodes.

    They depend on no plan. Indexed by node; cost: proportional to nodes and edges.
    """
    g = graph.numbered
    found = [GradientBytes(0, 0)] * len(g.names)
    alive, held = set[int](), 0
    for v in reversed(range(len(g.names))):
        before = held
        for x in (v, *g.preds[v]):
            if x not in alive:
                alive.add(x)
                held += g.grad[x]
        held += g.stays[v]
        found[v] = GradientBytes(before, held + g.backward_workspace[v])
        alive.remove(v)
        held -= g.grad[v]
    return tuple(found)
