"""A graph that was seen: its tape, the facts beside it, its plan and how it is made."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, starmap
from typing import Any, Literal, NamedTuple

from umem.chainer.parameter_updates import OptimizerFacts, state_bytes
from umem.chainer.recompute.facts import Observed
from umem.chainer.recompute.gradients import Contended, contended
from umem.chainer.recompute.observing import Beside
from umem.chainer.recompute.offloaded import What
from umem.chainer.recompute.tape import Call, Signature
from umem.chainer.saved.tiers.tier import Tier
from umem.errors import BudgetError
from umem.planner import Kind, Link, Method, PoolGaps, Problem, Solution, actions, agenda, usage
from umem.trace.analysis import CAPPED, advice

Roots = tuple[tuple[int, int], ...]
"""Call and output indexes at which a backward begins."""


@dataclass(frozen=True)
class Tape:
    """The calls of a graph and its data flow, as recorded in the first forward.

    Attributes:
        signatures, labels, observed: of each call.
        trails: the pass's trail after each call, to compare a pass without calls.
        edges: pairs of call indexes: a producer and a reader of its outputs.
        needs: by call, the calls whose outputs its backward reads.
        readers: by value, the calls and inputs that read it.
    """

    signatures: tuple[Signature, ...]
    labels: tuple[str, ...]
    observed: tuple[Observed, ...]
    trails: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    needs: tuple[tuple[int, ...], ...]
    readers: Mapping[Any, Sequence[tuple[int, int]]]

    @property
    def seconds(self) -> float:
        """Return the seconds of the forward pass."""
        return sum(o.cost for o in self.observed)

    def has(self, index: int, signature: Signature) -> bool:
        """Tell whether its call at an index has this signature."""
        return index < len(self.signatures) and self.signatures[index] == signature

    def begins_with(self, signatures: Sequence[Signature]) -> bool:
        """Tell whether its first calls have these signatures."""
        return list(self.signatures[: len(signatures)]) == list(signatures)


def tape_of(calls: Sequence[Call], observed: Sequence[Observed], trails: Sequence[int]) -> Tape:
    """Make the tape of a pass whose forward has run."""
    edges: dict[tuple[int, int], None] = {}
    needs = []
    for call in calls:
        for source in call.sources:
            if source.call is not None:
                edges[source.call.index, call.index] = None
        alive = call.needs() if call.has_graph else []
        needs.append(tuple(dict.fromkeys(c.index for c in alive)))
    return Tape(
        tuple(call.signature for call in calls),
        tuple(call.label for call in calls),
        tuple(observed),
        tuple(trails),
        tuple(edges),
        tuple(needs),
        readers_of(calls),
    )


def readers_of(calls: Sequence[Call]) -> dict[Any, list[tuple[int, int]]]:
    """Map each value that some calls read to the calls and inputs that read it."""
    readers: dict[Any, list[tuple[int, int]]] = {}
    for call in calls:
        for place, entry in enumerate(call.signature[1]):
            readers.setdefault(entry[:2], []).append((call.index, place))
    return readers


@dataclass(frozen=True)
class GraphFacts:
    """The bytes, times and order of a graph beside its tape: both make a planning problem.

    Attributes:
        constant_bytes: parameters and other arrays from outside that it reads; the most so far.
        parameters: by id, weak references to those that it reads, and to other updated ones.
        others_bytes: those others, each with a gradient.
        state_bytes: optimizer state of all of them.
        update_bytes: workspace of the update of one parameter; the most of all.
        whole_update_bytes: the same if updates are not computed in chunks.
        stays: by call, bytes of the gradients of leaves that its backward is the first to make.
        old_gradients: by id of a parameter, the bytes of its gradient during forward.
        held_gradients: those of them that are also alive between forward and backward.
        backward_workspace: by call; empty before it was measured.
        backward_seconds: by call, of its step of the first backward.
        order: by call, its position in a plain backward.
        ranks: of each call, its rank in that backward.
        dead: calls that backward does not reach.
        roots: where backward began.
        keeps_order: whether backward must take its calls in the order of a plain run: one of them
            does more than compute gradients, or may do so.
        outlives: whether the graph is still alive when the next pass begins.
    """

    constant_bytes: int = 0
    parameters: Mapping[int, Any] = field(default_factory=dict)
    others_bytes: int = 0
    state_bytes: int = 0
    update_bytes: int = 0
    whole_update_bytes: int = 0
    stays: Mapping[int, int] = field(default_factory=dict)
    old_gradients: Mapping[int, int] = field(default_factory=dict)
    held_gradients: Mapping[int, int] = field(default_factory=dict)
    backward_workspace: Mapping[int, int] = field(default_factory=dict)
    backward_seconds: Mapping[int, float] = field(default_factory=dict)
    order: Mapping[int, int] = field(default_factory=dict)
    ranks: Sequence[int] = ()
    dead: frozenset[int] = frozenset()
    roots: Roots = ()
    keeps_order: bool = False
    outlives: bool = False

    @property
    def forward_bytes(self) -> int:
        """Return the bytes of old gradients alive in forward and cleared before backward."""
        old = self.old_gradients
        return sum(nbytes for key, nbytes in old.items() if key not in self.held_gradients)

    @property
    def outside_bytes(self) -> int:
        """Return the bytes of parameters, optimizer state, inputs and gradients that stay."""
        beside = self.constant_bytes + self.others_bytes + self.state_bytes
        return beside + sum(self.held_gradients.values())

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes that optimizers take and the graph does not read."""
        return self.others_bytes + self.state_bytes + self.update_bytes

    def goes_back_alike(self, ranks: Sequence[int]) -> bool:
        """Tell whether a plain backward pops calls with these ranks in the recorded order.

        Ranks are depths, and after a cut, a recurrent state's ranks continue from its origin: the
        same graph may run backward in another order. Chainer compares ranks, and nothing else.
        """
        order = sorted(self.order, key=self.order.__getitem__)
        old, new = self.ranks, ranks
        return all((old[a] > old[b]) == (new[a] > new[b]) for a, b in pairwise(order))

    def with_beside(self, beside: Beside, old_gradients: Mapping[int, int]) -> GraphFacts:
        """Return the facts with the arrays outside of a pass's graph added."""
        return replace(
            self,
            constant_bytes=max(self.constant_bytes, beside.constant_bytes),
            stays=beside.stays,
            parameters={**self.parameters, **beside.parameters},
            held_gradients={**self.held_gradients, **beside.held_gradients},
            old_gradients={**self.old_gradients, **old_gradients},
        )

    def with_backward(
        self, calls: Sequence[Call], roots: Roots, order: Mapping[int, int]
    ) -> GraphFacts:
        """Return the facts with a backward from some roots, which takes calls in an order."""
        dead = [call.index for call in calls if call.index not in order and not call.has_graph]
        ranks = [call.plain_rank for call in calls]
        return replace(self, roots=roots, order=order, ranks=ranks, dead=frozenset(dead))

    def with_updates(self, optimizers: OptimizerFacts) -> GraphFacts:
        """Return the facts with the present bytes of optimizers.

        Parameters that no call reads, such as those that `F.forget` captures, count with a
        gradient.
        """
        parameters, others = dict(self.parameters), self.others_bytes
        for parameter in optimizers.parameters:
            if id(parameter) not in parameters:
                parameters[id(parameter)] = weakref.ref(parameter)
                others += 2 * parameter.array.nbytes
        found = [reference() for reference in parameters.values()]
        return replace(
            self,
            parameters=parameters,
            others_bytes=others,
            state_bytes=sum(state_bytes(p.update_rule) for p in found if p is not None),
            update_bytes=optimizers.workspace_bytes,
            whole_update_bytes=optimizers.whole_workspace_bytes,
        )


