"""The bytes of a schedule: one sum for all planners.

The two searches that weigh thousands of schedules at a time (`saved` and `beam`) have their own
arrays, and take the bytes of gradients from here; tests check that their sums equal `usage` of the
plan's actions. `umem.planner.referee` counts independently, because it checks the planners.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from umem.planner.graph import Graph
from umem.planner.schedule import Action, Kind


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
        """Return the most bytes in use at once; 0 without actions."""
        return max(self.during_bytes, default=0)

    @property
    def highest(self) -> Action:
        """Return the first action that reaches the peak.

        Raises:
            ValueError: there is no action.
        """
        return self.actions[self.during_bytes.index(max(self.during_bytes))]


def usage(graph: Graph, actions: Iterable[Action]) -> ScheduleUsage:
    """Count the bytes in use during each action of a tape's schedule.

    It checks nothing; `umem.planner.referee.referee` refuses a schedule that cannot be carried out.
    Cost: proportional to the actions, and to the inputs of each step of backward.

    Args:
        graph: the graph that was planned.
        actions: its schedule, such as from `umem.planner.schedule.actions`.
    """
    tally = _Tally(graph)
    done = tuple(actions)
    return ScheduleUsage(done, tuple([tally.act(action) for action in done]))


class _Tally:
    """The bytes that are allocated, action by action."""

    def __init__(self, graph: Graph) -> None:
        self.g = graph.numbered
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
        self._bytes += g.stash[v]
        return self._bytes + g.workspace[v] + (g.forward_bytes if is_first else 0)

    def _backward(self, v: int) -> int:
        """Allocate the gradients that a step of backward makes; return the bytes in use then."""
        g = self.g
        for x in (v, *g.preds[v]):
            if x not in self._gradients:
                self._gradients.add(x)
                self._bytes += g.grad[x]
        self._bytes += g.stays[v]
        return self._bytes + g.backward_workspace[v]

    def _hold(self, root: int, views: int) -> None:
        """Count ``views`` more live values in a node's bytes, which are freed with the last one."""
        had = self._views[root] > 0
        self._views[root] += views
        self._bytes += self.g.size[root] * ((self._views[root] > 0) - had)


class GradientBytes(NamedTuple):
    """The bytes beside values and function state at one step of backward.

    Attributes:
        before: gradients in memory before the step, parameters' gradients included.
        during: the same while the step runs, with the gradients that it makes and its workspace.
    """

    before: int
    during: int


@lru_cache(maxsize=8)
def gradient_bytes(graph: Graph) -> tuple[GradientBytes, ...]:
    """Return the bytes of gradients at each step of backward, in the reverse order of the nodes.

    They do not depend on a plan. Indexed by node; cost: proportional to nodes and edges.
    """
    around: tuple[Kind, ...] = ("send", "backward", "free")  # to send allocates nothing
    stream = [Action(kind, name) for name in reversed(graph.names) for kind in around]
    during = usage(graph, stream).during_bytes
    return tuple(map(GradientBytes, during[::3], during[1::3]))[::-1]


def floor(graph: Graph) -> tuple[int, str]:
    """Return the bytes that every plan without a link needs, and the call that forces them.

    They are the most that one call needs at once, forward or backward, with the gradients of
    parameters that backward has made by then. Cost: proportional to nodes and edges.
    """
    g, stayed = graph.numbered, 0
    found = (0, "nothing")
    for v in reversed(range(len(g.names))):
        stayed += g.stays[v]
        read = {g.root[x] for x in (*g.preds[v], v)}
        forward = sum(g.size[x] for x in read) + g.stash[v] + g.workspace[v] + g.forward_bytes
        backward = sum(g.size[x] for x in {g.root[x] for x in g.needs[v]}) + g.stash[v]
        backward += sum(g.grad[x] for x in (v, *g.preds[v])) + g.backward_workspace[v] + stayed
        if not (g.needs[v] or g.grad[v]):  # backward may not reach it
            backward = 0
        found = max(found, (max(forward, backward), g.names[v]))
    return found
