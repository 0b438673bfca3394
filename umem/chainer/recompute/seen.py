"""A graph that was seen, in three values that never change: its tape, its history, its plan."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from umem.chainer.recompute.below import What
from umem.chainer.recompute.gradients import Contended
from umem.chainer.recompute.observing import Observed
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
class History:
    """The lessons of a graph's passes; replaced, never changed.

    Attributes:
        constant_bytes: parameters and other arrays from outside that it reads; the most so far.
        parameters: weak references to those that it reads, and to others that are updated.
        others_bytes: those others, with a gradient.
        state_bytes: what optimizers keep.
        update_bytes: what the update of one parameter needs only while it runs; the most of all.
        whole_update_bytes: the same where updates do not go in chunks.
        stays: by call, the gradients of parameters that its backward is the first to make.
        old_gradients: by parameter, the bytes of its gradient during forward.
        held_gradients: those of them that are there between forward and backward, too.
        backward_workspace: by call; found when ``is_measured``.
        backward_seconds: by call, of its step of the first backward.
        order: by call, its place in a plain backward.
        ranks: by call, its rank then.
        dead: calls that backward does not come to.
        roots: where backward began.
        keeps_order: whether backward has to take its calls in the order of a plain run: one of
            them does more than compute gradients, or may do so.
        never: why it gets no plan.
        refused: why there is no plan within the budget.
        keeps: whether a pass that may be one of this graph keeps everything.
        outlives: whether its graph is still there when the next pass begins.
        forks: calls at which passes have left its plan.
        differed: whether a plain pass that began like this one went on in an unknown way.
        pass_count: passes that went backward and taught something.
        tries: passes measured for its sake that were none of it, or the first that was.
        slack_bytes: by how much the measured peak was above the predicted.
        followed: whether a pass has followed the plan, and its peak was looked at.
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
    is_measured: bool = False
    backward_workspace: Mapping[int, int] = field(default_factory=dict)
    backward_seconds: Mapping[int, float] = field(default_factory=dict)
    order: Mapping[int, int] = field(default_factory=dict)
    ranks: Sequence[int] = ()
    dead: frozenset[int] = frozenset()
    roots: Roots = ()
    keeps_order: bool = False
    never: str | None = None
    refused: str | None = None
    keeps: bool = False
    outlives: bool = False
    forks: frozenset[int] = frozenset()
    differed: bool = False
    pass_count: int = 0
    tries: int = 0
    slack_bytes: int = 0
    followed: bool = False
    measured_bytes: int | None = None
    rerun_seconds: float | None = None

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

    def goes_back_alike(self, ranks: Sequence[int]) -> bool:
        """Tell whether a plain backward takes calls with these ranks in the order that was seen.

        Ranks are depths, and those of a recurrent state that was cut go on from where it was made:
        the same graph may go backward in another order. Chainer compares ranks, and nothing else.
        """
        order = sorted(self.order, key=self.order.__getitem__)
        old, new = self.ranks, ranks
        return all((old[a] > old[b]) == (new[a] > new[b]) for a, b in pairwise(order))

    @property
    def optimizer_bytes(self) -> int:
        """What optimizers take that it does not read itself."""
        return self.others_bytes + self.state_bytes + self.update_bytes

    def counting(self, optimizers: OptimizerFacts) -> History:
        """With what optimizers take as it is now.

        Parameters that no call reads, such as what `F.forget` captures, count with a gradient.
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


class Due(NamedTuple):
    """An action of a plan, and the call that it is for."""

    kind: Kind
    call: int

    @property
    def lets_go(self) -> bool:
        """True where it frees memory."""
        return self.kind in ("drop", "drop_stash")

    def carry_out(self, calls: Sequence[Call], tier: Tier | None) -> None:
        """Do it, with the calls of a pass; what moves goes down to the tier."""
        call = calls[self.call]
        what: What = "stash" if self.kind.endswith("_stash") else "value"
        if self.kind == "drop":
            call.drop()
        elif self.kind == "drop_stash":
            call.drop_stash()
        elif self.kind == "recompute" and call.has_graph:
            call.make_again()
        elif self.kind in ("send", "send_stash") and tier is not None:
            call.send(tier, what)
        elif self.kind in ("leave", "leave_stash"):
            call.leave(what)
        elif self.kind in ("fetch", "fetch_stash"):
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
    after_forward: Mapping[int, Sequence[Due]]
    backward: Sequence[Due]
    places: Mapping[int, int]
    order: Sequence[int]
    contended: Contended

    @property
    def peak_bytes(self) -> int:
        """The peak that the plan promises, in all."""
        return self.left_alone_bytes if self.fits else self.solution.peak_bytes


@dataclass(frozen=True)
class SeenGraph:
    """A graph that was seen; `Graphs` has the newest of each number."""

    number: int
    tape: Tape
    history: History = field(default_factory=History)
    plan: Carried | None = None

    @property
    def is_left_alone(self) -> bool:
        """True where passes that begin like this one need not be followed."""
        plan, history = self.plan, self.history
        if plan is None or not plan.fits or history.differed:
            return False
        return not history.outlives or plan.fits_twice

    @cached_property
    def problem(self) -> Problem:
        """The planning problem: the calls with all that they need, and the bytes beside them."""
        tape, history = self.tape, self.history
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
                backward_workspace_bytes=history.backward_workspace.get(index, 0),
                backward_cost=history.backward_seconds.get(index),
                stays_bytes=history.stays.get(index, 0),
                needs=needs,
                dead=index in history.dead,
            )
            for index, (label, o, needs) in enumerate(
                zip(tape.labels, tape.observed, tape.needs, strict=True)
            )
        )
        return Problem(
            calls,
            tape.edges,
            history.outside_bytes,
            history.forward_bytes,
            history.order,
            history.keeps_order,
            history.outlives,
            history.update_bytes,
            history.whole_update_bytes,
        )