class TapeAction(NamedTuple):
    """An action on a call of a pass: on its outputs, or (``_stash``) on its function state.

    Beside the kinds of a planner's schedule: ``pack`` keeps a dropout's mask as bits, ``forget``
    discards the offloaded copies of the call's arrays.
    """

    kind: Kind | Literal["pack", "forget"]
    call: int

    @property
    def drops(self) -> bool:
        """True if the action drops arrays."""
        return self.kind in ("drop", "drop_stash")

    def carry_out(self, calls: Sequence[Call], tier: Tier | None) -> None:
        """Carry the action out on one of a pass's calls; arrays are sent to the tier.

        A call that must not be recomputed keeps its arrays, unless they are offloaded. If the graph
        of a call was freed, nothing of it is recomputed.
        """
        call, kind = calls[self.call], self.kind
        if kind == "drop":
            call.drop()
        elif kind == "drop_stash":
            call.drop_stash()
        elif kind == "pack":
            call.pack()
        elif kind == "forget":
            call.forget_offloaded()
        elif kind == "recompute" and call.has_graph:
            call.make_again()
        elif kind in ("send", "send_stash") and tier is not None:
            call.send(tier, _what(kind))
        elif kind in ("leave", "leave_stash"):
            call.leave(_what(kind))
        elif kind in ("fetch", "fetch_stash"):
            call.fetch(_what(kind))


