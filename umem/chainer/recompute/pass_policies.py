"""Policies: what a pass keeps, drops and recomputes; a `Pass` carries their actions out.

=============  =============================================================  ========
policy         decides                                                        wants
=============  =============================================================  ========
`KeepAll`      nothing: a plain step fits; it compares functions with the     nothing
               graph that was learned
`Observe`      by a fixed rule, while a graph is being learned                calls
`FollowPlan`   as the plan says                                               calls
`EvictOnline`  as bytes run out, where graphs do not come back (`online/`)    facts
=============  =============================================================  ========

A policy says how much it wants to know of each function, because a `Call` costs microseconds:
nothing (it is told that one ran), facts (it runs the function itself, and notes what nobody can
find out later) or calls (the runner makes a `Call`, with all that was observed).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.observing import Observed
from umem.chainer.recompute.seen import Carried, SeenGraph, TapeAction
from umem.chainer.recompute.tape import Call, ReadArrays

HIGH = 1 << 40
"""Ranks of calls that follow a plan lie above all others."""
ENDED_EARLY = "a pass ended before its plan did: it keeps the rest"


class PassSoFar(Protocol):
    """A pass, as its policy sees it; see `umem.chainer.recompute.passes.Pass`."""

    number: int
    phase: Literal["forward", "backward", "over"]
    integrity: Literal["intact", "refused", "restored"]
    calls: list[Call]
    reads: ReadArrays

    def refuse(self, why: str) -> None:
        """Keep everything."""

    def trace(self, *marks: Any) -> None:
        """Mix what tells its graph from others into its trail."""


class PassPolicy:
    """Decides what becomes of the saved arrays of one pass.

    Actions are yielded, and carried out one by one before the next is asked for.

    Attributes:
        wants: how much it wants to know of each function.
        seen: the graph that it takes the pass for, where it has a plan or needs none.
    """

    wants: Literal["nothing", "facts", "calls"] = "calls"
    seen: SeenGraph | None = None

    def has_graph(self) -> bool:
        """Tell whether functions are alive that it knows, and that have no `Call`."""
        return False

    def has_run(self, func: Any) -> bool:
        """Tell whether a function is one of those."""
        return False

    def apply(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function of a pass, where the policy does not want calls."""
        return proceed(func, inputs)

    def may_go_alone(self, now: PassSoFar) -> bool:
        """Tell whether the backward that begins may go by Chainer alone: nothing was dropped."""
        return False

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether backward may read arrays that are neither there nor planned to be made."""
        return True

    def before_forward(self) -> Iterator[TapeAction]:
        """Yield what is due before the next function runs, or when forward is over."""
        return iter(())

    def begin_backward(self, calls: Sequence[Call]) -> None:
        """Forward is over, and nothing speaks against going backward as decided."""

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield what is due before a step; what it reads is ensured after that."""
        return iter(())

    def ensure(self, call: Call) -> None:
        """Have there what a step reads."""
        call.ensure()

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Take a step of backward."""
        proceed(func, *args)

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield what is due after a step."""
        return iter(())

    def end(self, popped: Sequence[int], whole: bool) -> Iterator[TapeAction]:
        """Yield what is due once backward is over; ``whole``: without an exception."""
        return iter(())

    def let_go(self) -> None:
        """Hold nothing of a pass that is over."""


