"""The referee: carries a plan out on a toy machine and checks every action, with its own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, get_args

from umem.errors import BudgetError, GraphError
from umem.planner.checks import checked_budget
from umem.planner.graph import Graph
from umem.planner.kusumoto.formula_rules import bare
from umem.planner.link import Key, Link, LinkClock
from umem.planner.plans import Model, Plan
from umem.planner.schedule import Action, Kind, actions
from umem.units import format_bytes


class Moment(NamedTuple):
    """An action of a schedule, the bytes in use during it (workspace included) and after it."""

    action: Action
    during_bytes: int
    after_bytes: int


class Simulation(NamedTuple):
    """The bytes, the work and the time of carrying a plan out.

    Attributes:
        peak_bytes: the most bytes in use at once.
        overhead: the cost of all recomputations.
        timeline: every action with the bytes in use.
        seconds: the time of the step in units of cost: forward, recomputation, backward and waiting
            for copies.
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
        link: the link for offloading; None: the plan's own, and if it has none, copies take no
            time.

    Raises:
        GraphError: an action cannot be carried out, or is missing; names the node.
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
    is_tape = model == "saved"
    machine = _Machine(graph if is_tape else bare(graph), link, is_tape=is_tape)
    for action in stream:
        moment = machine.act(action)
        if budget_bytes is not None and moment.during_bytes > budget_bytes:
            raise BudgetError(
                f"{action.kind} of {action.node!r} needs {format_bytes(moment.during_bytes)}, "
                f"and the budget is {format_bytes(budget_bytes)}"
            )
    machine.finish()
    clock, timeline = machine.clock, tuple(machine.timeline)
    peak = max((moment.during_bytes for moment in timeline), default=0)
    return Simulation(
        peak, machine.overhead, timeline, clock.now, clock.sent_bytes, clock.fetched_bytes
    )