def drops_of(call: int) -> tuple[TapeAction, TapeAction]:
    """Return the actions that drop a call's outputs and its function state."""
    return TapeAction("drop", call), TapeAction("drop_stash", call)


def _what(kind: str) -> What:
    return "stash" if kind.endswith("_stash") else "value"


@dataclass(frozen=True)
class Carried:
    """A plan in the form that `FollowPlan` carries out.

    Attributes:
        solution: the plan.
        plain_bytes: the predicted peak of a plain step.
        peak_bytes: the total peak that the plan predicts.
        fits: whether a plain step is within the budget.
        fits_twice: whether it is while the graph of the pass before is still alive.
        after_forward: by call, the actions after its forward.
        backward: the actions before, in and after backward's steps, in order.
        places: by call, the position of its step in ``backward``.
        order: by call, its position in the planned forward; the planned backward is its reverse.
        contended: the inputs whose gradients would be added up in another order.
    """

    solution: Solution
    plain_bytes: int
    peak_bytes: int
    fits: bool
    fits_twice: bool
    after_forward: Mapping[int, Sequence[TapeAction]]
    backward: Sequence[TapeAction]
    places: Mapping[int, int]
    order: Sequence[int]
    contended: Contended


class SeenGraph:
    """A graph that was seen: its tape, its facts, its plan, and the results of its passes.

    Attributes:
        number: the graph's number.
        tape: its calls.
        facts: the bytes, times and order beside them.
        plan: the plan that its passes follow; None before there is one.
        never: the reason why it is never planned; None if it may be.
        refused: the reason why no plan is within the budget; None if one may be.
        keeps: whether a pass that may be of this graph keeps everything.
        differed: whether a plain pass that began like this one left the known graphs.
        forks: calls at which passes have left its plan.
        is_measured: whether the workspace of its calls is known.
        pass_count: passes that were observed and whose backward ran without a plan.
        tries: passes measured while expecting this graph that turned out to be another, or its
            first.
        followed: whether a pass has followed the plan, and its peak was checked.
        measured_bytes: the peak of that pass; None if not known.
        slack_bytes: by how much the measured peak exceeded the predicted.
        rerun_seconds: of recomputing, in the first pass that was not measured; None before.
    """

    def __init__(self, number: int, tape: Tape, *, keeps_order: bool = False) -> None:
        self.number, self.tape = number, tape
        self.facts = GraphFacts(keeps_order=keeps_order)
        self.plan: Carried | None = None
        self.never: str | None = None
        self.refused: str | None = None
        self.keeps = self.differed = self.followed = self.is_measured = False
        self.forks: set[int] = set()
        self.pass_count = self.tries = self.slack_bytes = 0
        self.measured_bytes: int | None = None
        self.rerun_seconds: float | None = None
        self._problem: tuple[Tape, GraphFacts, Problem] | None = None

    @property
    def problem(self) -> Problem:
        """Return the planning problem, which is rebuilt when tape or facts have changed."""
        made = self._problem
        if made is None or made[0] is not self.tape or made[1] is not self.facts:
            made = self._problem = self.tape, self.facts, problem_of(self.tape, self.facts)
        return made[2]

    @property
    def is_left_alone(self) -> bool:
        """True if Chainer may run passes that begin like this one alone, as a plain step fits."""
        if self.plan is None or not self.plan.fits or self.differed:
            return False
        return not self.facts.outlives or self.plan.fits_twice

    # -- learning from its passes ----------------------------------------------------------

    def went_backward(self, facts: GraphFacts, never: str | None) -> None:
        """Count a pass whose backward ran without a plan.

        ``never``: the reason why the graph cannot be planned; None if it can.
        """
        self.facts = facts
        self.never = self.never or never
        self.pass_count += 1

    def measure(self, observed: Sequence[Observed], workspace: Mapping[int, int]) -> None:
        """Store the measured workspace of its calls, forward and backward."""
        self.tape = replace(self.tape, observed=tuple(observed))
        self.facts = replace(self.facts, backward_workspace=workspace)
        self.is_measured = True

    # -- its plan --------------------------------------------------------------------------

    def take_tighter(self, plan: Carried) -> None:
        """Adopt a plan that leaves `slack_bytes` of the budget free; its peak is measured again."""
        self.plan = plan
        self.measured_bytes, self.followed = None, False

    def forget_plan(self) -> None:
        """Discard the plan and its measured peak, so that the graph is planned again."""
        self.plan = self.refused = self.measured_bytes = None
        self.slack_bytes, self.followed = 0, False

    def keep_everything(self, why: str) -> None:
        """Stop planning the graph; passes that begin like this one keep everything."""
        self.plan, self.keeps, self.never = None, True, why

    def follow(self, peak_bytes: int | None) -> None:
        """Record the measured peak of a pass that followed the plan; None if it is not known."""
        self.followed = True
        if peak_bytes is not None:
            self.measured_bytes = max(peak_bytes, self.problem.update_peak_bytes)

    def recomputed(self, seconds: float) -> None:
        """Record the seconds of recomputing in a pass, unless those of an earlier one are known."""
        if self.rerun_seconds is None:
            self.rerun_seconds = seconds


