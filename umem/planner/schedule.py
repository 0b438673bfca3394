"""The stream of actions that a plan turns into, for a referee or for an executor.

With liveness, a value is dropped after its last use before it is recomputed, a gradient after its
last use. A value that a ``saved`` plan keeps stays at least until its own block's backward begins,
unless the plan frees early.
A value that a plan offloads is sent when its last use in forward is over, leaves memory after a
call of forward and is fetched before a step of backward; all other actions are as if it had been
in memory all the time. Without liveness, everything is dropped at the end of its block only, as the
formula of Kusumoto et al. (NeurIPS 2019) assumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from umem.errors import GraphError
from umem.planner.graph import Graph, Numbered
from umem.planner.link import Move
from umem.planner.plans import Model, Plan, checked_model

Kind = Literal[
    "forward", "drop", "drop_stash", "recompute", "backward", "free",
    "send", "leave", "fetch", "send_stash", "leave_stash", "fetch_stash",
]  # fmt: skip


class Action(NamedTuple):
    """One action on one node.

    ``forward`` and ``recompute`` run the call, and make its outputs and its function state (stash);
    ``drop`` frees its outputs, ``drop_stash`` its function state, ``free`` the gradient of its
    outputs.
    ``backward``: under the model ``saved``, a step of a tape: from the gradient of its outputs it
    adds to those of its inputs. Under the model ``kusumoto``, the gradient of its outputs is
    computed from those of its users.
    ``send`` begins to copy the bytes of a node to the offload target, with all its live views;
    ``leave`` frees them once the copy is over; ``fetch`` begins to copy them back, and their first
    use waits for it. ``send_stash``, ``leave_stash``, ``fetch_stash``: the same of its function
    state.
    """

    kind: Kind
    node: str


class Cell(NamedTuple):
    """A node's ``value``, function state (``stash``) or gradient (``grad``), in memory."""

    what: Literal["value", "stash", "grad"]
    node: int


_GO: dict[str, Kind] = {"value": "drop", "stash": "drop_stash", "grad": "free"}
"""By kind of cell, the action that frees it."""

_BACKWARD = ("recompute", "backward", "fetch", "fetch_stash")
"""The kinds of actions that backward begins with."""

_MOVED: dict[str, tuple[Kind, Kind, Kind]] = {
    "value": ("send", "leave", "fetch"),
    "stash": ("send_stash", "leave_stash", "fetch_stash"),
}
"""By kind of cell, the actions that copy it out, free its bytes, and prefetch it."""


@dataclass
class _Computation:
    """A computation, the cells it makes and reads; one of no kind only keeps its reads alive."""

    kind: Kind | None
    node: int
    makes: tuple[Cell, ...] = ()
    reads: list[Cell] = field(default_factory=list)
    block: int = 0


def actions(
    graph: Graph, plan: Plan, *, liveness: bool = True, model: Model | None = None
) -> Iterator[Action]:
    """Yield the actions that carry a plan out, in order.

    Args:
        graph: the graph that was planned.
        plan: its plan.
        liveness: drop values after their last use, not at the end of their block.
        model: the model whose rules of backward hold; None: the plan's own. A plan of ``kusumoto``
            can be carried out under ``saved``, not the reverse.

    Raises:
        GraphError: the plan is not one of this graph, or does not hold under the model or without
            liveness.
    """
    model = checked_model(model or plan.model)
    if model == "kusumoto" and plan.model == "saved":
        raise GraphError("a plan of the model 'saved' does not hold under the model 'kusumoto'")
    if plan.moves and (model == "kusumoto" or not liveness):
        raise GraphError("a plan that offloads values holds under the model 'saved' with liveness")
    chain = _NumberedPlan(graph, plan)
    steps = list(chain.steps(model))
    ends = _last_uses(steps) if liveness else chain.block_ends(steps, model)
    moves = chain.moves(steps, plan.moves)
    names = chain.g.names
    for index, step in enumerate(steps):
        for kind, node in moves.before.get(index, ()):
            yield Action(kind, names[node])
        if step.kind is not None:
            yield Action(step.kind, names[step.node])
        for cell in ends.get(index, ()):
            yield Action(_GO[cell.what], names[cell.node])
        for kind, node in moves.after.get(index, ()):
            yield Action(kind, names[node])


class Task(NamedTuple):
    """An action on a call, by the call's number."""

    kind: Kind
    call: int


