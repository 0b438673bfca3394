"""A graph that was seen: its tape, the facts beside it, its plan, and how its passes have gone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from umem.chainer.recompute.gradients import Contended
from umem.chainer.recompute.observing import Beside, Observed
from umem.chainer.recompute.offloaded import What
from umem.chainer.recompute.optimizer_facts import OptimizerFacts, state_bytes
from umem.chainer.recompute.tape import LEAF, Call, Signature
from umem.chainer.saved.tiers.tier import Tier
from umem.planner.call_facts import CallFacts
from umem.planner.problem import Problem, Solution
from umem.planner.schedule import Kind

Roots = tuple[tuple[int, int], ...]
"""Where a backward begins: calls and their outputs."""
Look = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""A call's kind, its inputs from outside (place, shape, dtype), and what it makes."""


@dataclass(frozen=True)
class Tape:
    """A graph as its first pass has gone forward.

    Attributes:
        signatures, labels, observed: of each call.
        edges: pairs of calls: what one makes, the other reads.
        needs: by call, those whose outputs its backward reads.
        readers: by value, the calls and inputs that read it.
    """

    signatures: tuple[Signature, ...]
    labels: tuple[str, ...]
    observed: tuple[Observed, ...]
    edges: tuple[tuple[int, int], ...]
    needs: tuple[tuple[int, ...], ...]
    readers: Mapping[Any, Sequence[tuple[int, int]]]

    @cached_property
    def looks(self) -> tuple[Look, ...]:
        """The traits that a pass is compared by where nothing is done to it."""
        return tuple(
            (kind, tuple((at, *e[2:]) for at, e in enumerate(origins) if e[0] == LEAF), made)
            for kind, origins, made in self.signatures
        )

    @property
    def seconds(self) -> float:
        """Of the forward pass."""
        return sum(o.seconds for o in self.observed)

    def has(self, index: int, signature: Signature) -> bool:
        """Tell whether this is its call at a place."""
        return index < len(self.signatures) and self.signatures[index] == signature

    def begins_with(self, signatures: Sequence[Signature]) -> bool:
        """Tell whether these are its first calls."""
        return list(self.signatures[: len(signatures)]) == list(signatures)


def tape_of(calls: Sequence[Call], observed: Sequence[Observed]) -> Tape:
    """The graph of a pass that has gone forward."""
    edges: dict[tuple[int, int], None] = {}
    readers: dict[Any, list[tuple[int, int]]] = {}
    needs = []
    for call in calls:
        for place, entry in enumerate(call.signature[1]):
            source = call.sources[place].call
            readers.setdefault(entry[:2], []).append((call.index, place))
            if source is not None:
                edges[source.index, call.index] = None
        alive = call.needs() if call.has_graph else []
        needs.append(tuple(dict.fromkeys(c.index for c in alive)))
    return Tape(
        tuple(call.signature for call in calls),
        tuple(call.label for call in calls),
        tuple(observed),
        tuple(edges),
        tuple(needs),
        readers,
    )


