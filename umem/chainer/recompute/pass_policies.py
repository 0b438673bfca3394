"""Policies decide what a pass keeps, drops and recomputes; a `Pass` carries their actions out.

============  ==============================================================
`FollowPlan`  follows the plan
`Evict`       evicts as bytes run out, while a graph is being learned, and if
              graphs do not repeat; drops nothing if a plain step fits
============  ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from umem.chainer.forward_state import ReadArrays
from umem.chainer.recompute.facts import Observed
from umem.chainer.recompute.seen import Carried, SeenGraph, TapeAction, drops_of
from umem.chainer.recompute.tape import Call

HIGH = 1 << 40
"""Base of the ranks of calls that follow a plan, above all of Chainer's ranks."""
ENDED_EARLY = "a pass ended before its plan did: it keeps the rest"


class PassSoFar(Protocol):
    """A pass, as its policy sees it; see `umem.chainer.recompute.passes.Pass`."""

    number: int
    phase: Literal["forward", "backward", "over"]
    trail: int  # a hash of the functions so far, which distinguishes its graph
    integrity: Literal["intact", "refused", "restored"]
    calls: list[Call]
    reads: ReadArrays

    def refuse(self, why: str) -> None:
        """Keep everything from now on."""

    def carry_out(self, actions: Iterable[TapeAction]) -> None:
        """Carry out actions on its calls, one after another."""

    def retry_after_oom(self, run: Callable[[], Any]) -> Any:
        """Run something that allocates; if memory runs out, make room and run it again."""


class PassPolicy:
    """Decides which saved tensors of one pass are dropped, recomputed and offloaded.

    Methods yield actions; each is carried out before the next is requested.

    Attributes:
        applies: whether the policy applies functions itself, and makes a `Call` only if necessary.
        learns: whether each call is observed, to learn its graph.
        evicts: whether arrays are evicted that no plan drops.
        seen: the expected graph of the pass, if that has a plan.
    """

    applies = learns = evicts = False
    seen: SeenGraph | None = None

    @property
    def is_alone(self) -> bool:
        """True if Chainer runs the pass alone, because a plain step fits."""
        return False

    def has_graph(self) -> bool:
        """Tell whether a function that the policy applied without a `Call` is alive."""
        return False

    def has_run(self, func: Any) -> bool:
        """Tell whether the policy applied this function, which has no `Call`."""
        return False

    def apply(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function of the pass; called if the policy ``applies`` functions."""
        return proceed(func, inputs)

    def may_go_alone(self, now: PassSoFar) -> bool:
        """Tell whether Chainer may run the backward that begins alone, as nothing was dropped."""
        return False

    def has_ended(self, now: PassSoFar) -> bool:
        """Tell whether the pass, as far as it is compared with a graph, may run backward here."""
        return True

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether backward may read missing arrays that are not planned to be recomputed."""
        return True

    def before_forward(self) -> Iterator[TapeAction]:
        """Yield the actions due before the next function runs, or at the end of forward."""
        return iter(())

    def begin_backward(self, calls: Sequence[Call]) -> None:
        """Handle the end of forward, if backward follows the policy."""

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the actions due before a step of backward; `ensure` follows them."""
        return iter(())

    def ensure(self, now: PassSoFar, call: Call) -> None:
        """Restore the saved tensors that a step of backward reads."""
        call.ensure()

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Run a step of backward."""
        proceed(func, *args)

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the actions due after a step of backward."""
        return iter(())

    def end(self, popped: Collection[int]) -> Iterator[TapeAction]:
        """Yield the actions due at the end of backward, which has popped these calls."""
        return iter(())

    def learn(self, now: PassSoFar) -> None:
        """Add the facts of a finished pass without a plan to the experience."""

    def make_room(self, now: PassSoFar, busy: Collection[int]) -> bool:
        """Drop arrays because a GPU's memory has run out; tell whether there were any to drop.

        By default, it drops every second call that has arrays. They are recomputed on demand.

        Args:
            now: the pass.
            busy: the calls whose arrays are being read.
        """
        found = [c for c in now.calls if c.index not in busy and c.holds_droppable][::2]
        now.carry_out(action for call in found for action in drops_of(call.index))
        return bool(found)

    def release(self) -> None:
        """Release all references to a pass that is over."""


def other_call(index: int, label: str) -> str:
    """Format the warning that a pass departs from its graph at a call."""
    return (
        f"call {index} ({label}) differs from the plan: this pass keeps everything from there "
        "on. A graph that repeats gets a plan"
    )


class FollowPlan(PassPolicy):
    """Drops, recomputes and offloads as planned.

    Args:
        seen: the graph, with its plan.
        plan: the plan, which this pass follows even if the graph gets another.
    """

    seen: SeenGraph

    def __init__(self, seen: SeenGraph, plan: Carried) -> None:
        self.seen, self.plan = seen, plan
        self._last: Call | None = None
        self._next = 0

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether a function that the planned backward pops was freed."""
        order = self.seen.facts.order
        return any(call.index in order and not call.has_func for call in calls)

    def after_forward(self, call: Call) -> None:
        """Set up a call as planned: its function state, its rank, whether it may be recomputed."""
        observed = self.seen.tape.observed[call.index]
        call.learn(observed.again, observed.stash)
        call.set_rank(HIGH + 2 * self.plan.order[call.index])
        self._last = call

    def before_forward(self) -> Iterator[TapeAction]:
        """Yield the planned actions that follow the last call.

        They are due when the next one begins and not before, because Chainer reads a function's
        state once it has run.
        """
        call, self._last = self._last, None
        if call is None:
            return
        packs = self.plan.solution.packs and not self.plan.fits
        if packs and self.seen.tape.observed[call.index].mask_bytes:
            yield TapeAction("pack", call.index)
        yield from self.plan.after_forward.get(call.index, ())

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the planned actions up to this step."""
        place = self.plan.places.get(call.index, -1)
        if place >= self._next:
            begin, self._next = self._next, place + 1
            yield from self.plan.backward[begin:place]

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the planned drops that follow this step, and the drops of the step's own arrays."""
        actions = self.plan.backward
        while self._next < len(actions) and actions[self._next].drops:
            self._next += 1
            yield actions[self._next - 1]
        if not self.plan.fits:
            yield from after_use(call, self.seen.tape.observed[call.index])

    def end(self, popped: Collection[int]) -> Iterator[TapeAction]:
        """Yield the remaining planned drops, of calls that backward has reached."""
        for action in self.plan.backward[self._next :]:
            if action.drops and action.call in popped:
                yield action
        self._next = len(self.plan.backward)


def after_use(call: Call, observed: Observed) -> Iterator[TapeAction]:
    """Yield the drops of a call's own arrays after its step of backward, as nothing reads them.

    Actions without effect are omitted, because this runs once for each function and pass.
    """
    if observed.again or call.offloaded:
        yield TapeAction("drop", call.index)
        if observed.stash:
            yield TapeAction("drop_stash", call.index)
    if observed.again and call.offloaded:
        yield TapeAction("forget", call.index)
    if observed.mask_bytes:
        yield TapeAction("pack", call.index)
