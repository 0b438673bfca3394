"""What passes say of a graph: its calls, what they take, and the order of a plain backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import chainer

from umem.chainer.recompute.observing import Observed
from umem.chainer.recompute.sums import Contended
from umem.chainer.recompute.tape import LEAF, Call, Signature
from umem.chainer.recompute.wiring import root_of
from umem.planner import Node, Plan
from umem.planner.schedule import Kind

Roots = tuple[tuple[int, int], ...]
"""Where a backward begins: calls and their outputs."""


Look = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""A call's kind, its inputs from outside (place, shape, dtype), and what it makes."""


class Due(NamedTuple):
    """An action of a plan, and the call that it is for."""

    kind: Kind
    call: int


@dataclass
class Learned:
    """What is known of a graph, and once it is planned how to run it."""

    signatures: list[Signature]
    labels: list[str]
    observed: list[Observed]
    edges: list[tuple[int, int]]
    needs: list[tuple[int, ...]]
    users: dict[Any, list[tuple[int, int]]]
    looks: list[Look] = field(init=False)
    constant_bytes: int = 0
    state_bytes: int = 0
    parameters: dict[int, Any] = field(default_factory=dict)
    """Weak references to those that it reads, and others that are updated."""
    others_bytes: int = 0
    """Of those others, with a gradient."""
    stays: dict[int, int] = field(default_factory=dict)
    old_gradients: dict[int, int] = field(default_factory=dict)
    held_gradients: dict[int, int] = field(default_factory=dict)
    never: str | None = None
    passes: int = 0
    measured: bool = False
    backward_workspace: dict[int, int] = field(default_factory=dict)
    plain: dict[int, int] = field(default_factory=dict)
    """By call, its place in a plain backward."""
    plain_ranks: list[int] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    roots: Roots = ()
    is_ordered: bool = False
    """Whether backward has to take its calls in the order of a plain run: one of them does more
    than compute gradients (a backward of its own inside, a user's function), or may do so."""
    keeps: bool = False
    """Whether a pass that may be one of this graph keeps everything."""
    forks: set[int] = field(default_factory=set)
    """Calls at which passes have left its plan."""
    outlives: bool = False
    """Whether its graph is still there when the next pass begins."""
    tries: int = 0
    """Passes that were measured for its sake and were none of it, or the first that was."""
    # once planned
    plan: Plan | None = None
    fits: bool = False
    """Whether a plain step is within the budget."""
    fits_twice: bool = False
    """Whether one is while the graph of another is still there."""
    differed: bool = False
    """Whether a plain pass that began like this one went on in a way that is not known."""
    refused: str | None = None
    packs: bool = False
    keep_all_bytes: int = 0
    slack_bytes: int = 0
    after_forward: dict[int, list[Due]] = field(default_factory=dict)
    backward: list[Due] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    contended: Contended = field(default_factory=dict)
    # once followed
    followed: bool = False
    measured_bytes: int | None = None
    rerun_seconds: float | None = None

    @property
    def is_left_alone(self) -> bool:
        """Whether passes that begin like this one need not be followed."""
        return self.fits and not self.differed and (not self.outlives or self.fits_twice)

    def __post_init__(self) -> None:
        """What passes are compared by where nothing is done to them."""
        self.looks = [
            (kind, tuple((at, *e[2:]) for at, e in enumerate(wiring) if e[0] == LEAF), made)
            for kind, wiring, made in self.signatures
        ]

    @property
    def seconds(self) -> float:
        """Of the forward pass."""
        return sum(o.seconds for o in self.observed)

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"{label}#{index}" for index, label in enumerate(self.labels)]

    @property
    def peak_bytes(self) -> int | None:
        """What the plan promises, in all."""
        if self.plan is None:
            return None
        if self.fits:
            return self.keep_all_bytes
        return self.constant(self.packs) + self.plan.peak_bytes

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

    def forget_plan(self) -> None:
        """Have the plan made anew: there is more to count than there was."""
        self.plan = self.refused = self.measured_bytes = None
        self.followed = False

    def count_updated(self, updated: Iterable[Any]) -> bool:
        """Count what optimizers keep as it is now; whether that is more than before.

        ``updated``: parameters that optimizers have updated; those that no call reads, such as
        what `F.forget` captures, count with a gradient.
        """
        before = self.others_bytes + self.state_bytes
        for parameter in updated:
            if id(parameter) not in self.parameters:
                self.parameters[id(parameter)] = weakref.ref(parameter)
                self.others_bytes += 2 * parameter.array.nbytes
        found = [reference() for reference in self.parameters.values()]
        rules = [p.update_rule for p in found if p is not None]
        self.state_bytes = sum(map(state_bytes, rules))
        return self.others_bytes + self.state_bytes > before

    def goes_back_alike(self, ranks: Sequence[int]) -> bool:
        """Whether a plain backward of calls with these ranks takes them in the order it took them.

        Ranks are depths, and those of a recurrent state that was cut go on from where it was made:
        the same graph may go backward in another order. Chainer compares ranks, and nothing else.
        """
        order = sorted(self.plain, key=self.plain.__getitem__)
        old, new = self.plain_ranks, ranks
        return all((old[a] > old[b]) == (new[a] > new[b]) for a, b in pairwise(order))

    @property
    def held(self) -> dict[int, int]:
        """By call, the bytes that stay as long as the graph: of what must not run twice.

        Where its outputs are views, those of what they lie in.
        """
        found: dict[int, int] = {}
        for index, o in enumerate(self.observed):
            if o.again:
                continue
            found[index] = found.get(index, 0) + (0 if index in self.dead else o.stash_bytes)
            root = index
            while (base := self.observed[root].alias) is not None:
                root = base
            if root == index or self.observed[root].again:
                found[root] = found.get(root, 0) + self.observed[root].nbytes
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes that stay as long as the graph; twice where it outlives its pass."""
        return sum(self.held.values()) * (2 if self.outlives else 1)

    def constant(self, packs: bool, *, plain: bool = False) -> int:
        """Bytes that are there all the time: what is outside, what was drawn, what is held.

        In a ``plain`` step nothing is held for the sake of running again.
        """
        drawn = 0 if plain else self.held_bytes
        drawn += sum(
            (o.mask_bytes + 7) // (8 * 4) + 1 if packs and o.mask_bytes else o.drawn_bytes
            for o in self.observed
        )
        return self.outside_bytes + drawn

    def _summed(self) -> set[int]:
        """Calls whose outputs are summed up and nothing else: that gradient is a view of one."""
        users: dict[int, set[str]] = {}
        for source, user in self.edges:
            users.setdefault(source, set()).add(self.labels[user])
        return {source for source, labels in users.items() if labels == {"Sum"}}

    def nodes(self, packs: bool, *, plain: bool = False) -> list[Node]:
        """The graph's nodes for a planner: what is held is a constant, and takes nothing here.

        For a ``plain`` step, in which nothing is held, it is a part of its node.
        """
        names, views = self.names, self._summed()
        held = {} if plain else self.held
        made = []
        for index, (name, o) in enumerate(zip(names, self.observed, strict=True)):
            dead = index in self.dead
            mask = o.mask_bytes if packs else 0
            made.append(
                Node(
                    name=name,
                    nbytes=0 if index in held else o.nbytes,
                    cost=o.seconds,
                    alias_of=None if o.alias is None else names[o.alias],
                    recomputable=o.again,
                    stash_bytes=0
                    if dead or o.alias is not None or index in held
                    else o.stash_bytes,
                    grad_bytes=0 if dead or index in views else o.grad_bytes,
                    workspace_bytes=o.workspace_bytes + mask + mask // 4,
                    backward_workspace_bytes=self.backward_workspace.get(index, 0) + mask,
                    stays_bytes=0 if dead else self.stays.get(index, 0),
                    needs=() if dead else tuple(names[i] for i in self.needs[index]),
                )
            )
        return made


def learn(calls: list[Call], observed: list[Observed]) -> Learned:
    """What a pass that has gone forward says of its graph."""
    edges: dict[tuple[int, int], None] = {}
    users: dict[Any, list[tuple[int, int]]] = {}
    needs = []
    for call in calls:
        for place, entry in enumerate(call.signature[1]):
            source = call.sources[place].call
            users.setdefault(entry[:2], []).append((call.index, place))
            if source is not None:
                edges[source.index, call.index] = None
        alive = call.needs() if call.has_graph else []
        needs.append(tuple(dict.fromkeys(c.index for c in alive)))
    learned = Learned(
        [call.signature for call in calls],
        [call.label for call in calls],
        list(observed),
        list(edges),
        needs,
        users,
    )
    learned.is_ordered = any(_needs_order(call.signature[0]) for call in calls)
    return learned


def _needs_order(kind: type) -> bool:
    """Whether the backward of a function may do more than compute gradients."""
    if kind.__module__.startswith(("chainer.", "umem.")):
        return kind.__name__ in ("Forget", "Checkpoint")
    return not getattr(kind, "umem_recomputable", False)


def look_outside(
    learned: Learned, calls: list[Call], old_gradients: Mapping[int, int], others: Iterable[Any]
) -> None:
    """Between forward and backward: what there is beside the graph's own arrays.

    Args:
        learned: what is known of the graph; it keeps the most of all passes.
        calls: the pass's calls.
        old_gradients: by parameter, the bytes of its gradient during forward.
        others: parameters that optimizers have updated.
    """
    constant = 0
    stays: dict[int, int] = {}
    seen: set[int] = set()
    for call in reversed(calls):
        func = call._func()
        if func is None:
            continue
        for node, source in zip(func.inputs, call.sources, strict=True):
            if source.call is not None or source.array is None or id(node) in seen:
                continue
            seen.add(id(node))
            if node.requires_grad:  # backward comes here first
                stays[call.index] = stays.get(call.index, 0) + source.array.nbytes
            held = node.get_variable_or_none()
            if isinstance(held, chainer.Parameter):
                learned.parameters[id(held)] = weakref.ref(held)
                if gradient_bytes(held):
                    learned.held_gradients[id(held)] = gradient_bytes(held)
            root = root_of(source.array)
            if id(root) not in seen:
                seen.add(id(root))
                constant += root.nbytes
    learned.count_updated(others)
    learned.stays = stays
    learned.constant_bytes = max(learned.constant_bytes, constant)
    learned.old_gradients |= old_gradients


def gradient_bytes(parameter: Any) -> int:
    """Bytes of a parameter's gradient, as far as it has one."""
    grad = parameter.grad if parameter._grad_valid else None
    return 0 if grad is None else int(grad.nbytes)


def state_bytes(rule: Any) -> int:
    """Bytes of what an optimizer keeps for a parameter."""
    state = (getattr(rule, "state", None) or {}).values()
    full = getattr(getattr(rule, "_fp32_param", None), "array", None)
    return sum(getattr(value, "nbytes", 0) for value in (*state, full))


def calibrate(
    learned: Learned, observed: list[Observed], workspaces: list[int], backward: dict[int, int]
) -> None:
    """Add the workspace of a calibration pass, and what was not looked at closely before it."""
    learned.observed = [
        o._replace(
            workspace_bytes=max(o.workspace_bytes, workspace),
            again=o.again if o.looked else new.again,
        )
        for o, new, workspace in zip(learned.observed, observed, workspaces, strict=True)
    ]
    learned.backward_workspace = dict(backward)
    learned.measured = True
