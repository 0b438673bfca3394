"""A plan's stream of actions, for the referee or for an executor.

With liveness, a value is dropped after its last use before it is recomputed, and a gradient after
its last use. A value that a ``saved`` plan keeps stays at least until its own block's backward
begins, unless the plan frees early.
A value that a plan offloads is sent after its last use in forward, leaves memory after a call of
forward and is fetched before a step of backward; all other actions are as if it had stayed in
memory. Without liveness, everything is dropped only at the end of its block, as the formula of
Kusumoto et al. (NeurIPS 2019) assumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from umem.errors import GraphError
from umem.planner.graph import Graph, Numbered
from umem.planner.kusumoto.formula_rules import bare, read_by
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
    ``backward``: under the model ``saved``, a step of a tape, which reads the gradient of the
    node's outputs and adds to its inputs' gradients. Under the model ``kusumoto``, the gradient of
    its outputs is computed from its users' gradients.
    ``send`` begins to copy the bytes of a node to the offload target, with all its live views;
    ``leave`` frees them after the copy; ``fetch`` begins to copy them back, and their first use
    waits for it. ``send_stash``, ``leave_stash``, ``fetch_stash``: the same for its function state.
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
"""The kinds of actions with which backward begins."""

_MOVED: dict[str, tuple[Kind, Kind, Kind]] = {
    "value": ("send", "leave", "fetch"),
    "stash": ("send_stash", "leave_stash", "fetch_stash"),
}
"""By kind of cell, the actions that copy it out, free its bytes, and prefetch it."""


@dataclass
class Computation:
    """A computation, with the cells that it makes and reads; without a kind, it only keeps the
    cells that it reads alive."""

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
        model: the model whose rules of backward apply; None: the plan's own. A plan of ``kusumoto``
            can be carried out under ``saved``, not the reverse.

    Raises:
        GraphError: the plan is for another graph, or is invalid under the model or without
            liveness.
    """
    model = checked_model(model or plan.model)
    if model == "kusumoto" and plan.model == "saved":
        raise GraphError("a plan of the model 'saved' is invalid under the model 'kusumoto'")
    if plan.moves and (model == "kusumoto" or not liveness):
        raise GraphError("a plan that offloads values needs the model 'saved' and liveness")
    counted = graph if model == "saved" else bare(graph)
    yield from Computations(counted, plan, is_tape=model == "saved").actions(liveness=liveness)


class Task(NamedTuple):
    """An action on a call, by the call's number."""

    kind: Kind
    call: int