class _Machine:
    """A toy machine: the values and function state in its memory, and the completed actions.

    The rules return the bytes that are in use only while an action runs.
    """

    def __init__(self, graph: Graph, link: Link | None, *, is_tape: bool) -> None:
        self.g = graph.numbered
        self._number = {name: v for v, name in enumerate(self.g.names)}
        self._live: set[Key] = set()
        self._holders: Counter[Key] = Counter()  # the live values in a node's bytes
        self._grads: set[int] = set()
        self._sent: set[Key] = set()
        self._away: dict[Key, list[Key]] = {}  # with the values in those bytes
        self.clock = LinkClock(link)
        self._ran: set[int] = set()
        self._backed: set[int] = set()
        self._bytes = 0
        self.overhead: float = 0
        self.timeline: list[Moment] = []
        self._of_calls = {
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._pushed if is_tape else self._pulled,
            "free": self._free,
        }
        self._of_cells = {
            "drop": self._drop,
            "send": self._send,
            "leave": self._leave,
            "fetch": self._fetch,
        }

    def act(self, action: Action) -> Moment:
        """Carry one action out; raise `GraphError` if that is impossible or out of turn."""
        v = self._number.get(action.node)
        if v is None or action.kind not in get_args(Kind):
            raise GraphError(f"{action} is not an action on this graph")
        self._now = action
        before, beside = self._bytes, 0
        if action.kind in self._of_calls:
            beside = self._of_calls[action.kind](v)
        else:
            verb, _, stash = action.kind.partition("_")
            self._of_cells[verb](("stash" if stash else "value", v))
        moment = Moment(action, max(before, self._bytes + beside), self._bytes)
        self.timeline.append(moment)
        return moment

    def finish(self) -> None:
        """Check that every call ran forward and backward, and that memory is empty.

        Raises:
            GraphError: names the node.
        """
        every = set(range(len(self.g.names)))
        for what, done in (("forward", self._ran), ("backward", self._backed)):
            for v in sorted(every - done):
                raise GraphError(f"{what} of {self.g.names[v]!r} was never done")
        for v in sorted([*self._grads, *(v for _, v in self._live)]):
            raise GraphError(f"something of {self.g.names[v]!r} is left at the end")
        for _, v in sorted((*self._sent, *self._away)):
            raise GraphError(f"something of {self.g.names[v]!r} was sent and never fetched")

    def _check(self, holds: bool, why: str, v: int) -> None:
        if not holds:
            kind, node = self._now
            raise GraphError(f"{kind} of {node!r}: {why} {self.g.names[v]!r}")

    # -- calls -----------------------------------------------------------------------------

    def _forward(self, v: int) -> int:
        self._check(v not in self._ran, "forward was done of", v)
        self._ran.add(v)
        return self._run(v) + self.g.forward_bytes

    def _recompute(self, v: int) -> int:
        self._check(v in self._ran, "forward was not done of", v)
        self._check(v not in self._backed, "backward was done of", v)
        self._check(self.g.recomputable[v], "it must not be run twice:", v)
        self.overhead += self.g.cost[v]
        return self._run(v)

    def _run(self, v: int) -> int:
        """Run a call, in forward or recomputed."""
        for x in self.g.preds[v]:
            self._read(("value", x), "it reads a value not in memory:")
        for key in self._made_by(v):
            self._check(key not in self._live, f"{_it(key)} is in memory:", v)
            self._check(self._place(key) not in self._away, f"{_it(key)} is away:", v)
            self._hold(key)
        self.clock.run(self.g.cost[v])
        return self.g.workspace[v]

    def _made_by(self, v: int) -> list[Key]:
        return [("value", v), ("stash", v)] if self.g.stash[v] else [("value", v)]

    def _pushed(self, v: int) -> int:
        """Run a step of a tape's backward, which adds to the gradients of its inputs."""
        self._begin(v)
        for x in self.g.needs[v]:
            self._read(("value", x), "it needs a value not in memory:")
        if self.g.stash[v]:
            self._read(("stash", v), "its stash is not in memory:")
        if not self.g.succs[v]:
            self._add_grad(v)  # where backward starts
        self._check(v in self._grads, "it has no gradient:", v)
        for x in self.g.preds[v]:
            self._add_grad(x)
        self._bytes += self.g.stays[v]
        self.clock.run(self.g.backward_cost[v])
        return self.g.backward_workspace[v]

    def _pulled(self, v: int) -> int:
        """Run a step of backward under ``kusumoto``: make a gradient from its users' gradients."""
        self._begin(v)
        for w in self.g.succs[v]:
            self._check(w in self._grads, "it has no gradient:", w)
            for x in self.g.preds[w]:
                self._read(("value", x), "it needs a value not in memory:")
        self._add_grad(v)
        self.clock.run(self.g.backward_cost[v])
        return 0

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

    def _free(self, v: int) -> int:
        self._check(v in self._grads and v in self._backed, "it has no gradient to free:", v)
        self._grads.remove(v)
        self._bytes -= self.g.grad[v]
        return 0

    # -- values and function state ---------------------------------------------------------

    def _place(self, key: Key) -> Key:
        """Return the owner of the bytes of a value or function state; for a view, its base."""
        return ("value", self.g.root[key[1]]) if key[0] == "value" else key

    def _size(self, place: Key) -> int:
        return (self.g.size if place[0] == "value" else self.g.stash)[place[1]]

    def _read(self, key: Key, why: str) -> None:
        self._check(key in self._live, why, key[1])
        self.clock.wait(self._place(key))

    def _hold(self, key: Key) -> None:
        place = self._place(key)
        if not self._holders[place]:
            self._bytes += self._size(place)
        self._holders[place] += 1
        self._live.add(key)

    def _drop(self, key: Key) -> None:
        self._check(key in self._live, f"{_it(key)} is not in memory:", key[1])
        place = self._place(key)
        self._live.remove(key)
        self._holders[place] -= 1
        if not self._holders[place]:
            self._check(place not in self._sent, f"{_it(key)} is on its way:", key[1])
            self._bytes -= self._size(place)

    def _send(self, key: Key) -> None:
        self._check(self._holders[key] > 0, f"{_it(key)} is not in memory:", key[1])
        self._check(key not in self._sent, "it is on its way:", key[1])
        self._sent.add(key)
        self.clock.send(key, self._size(key))

    def _leave(self, key: Key) -> None:
        self._check(key in self._sent, "it was not sent:", key[1])
        self._sent.remove(key)
        self.clock.wait(key)
        self._away[key] = [one for one in self._live if self._place(one) == key]
        for one in self._away[key]:
            self._drop(one)

    def _fetch(self, key: Key) -> None:
        self._check(key in self._away, "it is not away:", key[1])
        self.clock.fetch(key, self._size(key))
        for one in self._away.pop(key):
            self._hold(one)


def _it(key: Key) -> str:
    return "its stash" if key[0] == "stash" else "it"