def problem_of(tape: Tape, facts: GraphFacts) -> Problem:
    """Make the planning problem of a graph from its tape and its facts."""
    calls = tuple(
        replace(
            observed,
            label=label,
            backward_workspace_bytes=facts.backward_workspace.get(index, 0),
            backward_cost=facts.backward_seconds.get(index),
            stays_bytes=facts.stays.get(index, 0),
            needs=needs,
            dead=index in facts.dead,
        )
        for index, (label, observed, needs) in enumerate(
            zip(tape.labels, tape.observed, tape.needs, strict=True)
        )
    )
    return Problem(
        calls,
        tape.edges,
        facts.outside_bytes,
        facts.forward_bytes,
        facts.order,
        facts.keeps_order,
        facts.outlives,
        facts.update_bytes,
        facts.whole_update_bytes,
    )


# -- planning ------------------------------------------------------------------------------------

Budget = int | float | None
"""Total bytes of a step, a share of a plain step's peak, or None for the least peak."""


class Target(NamedTuple):
    """The budget, the planning method and how strict to be; see `umem.chainer.Recompute`.

    ``is_card``: the budget is the GPU's free memory when the first pass begins.
    """

    budget: Budget
    method: Method
    strict: bool
    thrash: str = "warn"
    is_card: bool = False


NO_GAPS = PoolGaps()