class Agenda(NamedTuple):
    """The actions of a plan by when they are due, for an executor that runs call by call.

    Attributes:
        after_forward: by call, the actions due once forward has run it, in order; under -1, those
            before the first call.
        backward: every action from the end of forward on, in order: recomputations and fetches
            before a step, the step itself (``backward``), and drops after it. Frees of gradients
            are left out: a tape frees gradients itself.
    """

    after_forward: Mapping[int, Sequence[Task]]
    backward: Sequence[Task]

    @property
    def places(self) -> dict[int, int]:
        """Return by call the place in ``backward`` of its own step."""
        return {t.call: place for place, t in enumerate(self.backward) if t.kind == "backward"}

    @property
    def recomputed(self) -> dict[int, list[int]]:
        """Return by call the calls to recompute right before its step of backward, in order."""
        found: dict[int, list[int]] = {}
        due: list[int] = []
        for task in self.backward:
            if task.kind == "recompute":
                due.append(task.call)
            elif task.kind == "backward" and due:
                found[task.call] = due
                due = []
        return found


def agenda(graph: Graph, plan: Plan, calls: Sequence[str]) -> Agenda:
    """Sort a plan's actions by when they are due.

    Forward runs in the program's order, whatever the plan's: an action is due once every call
    that the plan has before it has run. Before a node's bytes leave, its views are dropped.

    Args:
        graph: the graph that was planned.
        plan: its plan.
        calls: the nodes in the program's order; tasks name them by their places in it.

    Raises:
        GraphError: the plan is not one of this graph.
    """
    number = {name: place for place, name in enumerate(calls)}
    root = graph.numbered.root
    views: dict[int, list[int]] = {}
    for name, of in zip(graph.names, root, strict=True):
        if graph.names[of] != name:
            views.setdefault(number[graph.names[of]], []).append(number[name])
    after: dict[int, list[Task]] = {}
    backward: list[Task] = []
    last = -1
    for action in actions(graph, plan):
        task = Task(action.kind, number[action.node])
        if backward or task.kind in _BACKWARD:
            if task.kind != "free":
                backward.append(task)
        elif task.kind == "forward":
            last = max(last, task.call)
        else:
            due = after.setdefault(last, [])
            if task.kind == "leave":  # live views would keep the bytes in memory
                due += [Task("drop", view) for view in sorted(views.get(task.call, ()))]
            due.append(task)
    return Agenda(after, backward)


class _Moves(NamedTuple):
    """Offloading actions, by the place of the computation before or after which they are due."""

    before: dict[int, list[tuple[Kind, int]]]
    after: dict[int, list[tuple[Kind, int]]]


def _last_uses(steps: list[_Computation]) -> dict[int, list[Cell]]:
    """Return by computation the cells to drop after it: not read before they are recomputed."""
    ends: dict[int, list[Cell]] = {}
    later: set[Cell] = set()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        for cell in (*step.reads, *step.makes):
            if cell not in later:
                later.add(cell)
                ends.setdefault(index, []).append(cell)
        later.difference_update(step.makes if step.kind != "backward" else ())
    return ends