class Agenda(NamedTuple):
    """The actions of a plan by when they are due, for an executor that runs call by call.

    Attributes:
        after_forward: by call, the actions due after its forward, in order.
        backward: every action from the end of forward on, in order: recomputations and fetches
            before a step, the step itself (``backward``), and drops after it. Frees of gradients
            are missing, because a tape frees gradients itself.
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

    Forward runs in the program's order, whatever the plan's: an action is due once all calls before
    it in the plan have run. Before a node's bytes leave memory, its views are dropped.

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


def _last_uses(steps: list[Computation]) -> dict[int, list[Cell]]:
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


def _at_block_ends(
    steps: list[Computation], last_uses: dict[int, list[Cell]]
) -> dict[int, list[Cell]]:
    """Return the same with each cell dropped at the end of the block that uses it last."""
    last = {(step.kind == "forward", step.block): place for place, step in enumerate(steps)}
    ends: dict[int, list[Cell]] = {}
    for place, cells in last_uses.items():
        step = steps[place]
        ends.setdefault(last[step.kind == "forward", step.block], []).extend(cells)
    return ends


Due = dict[int, list[tuple[Kind, int]]]
"""Offloading actions, as kind and node, by the place of a computation."""


class Computations:
    """The computations of a plan, in order; nodes are numbers of its graph.

    Args:
        graph: the graph that was planned.
        plan: its plan.
        is_tape: True if a step of backward adds to the gradients of its inputs; False for the rules
            of `umem.planner.kusumoto`.

    Attributes:
        g: the graph by numbers.
        steps: the computations.

    Raises:
        GraphError: the plan is not one of this graph.
    """

    def __init__(self, graph: Graph, plan: Plan, *, is_tape: bool = True) -> None:
        self.g: Numbered = graph.numbered
        self._plan, self._is_tape = plan, is_tape
        self._number = {name: v for v, name in enumerate(self.g.names)}
        blocks = [self._numbers(names) for names in plan.blocks]
        rerun = [self._numbers(names) for names in plan.recomputed]
        self._numbers(plan.stashed)
        if len(rerun) != len(blocks):
            raise GraphError("a plan needs a list of calls to recompute for each of its blocks")
        if sorted(v for block in blocks for v in block) != list(range(len(self.g.names))):
            raise GraphError("the blocks of a plan must hold every node once")
        self.steps = list(self._steps(blocks, rerun, set(self._numbers(plan.kept))))

    def _numbers(self, names: Iterable[str]) -> list[int]:
        try:
            return [self._number[name] for name in names]
        except KeyError as error:
            raise GraphError(f"the plan names {error}, which is not a node of the graph") from None

    def actions(self, *, liveness: bool = True) -> Iterator[Action]:
        """Yield the actions of the plan, in order; see `actions`."""
        ends = _last_uses(self.steps)
        if not liveness:
            ends = _at_block_ends(self.steps, ends)
        before, after = self._moves() if self._plan.moves else ({}, {})
        for index, step in enumerate(self.steps):
            due = [
                *before.get(index, ()),
                *([] if step.kind is None else [(step.kind, step.node)]),
                *((_GO[cell.what], cell.node) for cell in ends.get(index, ())),
                *after.get(index, ()),
            ]
            for kind, node in due:
                yield Action(kind, self.g.names[node])

    # -- computations ----------------------------------------------------------------------

    def _steps(
        self, blocks: list[list[int]], rerun: list[list[int]], kept: set[int]
    ) -> Iterator[Computation]:
        """Yield all computations in order, with the cells that they read and make."""
        for i, block in enumerate(blocks):
            yield from (self._run("forward", v, i) for v in block)
        for i in range(len(blocks) - 1, -1, -1):
            if self._is_tape and not self._plan.frees_early:
                held = [Cell("value", v) for v in blocks[i] if v in kept]
                yield Computation(None, -1, (), held, i)
            yield from (self._run("recompute", v, i) for v in rerun[i])
            yield from (self._backward(v, i) for v in reversed(blocks[i]))

    def _run(self, kind: Kind, v: int, block: int) -> Computation:
        makes = (Cell("value", v), Cell("stash", v)) if self.g.stash[v] else (Cell("value", v),)
        return Computation(kind, v, makes, [Cell("value", x) for x in self.g.preds[v]], block)

    def _backward(self, v: int, block: int) -> Computation:
        """Make the step of a node's backward."""
        if not self._is_tape:
            reads = [Cell("value", x) for x in read_by(self.g, v)]
            reads += [Cell("grad", w) for w in self.g.succs[v]]
            return Computation("backward", v, (Cell("grad", v),), reads, block)
        reads = [Cell("value", x) for x in self.g.needs[v]] + [Cell("grad", v)]
        reads += [Cell("stash", v)] * (self.g.stash[v] > 0)
        makes = tuple(Cell("grad", x) for x in self.g.preds[v])
        return Computation("backward", v, makes, reads, block)

    # -- offloading ------------------------------------------------------------------------

    def _moves(self) -> tuple[Due, Due]:
        """Return the offloading actions due before, and those due after each computation.

        Of values that can be sent at the same time, the one used last is sent first; the one used
        first is fetched first.

        Raises:
            GraphError: a move names a view, or a value or function state that forward never makes.
        """
        before: Due = {}
        after: Due = {}
        turns = self.turns()
        ran = {step.node: i for i, step in enumerate(self.steps) if step.kind == "forward"}
        sent, used = self.uses()
        ways = []
        for move in self._plan.moves:
            node, left, step = self._numbers((move.node, move.leaves_after, move.fetched_before))
            cell = Cell(move.what, node)
            if cell not in sent or self.g.root[node] != node:
                raise GraphError(
                    f"the plan offloads the {move.what} of {move.node!r}: there is none"
                )
            ways.append((sent[cell], used.get(cell, len(self.steps)), cell, ran[left], turns[step]))
        ways.sort(key=lambda way: (way[0], -way[1], way[2]))
        for last, _, cell, _, _ in ways:
            after.setdefault(last, []).append((_MOVED[cell.what][0], cell.node))
        for _, _, cell, left, _ in ways:
            after.setdefault(left, []).append((_MOVED[cell.what][1], cell.node))
        for _, _, cell, _, turn in sorted(ways, key=lambda way: way[1:3]):
            before.setdefault(turn, []).append((_MOVED[cell.what][2], cell.node))
        return before, after

    def turns(self) -> dict[int, int]:
        """Return by step of backward the place of its first computation, in order of time.

        This computation follows the previous step: a recomputation, a computation without a kind
        that keeps its reads alive, or the step itself.
        """
        turns: dict[int, int] = {}
        begins = len(self.g.names)
        for index in range(begins, len(self.steps)):
            if self.steps[index].kind == "backward":
                turns[self.steps[index].node] = begins
                begins = index + 1
        return turns

    def uses(self) -> tuple[dict[Cell, int], dict[Cell, int]]:
        """Return the last place in forward and the first in backward at which each cell is used.

        A use of a view is a use of the node that holds its bytes.
        """
        last: dict[Cell, int] = {}
        first: dict[Cell, int] = {}
        for index, step in enumerate(self.steps):
            for cell in (*step.reads, *step.makes):
                if cell.what == "value":
                    cell = Cell("value", self.g.root[cell.node])
                if step.kind == "forward":
                    last[cell] = index
                else:
                    first.setdefault(cell, index)
        return last, first