def carried(
    seen: SeenGraph, target: Target, link: Link | None = None, gaps: PoolGaps = NO_GAPS
) -> tuple[Carried, str | None]:
    """Plan a seen graph within the budget; if a plain step fits, the plan drops nothing.

    A budget in bytes must also hold the pool's gaps. If no plan leaves room for them, the plan of
    the least peak is used, if that is within the budget by itself.

    With a link, saved tensors may be offloaded. If the budget is a share of a plain step's peak and
    no plan fits, the plan of the least peak is returned with a warning; with ``strict``, or for a
    budget in bytes, that is an error.

    Returns:
        The plan, and the warning or None.

    Raises:
        BudgetError: no plan fits; names the least peak, the floor and what forces the floor.
    """
    problem = seen.problem
    room = _room(seen, target.budget, gaps)
    plain_room = _room(seen, target.budget, gaps, plain=True)
    if plain_room is not None and plain_room >= problem.left_alone_bytes:
        return _carried(seen, problem.keep_all, plain_room), None
    try:
        solution = problem.within(room, target.method, link=link)
    except BudgetError as error:
        if gaps.planned > 1 and isinstance(target.budget, int):
            return _least_or_more(seen, target, link), None
        least = _carried(seen, problem.least(target.method, link=link), room)
        advised = cap_advice(seen, least)
        message = f"{error}, {problem.why_not_less(target.method, link=link)}"
        message += f". {advised.rstrip('.')}" if advised else ""
        if target.strict or not isinstance(target.budget, float):
            raise BudgetError(message) from None
        return least, f"{message}. The budget is a share, so this graph is run at its least"
    return _carried(seen, solution, room), None


def _least_or_more(seen: SeenGraph, target: Target, link: Link | None) -> Carried:
    """Plan for the least peak, or if that is above a budget in bytes, for the whole budget.

    Raises:
        BudgetError: no plan is within the budget, even without gaps.
    """
    assert isinstance(target.budget, int)
    least = seen.problem.least(target.method, link=link)
    if least.peak_bytes <= target.budget - seen.slack_bytes:
        return _carried(seen, least, None)
    return carried(seen, target, link)[0]


def _room(seen: SeenGraph, budget: Budget, gaps: PoolGaps, *, plain: bool = False) -> int | None:
    """Return the bytes that a graph's plan may have in use; None: as few as possible."""
    if budget is None:
        return None
    if isinstance(budget, float):
        return round(budget * seen.problem.plain_bytes)
    return gaps.room(budget, plain=plain) - seen.slack_bytes


def _carried(seen: SeenGraph, solution: Solution, room: int | None) -> Carried:
    """Return the plan of a solution as passes follow it, with its actions by due time."""
    names = seen.problem.names
    place = {name: at for at, name in enumerate(chain.from_iterable(solution.plan.blocks))}
    order = [place[name] for name in names]
    due = agenda(solution.graph, solution.plan, names)
    alone = seen.problem.left_alone_bytes
    twice = 2 * alone - seen.facts.outside_bytes
    fits = room is not None and room >= alone
    return Carried(
        solution,
        seen.problem.plain_bytes,
        alone if fits else solution.peak_bytes,
        fits=fits,
        fits_twice=room is not None and room >= twice,
        after_forward={
            call: list(starmap(TapeAction, ts)) for call, ts in due.after_forward.items()
        },
        backward=list(starmap(TapeAction, due.backward)),
        places=due.places,
        order=order,
        contended=contended(seen.tape.readers, seen.facts.order, order),
    )


# -- caps on workspace -----------------------------------------------------------------------------


def cap_advice(seen: SeenGraph, plan: Carried) -> str | None:
    """Name the cap on workspace, if the plan's peak is inside a call that has one."""
    problem = seen.problem
    graph, found = plan.solution.graph, plan.solution.plan
    step = problem.plain_step if plan.fits else usage(graph, actions(graph, found))
    action = step.highest
    call = problem.calls[problem.names.index(action.node)]
    inside = call.backward_workspace_bytes if action.kind == "backward" else call.workspace_bytes
    if call.label not in CAPPED or plan.peak_bytes == problem.update_peak_bytes:
        return None
    return advice(call.label, inside, plan.peak_bytes)