class _NumberedPlan:
    """A plan whose nodes are numbers of its graph.

    Raises:
        GraphError: the plan is not one of this graph.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.g: Numbered = graph.numbered
        self._number = {name: v for v, name in enumerate(self.g.names)}
        self.blocks = [self._numbers(names) for names in plan.blocks]
        self.rerun = [self._numbers(names) for names in plan.recomputed]
        self.kept = set(self._numbers(plan.kept))
        self.stashed = set(self._numbers(plan.stashed))
        self.frees_early = plan.frees_early
        if len(self.rerun) != len(self.blocks):
            raise GraphError("a plan has a list of calls to recompute for each of its blocks")
        if sorted(v for block in self.blocks for v in block) != list(range(len(self.g.names))):
            raise GraphError("the blocks of a plan hold every node once")

    def _numbers(self, names: Iterable[str]) -> list[int]:
        try:
            return [self._number[name] for name in names]
        except KeyError as error:
            raise GraphError(f"the plan names {error}, which is no node of the graph") from None

    # -- offloading ------------------------------------------------------------------------

    def moves(self, steps: list[_Computation], moves: Sequence[Move]) -> _Moves:
        """Place the sends, frees and fetches of offloaded cells between the computations.

        Of values that could be sent at once, the one used last is sent first; the one used first
        is fetched first.

        Raises:
            GraphError: a move names a view, or a value or function state that forward never makes.
        """
        found = _Moves({}, {})
        if not moves:
            return found
        ran, turns = self._turns(steps)
        sent, used = self._uses(steps)
        ways = []
        for move in moves:
            node, left, step = self._numbers((move.node, move.leaves_after, move.fetched_before))
            cell = Cell(move.what, node)
            if cell not in sent or self.g.root[node] != node:
                raise GraphError(
                    f"the plan offloads the {move.what} of {move.node!r}: there is none"
                )
            ways.append((sent[cell], used.get(cell, len(steps)), cell, ran[left], turns[step]))
        ways.sort(key=lambda way: (way[0], -way[1], way[2]))
        for last, _, cell, _, _ in ways:
            found.after.setdefault(last, []).append((_MOVED[cell.what][0], cell.node))
        for _, _, cell, left, _ in ways:
            found.after.setdefault(left, []).append((_MOVED[cell.what][1], cell.node))
        for _, _, cell, _, turn in sorted(ways, key=lambda way: way[1:3]):
            found.before.setdefault(turn, []).append((_MOVED[cell.what][2], cell.node))
        return found

    def _turns(self, steps: list[_Computation]) -> tuple[dict[int, int], dict[int, int]]:
        """Return by call the place of its forward, and by step that of its first computation.

        Steps are those of backward. The first computation of one is what comes right after the step
        before: a recomputation, one of no kind that keeps its reads alive, or the step itself.
        """
        ran = {step.node: i for i, step in enumerate(steps) if step.kind == "forward"}
        turns: dict[int, int] = {}
        begins = len(ran)
        for index in range(begins, len(steps)):
            if steps[index].kind == "backward":
                turns[steps[index].node] = begins
                begins = index + 1
        return ran, turns

    def _uses(self, steps: list[_Computation]) -> tuple[dict[Cell, int], dict[Cell, int]]:
        """Return the last place in forward and the first in backward at which each cell is used.

        A use of a view is a use of the node whose bytes the view lies in.
        """
        last: dict[Cell, int] = {}
        first: dict[Cell, int] = {}
        for index, step in enumerate(steps):
            for cell in (*step.reads, *step.makes):
                if cell.what == "value":
                    cell = Cell("value", self.g.root[cell.node])
                if step.kind == "forward":
                    last[cell] = index
                else:
                    first.setdefault(cell, index)
        return last, first

    # -- computations ----------------------------------------------------------------------

    def steps(self, model: Model) -> Iterator[_Computation]:
        """Yield all computations in order, with the cells that they read and make."""
        for i, block in enumerate(self.blocks):
            yield from (self._run("forward", v, i, model) for v in block)
        for i in range(len(self.blocks) - 1, -1, -1):
            if model == "saved" and not self.frees_early:
                held = [Cell("value", v) for v in self.blocks[i] if v in self.kept]
                yield _Computation(None, -1, (), held, i)
            yield from (self._run("recompute", v, i, model) for v in self.rerun[i])
            backward = self._pushed if model == "saved" else self._pulled
            yield from (backward(v, i) for v in reversed(self.blocks[i]))

    def _run(self, kind: Kind, v: int, block: int, model: Model) -> _Computation:
        makes = [Cell("value", v)]
        if model == "saved" and self.g.stash[v]:
            makes.append(Cell("stash", v))
        reads = [Cell("value", x) for x in self.g.preds[v]]
        return _Computation(kind, v, tuple(makes), reads, block)

    def _pushed(self, v: int, block: int) -> _Computation:
        """Make the step of a tape's backward, which adds to the gradients of its inputs."""
        reads = [Cell("value", x) for x in self.g.needs[v]] + [Cell("grad", v)]
        reads += [Cell("stash", v)] * (self.g.stash[v] > 0)
        return _Computation(
            "backward", v, tuple(Cell("grad", x) for x in self.g.preds[v]), reads, block
        )

    def _pulled(self, v: int, block: int) -> _Computation:
        """Make the step of ``kusumoto``: a gradient from those of its users and their inputs."""
        users = self.g.succs[v]
        reads = [Cell("value", x) for x in sorted({x for w in users for x in self.g.preds[w]})]
        reads += [Cell("grad", w) for w in users]
        return _Computation("backward", v, (Cell("grad", v),), reads, block)

    # -- without liveness ------------------------------------------------------------------

    def block_ends(self, steps: list[_Computation], model: Model) -> dict[int, list[Cell]]:
        """Return, by place of the last computation of a block, the cells that are dropped there."""
        last: dict[tuple[bool, int], int] = {}
        for index, step in enumerate(steps):
            last[step.kind == "forward", step.block] = index
        ends: dict[int, list[Cell]] = {}
        here: dict[Cell, None] = {}
        later = _later_uses(steps, set(last.values()))
        for index, step in enumerate(steps):
            here.update(dict.fromkeys(step.makes))
            if step.kind == "backward" and model == "saved":
                here.setdefault(Cell("grad", step.node))
            if index in later:
                gone = [cell for cell in here if cell not in later[index]]
                if step.kind == "forward" or model == "kusumoto":
                    ends[index] = gone
                else:
                    block = set(self.blocks[step.block])
                    ends[index] = [cell for cell in gone if cell.node in block]
                for cell in ends[index]:
                    del here[cell]
        return ends


def _later_uses(steps: list[_Computation], places: set[int]) -> dict[int, set[Cell]]:
    """Return by place the cells that are read after it before they are recomputed."""
    found: dict[int, set[Cell]] = {}
    later: set[Cell] = set()
    for index in range(len(steps) - 1, -1, -1):
        if index in places:
            found[index] = set(later)
        later.update(steps[index].reads)
        if steps[index].kind != "backward":
            later.difference_update(steps[index].makes)
            later.update(steps[index].reads)
    return found