@dataclass(frozen=True)
class GraphFacts:
    """The bytes, times and order of a graph beside its tape: a planning problem is made of both.

    Attributes:
        constant_bytes: parameters and other arrays from outside that it reads; the most so far.
        parameters: weak references to those that it reads, and to others that are updated.
        others_bytes: those others, with a gradient.
        state_bytes: optimizer state of all of them.
        update_bytes: workspace of the update of one parameter; the most of all.
        whole_update_bytes: the same where updates are not computed in chunks.
        stays: by call, the gradients of parameters that its backward is the first to make.
        old_gradients: by parameter, the bytes of its gradient during forward.
        held_gradients: those of them that are there between forward and backward, too.
        backward_workspace: by call; empty before it was measured.
        backward_seconds: by call, of its step of the first backward.
        order: by call, its place in a plain backward.
        ranks: by call, its rank then.
        dead: calls that backward does not reach.
        roots: where backward began.
        keeps_order: whether backward has to take its calls in the order of a plain run: one of
            them does more than compute gradients, or may do so.
        outlives: whether the graph is still there when the next pass begins.
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
        """Gradients of the pass before that are there in forward, and cleared before backward."""
        old = self.old_gradients
        return sum(nbytes for key, nbytes in old.items() if key not in self.held_gradients)

    @property
    def outside_bytes(self) -> int:
        """Parameters, state, inputs, and gradients that are not cleared."""
        beside = self.constant_bytes + self.others_bytes + self.state_bytes
        return beside + sum(self.held_gradients.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that optimizers take and the graph does not read."""
        return self.others_bytes + self.state_bytes + self.update_bytes

    def goes_back_alike(self, ranks: Sequence[int]) -> bool:
        """Tell whether a plain backward takes calls with these ranks in the order that was seen.

        Ranks are depths, and those of a recurrent state that was cut go on from where it was made:
        the same graph may go backward in another order. Chainer compares ranks, and nothing else.
        """
        order = sorted(self.order, key=self.order.__getitem__)
        old, new = self.ranks, ranks
        return all((old[a] > old[b]) == (new[a] > new[b]) for a, b in pairwise(order))

    def with_beside(self, beside: Beside, old_gradients: Mapping[int, int]) -> GraphFacts:
        """Add the arrays beside a pass's own."""
        return replace(
            self,
            constant_bytes=max(self.constant_bytes, beside.constant_bytes),
            stays=beside.stays,
            parameters={**self.parameters, **beside.parameters},
            held_gradients={**self.held_gradients, **beside.held_gradients},
            old_gradients={**self.old_gradients, **old_gradients},
        )

    def with_updates(self, optimizers: OptimizerFacts) -> GraphFacts:
        """Add the bytes that optimizers take by now.

        Parameters that no call reads, as those that `F.forget` captures, count with a gradient.
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
    """An action on a call of a pass: on its outputs, or (``_stash``) on what it keeps on itself.

    Beside the kinds of a planner's schedule: ``pack`` keeps a dropout's mask as bits, ``forget``
    gives up what of the call is on the offload target.
    """

    kind: Kind | Literal["pack", "forget"]
    call: int

    @property
    def lets_go(self) -> bool:
        """True where it frees memory."""
        return self.kind in ("drop", "drop_stash")

    def carry_out(self, calls: Sequence[Call], tier: Tier | None) -> None:
        """Do it, with the calls of a pass; what is sent goes to the tier.

        A call that must not run again keeps what it has, and one whose graph is gone is let be.
        """
        call, kind = calls[self.call], self.kind
        what: What = "stash" if kind.endswith("_stash") else "value"
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
            call.send(tier, what)
        elif kind in ("leave", "leave_stash"):
            call.leave(what)
        elif kind in ("fetch", "fetch_stash"):
            call.fetch(what)


@dataclass(frozen=True)
class Carried:
    """A plan, as passes carry it out.

    Attributes:
        solution: the plan.
        plain_bytes: the predicted peak of a plain step.
        left_alone_bytes: the same with updates in chunks.
        fits: whether a plain step is within the budget.
        fits_twice: whether one is while the graph of another is still there.
        after_forward: by call, what to let go when forward has run it.
        backward: what to do before, in and after backward's steps, in order.
        places: by call, the place of its step among those.
        order: by call, its place in the planned forward, whose reverse the planned backward is.
        contended: the inputs whose gradients would be added up in another order.
    """

    solution: Solution
    plain_bytes: int
    left_alone_bytes: int
    fits: bool
    fits_twice: bool
    after_forward: Mapping[int, Sequence[TapeAction]]
    backward: Sequence[TapeAction]
    places: Mapping[int, int]
    order: Sequence[int]
    contended: Contended

    @property
    def peak_bytes(self) -> int:
        """The peak that the plan promises, in all."""
        return self.left_alone_bytes if self.fits else self.solution.peak_bytes


class SeenGraph:
    """A graph that was seen: its tape, its facts, its plan, and how its passes have gone.

    Attributes:
        number: graphs are numbered.
        tape: its calls.
        facts: the bytes, times and order beside them.
        plan: the plan that its passes follow; None before there is one.
        never: why it gets no plan.
        refused: why there is no plan within the budget.
        keeps: whether a pass that may be one of this graph keeps everything.
        differed: whether a plain pass that began like this one went on in an unknown way.
        forks: calls at which passes have left its plan.
        is_measured: whether the workspace of its calls is known.
        pass_count: passes that went backward and taught something.
        tries: passes measured while expecting this graph that turned out to be another, or its
            first.
        followed: whether a pass has followed the plan, and its peak was looked at.
        measured_bytes: the peak of that pass.
        slack_bytes: how far the measured peak was above the predicted.
        rerun_seconds: of recomputing, in a pass that was not measured.
    """

    def __init__(self, number: int, tape: Tape, *, keeps_order: bool) -> None:
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
        """The planning problem: the calls with all that they need, and the bytes beside them."""
        made = self._problem
        if made is None or made[0] is not self.tape or made[1] is not self.facts:
            made = self._problem = self.tape, self.facts, problem_of(self.tape, self.facts)
        return made[2]

    @property
    def is_left_alone(self) -> bool:
        """True where passes that begin like this one need not be followed."""
        if self.plan is None or not self.plan.fits or self.differed:
            return False
        return not self.facts.outlives or self.plan.fits_twice

    # -- what its passes have shown --------------------------------------------------------

    def learn(self, facts: GraphFacts) -> None:
        """Replace its facts."""
        self.facts = facts

    def went_backward(self, facts: GraphFacts, never: str | None) -> None:
        """Count a pass that went backward without a plan; ``never``: why there can be none."""
        self.facts = facts
        self.never = self.never or never
        self.pass_count += 1

    def measure(self, observed: Sequence[Observed], workspace: Mapping[int, int]) -> None:
        """Take the workspace of its calls, forward and backward."""
        self.tape = replace(self.tape, observed=tuple(observed))
        self.facts = replace(self.facts, backward_workspace=workspace)
        self.is_measured = True

    def fork(self, index: int) -> None:
        """Remember a call at which a pass has left its plan."""
        self.forks.add(index)

    def differ(self, differed: bool) -> None:
        """Note whether a plain pass went on in an unknown way."""
        self.differed = differed

    def tried(self) -> None:
        """Count a pass that was measured in vain."""
        self.tries += 1

    def end_tries(self) -> None:
        """Count them from zero again."""
        self.tries = 0

    # -- its plan --------------------------------------------------------------------------

    def take(self, plan: Carried) -> None:
        """Follow a plan from now on."""
        self.plan = plan
        self.tries = 0

    def take_tighter(self, plan: Carried) -> None:
        """Follow a plan that allows for `slack_bytes`; its peak is measured again."""
        self.plan = plan
        self.measured_bytes, self.followed = None, False

    def refuse(self, why: str) -> None:
        """Remember that there is no plan within the budget."""
        self.refused = why

    def forget_plan(self) -> None:
        """Have the plan made anew: there is more to count than there was."""
        self.plan = self.refused = self.measured_bytes = None
        self.slack_bytes, self.followed = 0, False

    def keep_everything(self, why: str) -> None:
        """Have no plan, and passes that begin like this one keep everything."""
        self.plan, self.keeps, self.never = None, True, why

    def follow(self, peak_bytes: int | None) -> None:
        """Note the measured peak of a pass that has followed the plan; None: it is not known."""
        self.followed = True
        if peak_bytes is not None:
            self.measured_bytes = max(peak_bytes, self.problem.update_peak_bytes)

    def allow(self, slack_bytes: int) -> None:
        """Plan with that much less room."""
        self.slack_bytes = slack_bytes

    def recomputed(self, seconds: float) -> None:
        """Note how long a pass recomputed; the first that was not measured counts."""
        if self.rerun_seconds is None:
            self.rerun_seconds = seconds


def problem_of(tape: Tape, facts: GraphFacts) -> Problem:
    """The planning problem of a graph."""
    calls = tuple(
        CallFacts(
            label=label,
            nbytes=o.nbytes,
            cost=o.seconds,
            grad_bytes=o.grad_bytes,
            alias=o.alias,
            stash_bytes=o.stash_bytes,
            drawn_bytes=o.drawn_bytes,
            mask_bytes=o.mask_bytes,
            packed_bytes=o.packed_bytes,
            again=o.again,
            workspace_bytes=o.workspace_bytes,
            backward_workspace_bytes=facts.backward_workspace.get(index, 0),
            backward_cost=facts.backward_seconds.get(index),
            stays_bytes=facts.stays.get(index, 0),
            needs=needs,
            dead=index in facts.dead,
        )
        for index, (label, o, needs) in enumerate(
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