class KeepAll(PassPolicy):
    """Leaves a pass to Chainer, and compares it with the graph that was learned.

    Compared is what a larger step would show in: the functions, the parameters and other arrays
    from outside that they read, and what they make.

    Cost: a weak reference and a comparison of shapes for each function.

    Args:
        known: the graphs that may come, the likeliest first; a plain step of each fits.
    """

    wants = "nothing"
    seen: SeenGraph

    def __init__(self, known: Sequence[SeenGraph]) -> None:
        self._known = known
        self.seen = known[0]
        self._funcs: list[weakref.ref[Any]] = []

    def has_graph(self) -> bool:
        """Tell whether a function of the pass is alive."""
        funcs = self._funcs
        if not funcs:
            return False
        return funcs[-1]() is not None or any(reference() is not None for reference in funcs)

    def may_go_alone(self, now: PassSoFar) -> bool:
        """Tell that backward may always go by Chainer alone."""
        return True

    @property
    def has_begun(self) -> bool:
        """True once a function was applied."""
        return bool(self._funcs)

    def apply(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function, and refuse the pass where it is not the one that was learned."""
        outputs = proceed(func, inputs)
        if func.inputs is not None:
            index = len(self._funcs)
            self._funcs.append(weakref.ref(func))
            if now.integrity == "intact" and not self._expects(index, func, outputs):
                now.refuse(other_call(index, func.label))
        return outputs

    def _expects(self, index: int, func: Any, outputs: Any) -> bool:
        """Tell whether a function is the one that was learned, of this graph or one alike."""
        if _is_call(self.seen, index, func, outputs):
            return True
        for other in self._alike(index):
            if _is_call(other, index, func, outputs):
                self.seen = other
                return True
        return False

    def has_ended(self) -> bool:
        """Tell whether all functions came that were learned, of this graph or one alike."""
        count = len(self._funcs)
        if count == len(self.seen.tape.looks):
            return True
        for other in self._alike(count):
            if count == len(other.tape.looks):
                self.seen = other
                return True
        return False

    def _alike(self, count: int) -> Iterator[SeenGraph]:
        """The other graphs whose first calls look the same."""
        so_far = self.seen.tape.looks[:count]
        for other in self._known:
            if other is not self.seen and other.tape.looks[:count] == so_far:
                yield other


def other_call(index: int, label: str) -> str:
    """Word a warning: a pass leaves the graph that was learned."""
    return (
        f"call {index} ({label}) is not what was planned: this pass keeps everything from there "
        "on. A graph that comes back is planned for"
    )


def _is_call(seen: SeenGraph, index: int, func: Any, outputs: Any) -> bool:
    if index >= len(seen.tape.looks):
        return False
    kind, leaves, made = seen.tape.looks[index]
    if kind is not type(func) and kind is not type(owner_of(func)):
        return False
    if len(outputs) != len(made):
        return False
    for y, (shape, dtype) in zip(outputs, made, strict=True):
        array = y._data[0]
        if array.shape != shape or array.dtype != dtype:
            return False
    for place, shape, dtype in leaves:
        node = func.inputs[place] if place < len(func.inputs) else None
        if node is None or node.shape != shape or node.dtype != dtype:
            return False
    return True


class FollowPlan(PassPolicy):
    """Carries a plan out.

    Args:
        seen: the graph, with its plan.
        plan: the plan, which stays that of this pass whatever becomes of the graph's.
    """

    seen: SeenGraph

    def __init__(self, seen: SeenGraph, plan: Carried) -> None:
        self.seen, self.plan = seen, plan
        self._last: Call | None = None
        self._next = 0

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether a function that the plan goes backward through is gone."""
        order = self.seen.facts.order
        return any(call.index in order and not call.has_func for call in calls)

    def after_forward(self, call: Call) -> None:
        """Take a call as planned: how it may run again, and when backward takes it."""
        observed = self.seen.tape.observed[call.index]
        call.learn(observed.again, observed.stash)
        call.set_rank(HIGH + 2 * self.plan.order[call.index])
        self._last = call

    def before_forward(self) -> Iterator[TapeAction]:
        """Yield the plan's actions after the last call.

        Not before another one begins: Chainer reads what the function holds once it has run.
        """
        call, self._last = self._last, None
        if call is None:
            return
        if self.plan.solution.packs and self.seen.tape.observed[call.index].mask_bytes:
            yield TapeAction("pack", call.index)
        yield from self.plan.after_forward.get(call.index, ())

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the plan's actions up to this step."""
        place = self.plan.places.get(call.index, -1)
        if place >= self._next:
            begin, self._next = self._next, place + 1
            yield from self.plan.backward[begin:place]

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the drops that the plan has after this step, and those of what the step used."""
        actions = self.plan.backward
        while self._next < len(actions) and actions[self._next].lets_go:
            self._next += 1
            yield actions[self._next - 1]
        yield from after_use(call, self.seen.tape.observed[call.index])

    def end(self, popped: Sequence[int], whole: bool) -> Iterator[TapeAction]:
        """Yield the drops that are left, of calls that backward has come to."""
        for action in self.plan.backward[self._next :]:
            if action.lets_go and action.call in popped:
                yield action
        self._next = len(self.plan.backward)


def after_use(call: Call, observed: Observed) -> Iterator[TapeAction]:
    """Yield the drops of a call's own arrays after its step of backward: nothing reads them.

    Only those that do something: this is once a function and pass.
    """
    if observed.again or call.offloaded:
        yield TapeAction("drop", call.index)
        if observed.stash:
            yield TapeAction("drop_stash", call.index)
    if observed.again and call.offloaded:
        yield TapeAction("forget", call.index)
    if observed.mask_bytes:
        yield TapeAction("pack", call.index)


FIRST_BLOCK = 4
"""Calls of the first block; each block is one longer than the one before."""
PATIENCE = 2
"""A block ends at the latest at this many times its length."""


class Observe(PassPolicy):
    """Drops by a fixed rule while a graph is being learned, so that it gets through.

    Calls are taken in blocks of growing length, about the square root of twice their number. A
    block ends once it is long enough and little of it is still held by the user as variables: the
    next block goes on from that. The rest of it is dropped then; what was held only for a while is
    dropped at the end of a later block, unless a later block has read it. In backward, missing
    arrays are recomputed from there on demand.

    Args:
        drops: whether anything is dropped; False for the rest of a pass that has left its plan.
    """

    def __init__(self, *, drops: bool = True) -> None:
        self.drops = drops
        self._observed: list[Observed] = []
        self._block: list[tuple[Call, Observed]] = []
        self._ended: set[int] = set()
        self._count = 0
        self._least_held: int | None = None
        self._held: list[Call] = []
        self._crossing: set[int] = set()

    def after_forward(self, call: Call, observed: Observed) -> Iterator[TapeAction]:
        """Take a call that was observed; yields the drops of a block that ends before it."""
        self._observed.append(observed)
        if self._block and self._is_over():
            yield from self._end()
        for source in call.sources:
            if source.call is not None and source.call.index in self._ended:
                self._crossing.add(source.call.index)
        self._block.append((call, observed))

    def _is_over(self) -> bool:
        length = FIRST_BLOCK + self._count
        held = sum(observed.nbytes for call, observed in self._block if call.is_held())
        least = held if self._least_held is None else self._least_held
        self._least_held = min(least, held)
        long_enough = len(self._block) >= length and held <= least
        return long_enough or len(self._block) >= PATIENCE * length

    def _end(self) -> Iterator[TapeAction]:
        held = []
        for call in self._held:
            if call.is_held():
                held.append(call)
            elif call.index not in self._crossing:
                yield from _drop(call)
        for call, observed in self._block:
            self._ended.add(call.index)
            if observed.again and call.is_held():
                held.append(call)
            elif observed.again:
                yield from _drop(call)
            yield TapeAction("pack", call.index)
        self._held, self._block = held, []
        self._count += 1
        self._least_held = None

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the drops of what the step used."""
        return after_use(call, self._observed[call.index]) if self.drops else iter(())

    def let_go(self) -> None:
        """Hold no calls."""
        self._block, self._held = [], []


def _drop(call: Call) -> Iterator[TapeAction]:
    yield TapeAction("drop", call.index)
    yield TapeAction("drop_stash", call.index)
