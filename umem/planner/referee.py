"""The referee: carries a plan out on a toy machine and checks every action; trusts no planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from umem.errors import BudgetError, GraphError
from umem.planner.checks import checked_budget
from umem.planner.graph import Graph
from umem.planner.link import Key, Link, LinkClock
from umem.planner.plans import Model, Plan
from umem.planner.schedule import Action, actions
from umem.units import format_bytes


class Moment(NamedTuple):
    """An action of a schedule, the bytes in use during it (workspace included) and after it."""

    action: Action
    during_bytes: int
    after_bytes: int


class Simulation(NamedTuple):
    """The bytes, the work and the time that carrying a plan out took.

    Attributes:
        peak_bytes: the most bytes in use at once.
        overhead: the cost of all recomputations.
        timeline: every action with the bytes in use.
        seconds: the time of the step in units of cost: forward, recomputation, backward, and
            waiting for copies.
        sent_bytes, fetched_bytes: the bytes copied over the link, out and in.
    """

    peak_bytes: int
    overhead: float
    timeline: tuple[Moment, ...]
    seconds: float = 0.0
    sent_bytes: int = 0
    fetched_bytes: int = 0


def simulate(
    graph: Graph,
    plan: Plan,
    liveness: bool = True,
    budget_bytes: int | None = None,
    *,
    model: Model | None = None,
    link: Link | None = None,
) -> Simulation:
    """Carry a plan out on a toy machine, and check at every action that its inputs are in memory.

    Args:
        graph: the graph that was planned.
        plan: its plan.
        liveness: free values after their last use, not at the end of their block.
        budget_bytes: the most bytes at any action; None: no limit.
        model: the model whose rules of backward hold; None: the plan's own.
        link: the link that values are offloaded over; None: the plan's own, and where it has none,
            copies take no time.

    Raises:
        GraphError: an action cannot be carried out, or one is missing; names the node.
        BudgetError: an action needs more than the budget; names the action.

    >>> from umem.planner import Node, plan
    >>> graph = Graph([Node(n, 4, 1) for n in "abc"], [("a", "b"), ("b", "c")])
    >>> simulate(graph, plan(graph, method="store_all", model="saved")).peak_bytes
    20
    """
    if not isinstance(graph, Graph) or not isinstance(plan, Plan):
        found = f"a {type(graph).__name__} and a {type(plan).__name__}"
        raise GraphError(f"simulate takes a umem.planner.Graph and its Plan; got {found}")
    stream = actions(graph, plan, liveness=liveness, model=model)
    return referee(graph, stream, model or plan.model, budget_bytes, link or plan.link)


def referee(
    graph: Graph,
    stream: Iterable[Action],
    model: Model = "saved",
    budget_bytes: int | None = None,
    link: Link | None = None,
) -> Simulation:
    """Carry any stream of actions out on a toy machine; arguments and errors as in `simulate`."""
    budget_bytes = checked_budget(budget_bytes)
    machine = _Machine(graph, model, link)
    for action in stream:
        moment = machine.act(action)
        if budget_bytes is not None and moment.during_bytes > budget_bytes:
            raise BudgetError(
                f"{action.kind} of {action.node!r} needs {format_bytes(moment.during_bytes)}, "
                f"and the budget is {format_bytes(budget_bytes)}"
            )
    machine.finish()
    clock = machine.clock
    return Simulation(
        machine.peak,
        machine.overhead,
        tuple(machine.timeline),
        clock.now,
        clock.sent_bytes,
        clock.fetched_bytes,
    )


class _Machine:
    """A toy machine: the values in its memory, and the actions that were done."""

    def __init__(self, graph: Graph, model: Model, link: Link | None) -> None:
        self.g = graph.numbered
        self.model = model
        self._number = {name: v for v, name in enumerate(self.g.names)}
        self._values: set[int] = set()
        self._holders = [0] * len(self.g.names)  # number of live values in a node's bytes
        self._stashes: set[int] = set()
        self._grads: set[int] = set()
        self._sent: set[Key] = set()
        self._away: dict[Key, list[int]] = {}  # with the values in those bytes
        self.clock = LinkClock(link)
        self._ran: set[int] = set()
        self._backed: set[int] = set()
        self._bytes = 0
        self.peak = 0
        self.overhead: float = 0
        self.timeline: list[Moment] = []
        self._rules = {
            "forward": self._forward,
            "recompute": self._recompute,
            "drop": self._drop,
            "drop_stash": self._drop_stash,
            "free": self._free,
            "backward": self._pushed if model == "saved" else self._pulled,
            "send": self._send,
            "leave": self._leave,
            "fetch": self._fetch,
            "send_stash": self._send_stash,
            "leave_stash": self._leave_stash,
            "fetch_stash": self._fetch_stash,
        }

    def act(self, action: Action) -> Moment:
        """Carry one action out; raise `GraphError` if that is impossible or out of turn."""
        v = self._number.get(action.node)
        if v is None or action.kind not in self._rules:
            raise GraphError(f"{action} is no action on this graph")
        self._now = action
        during = self._rules[action.kind](v)
        moment = Moment(action, during, self._bytes)
        self.peak = max(self.peak, during)
        self.timeline.append(moment)
        return moment

    def finish(self) -> None:
        """Check that every call ran forward and backward, and that nothing is left in memory.

        Raises:
            GraphError: names the node.
        """
        every = set(range(len(self.g.names)))
        for what, done in (("forward", self._ran), ("backward", self._backed)):
            for v in sorted(every - done):
                raise GraphError(f"{what} of {self.g.names[v]!r} was never done")
        for left in (self._values, self._stashes, self._grads):
            for v in sorted(left):
                raise GraphError(f"something of {self.g.names[v]!r} is left at the end")
        for _, v in sorted((*self._sent, *self._away)):
            raise GraphError(f"something of {self.g.names[v]!r} was moved and never came back")

    def _check(self, holds: bool, why: str, v: int) -> None:
        if not holds:
            kind, node = self._now
            raise GraphError(f"{kind} of {node!r}: {why} {self.g.names[v]!r}")

    # -- forward ---------------------------------------------------------------------------

    def _forward(self, v: int) -> int:
        self._check(v not in self._ran, "forward was done of", v)
        self._ran.add(v)
        forward = self.g.forward_bytes if self.model == "saved" else 0
        return self._run(v) + forward

    def _recompute(self, v: int) -> int:
        self._check(v in self._ran, "forward was not done of", v)
        self._check(v not in self._backed, "backward was done of", v)
        self._check(self.g.recomputable[v], "it must not be run twice:", v)
        self.overhead += self.g.cost[v]
        return self._run(v)

    def _run(self, v: int) -> int:
        """Run a call, in forward or recomputed; return the bytes in use during it."""
        for x in self.g.preds[v]:
            self._read(x, "it reads what is not there:")
        self._check(v not in self._values, "it is there:", v)
        self._check(("value", self.g.root[v]) not in self._away, "it is away:", v)
        self._hold(v)
        self.clock.run(self.g.cost[v])
        if self.model == "kusumoto":
            return self._bytes
        self._check(v not in self._stashes, "its stash is there:", v)
        self._check(("stash", v) not in self._away, "its stash is away:", v)
        if self.g.stash[v]:
            self._stashes.add(v)
            self._bytes += self.g.stash[v]
        return self._bytes + self.g.workspace[v]

    # -- backward --------------------------------------------------------------------------

    def _pushed(self, v: int) -> int:
        """Run a step of a tape's backward, which adds to the gradients of its inputs."""
        self._begin(v)
        for x in self.g.needs[v]:
            self._read(x, "it needs what is not there:")
        if self.g.stash[v]:
            self._check(v in self._stashes, "its stash is not there:", v)
            self.clock.wait(("stash", v))
        if not self.g.succs[v]:
            self._add_grad(v)  # where backward starts
        self._check(v in self._grads, "it has no gradient:", v)
        for x in self.g.preds[v]:
            self._add_grad(x)
        self._bytes += self.g.stays[v]
        self.clock.run(self.g.backward_cost[v])
        return self._bytes + self.g.backward_workspace[v]

    def _pulled(self, v: int) -> int:
        """Run a step of backward under ``kusumoto``: make a gradient from its users' gradients."""
        self._begin(v)
        for w in self.g.succs[v]:
            self._check(w in self._grads, "it has no gradient:", w)
            for x in self.g.preds[w]:
                self._check(x in self._values, "it needs what is not there:", x)
        self._add_grad(v)
        self.clock.run(self.g.backward_cost[v])
        return self._bytes

    def _begin(self, v: int) -> None:
        self._check(len(self._ran) == len(self.g.names), "forward is not done;", v)
        self._check(v not in self._backed, "backward was done of", v)
        for w in self.g.succs[v]:
            self._check(w in self._backed, "backward was not done of", w)
        self._backed.add(v)

    def _add_grad(self, v: int) -> None:
        if v not in self._grads:
            self._grads.add(v)
            self._bytes += self.g.grad[v]

    def _read(self, x: int, why: str) -> None:
        self._check(x in self._values, why, x)
        self.clock.wait(("value", self.g.root[x]))

    # -- freeing ---------------------------------------------------------------------------

    def _hold(self, v: int) -> None:
        root = self.g.root[v]
        if not self._holders[root]:
            self._bytes += self.g.size[root]
        self._holders[root] += 1
        self._values.add(v)

    def _drop(self, v: int) -> int:
        self._check(v in self._values, "it is not there:", v)
        before, root = self._bytes, self.g.root[v]
        self._values.remove(v)
        self._holders[root] -= 1
        if not self._holders[root]:
            self._check(("value", root) not in self._sent, "it is on its way:", v)
            self._bytes -= self.g.size[root]
        return before

    def _drop_stash(self, v: int) -> int:
        self._check(v in self._stashes, "its stash is not there:", v)
        self._check(("stash", v) not in self._sent, "its stash is on its way:", v)
        before = self._bytes
        self._stashes.remove(v)
        self._bytes -= self.g.stash[v]
        return before

    def _free(self, v: int) -> int:
        self._check(v in self._grads and v in self._backed, "it has no gradient to free:", v)
        before = self._bytes
        self._grads.remove(v)
        self._bytes -= self.g.grad[v]
        return before

    # -- offloading ------------------------------------------------------------------------

    def _begin_send(self, key: Key, nbytes: int) -> int:
        self._check(key not in self._sent, "it is on its way:", key[1])
        self._sent.add(key)
        self.clock.send(key, nbytes)
        return self._bytes

    def _end_send(self, key: Key) -> None:
        self._check(key in self._sent, "it was not sent:", key[1])
        self._sent.remove(key)
        self.clock.wait(key)

    def _begin_fetch(self, key: Key, nbytes: int) -> list[int]:
        self._check(key in self._away, "it is not away:", key[1])
        self.clock.fetch(key, nbytes)
        return self._away.pop(key)

    def _send(self, v: int) -> int:
        self._check(self._holders[v] > 0, "it is not there:", v)
        return self._begin_send(("value", v), self.g.size[v])

    def _leave(self, v: int) -> int:
        self._end_send(("value", v))
        before, gone = self._bytes, [x for x in self._values if self.g.root[x] == v]
        self._away["value", v] = gone
        for x in gone:
            self._drop(x)
        return before

    def _fetch(self, v: int) -> int:
        for x in self._begin_fetch(("value", v), self.g.size[v]):
            self._hold(x)
        return self._bytes

    def _send_stash(self, v: int) -> int:
        self._check(v in self._stashes, "its stash is not there:", v)
        return self._begin_send(("stash", v), self.g.stash[v])

    def _leave_stash(self, v: int) -> int:
        self._end_send(("stash", v))
        self._away["stash", v] = []
        return self._drop_stash(v)

    def _fetch_stash(self, v: int) -> int:
        self._begin_fetch(("stash", v), self.g.stash[v])
        self._stashes.add(v)
        self._bytes += self.g.stash[v]
        return self._bytes
