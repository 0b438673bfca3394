"""Policies: what a pass keeps, drops and recomputes; a `Pass` carries their actions out.

============  ==============================================================
`FollowPlan`  as the plan says
`Observe`     by a fixed rule, while a graph is being learned
`Evict`       as bytes run out, where graphs do not come back; nothing where
              a plain step fits
============  ==============================================================

`Evict` applies each function itself, and makes no `Call` before it has to evict, because a `Call`
costs microseconds. For the others the runner makes a `Call`, with all that was observed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from umem.chainer.forward_state import ReadArrays
from umem.chainer.function_facts import gives_all_gradients
from umem.chainer.recompute.facts import Observed
from umem.chainer.recompute.seen import Carried, SeenGraph, TapeAction
from umem.chainer.recompute.tape import Call
from umem.trace.recording import root_of

HIGH = 1 << 40
"""Base of the ranks of calls that follow a plan, above all ranks that Chainer gives."""
ENDED_EARLY = "a pass ended before its plan did: it keeps the rest"


class PassSoFar(Protocol):
    """A pass, as its policy sees it; see `umem.chainer.recompute.passes.Pass`."""

    number: int
    phase: Literal["forward", "backward", "over"]
    trail: int
    integrity: Literal["intact", "refused", "restored"]
    calls: list[Call]
    reads: ReadArrays

    def refuse(self, why: str) -> None:
        """Keep everything from now on."""

    def carry_out(self, actions: Iterable[TapeAction]) -> None:
        """Carry out actions on its calls, one after another."""

    def trace(self, *marks: Any) -> None:
        """Mix marks that tell its graph from others into the pass's trail."""


class PassPolicy:
    """Decides which saved tensors of one pass are dropped, recomputed and offloaded.

    Methods yield actions; each is carried out before the next is requested.

    Attributes:
        applies: whether the policy applies functions itself, and makes a `Call` only if it has to.
        seen: the graph that the pass is taken for, if that has a plan.
    """

    applies = False
    seen: SeenGraph | None = None

    @property
    def is_alone(self) -> bool:
        """True if Chainer runs the pass alone, because a plain step fits."""
        return False

    @property
    def has_begun(self) -> bool:
        """False as long as no function was applied, where that is known."""
        return True

    def has_graph(self) -> bool:
        """Tell whether a function that the policy applied, and that has no `Call`, is alive."""
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
        """Tell whether the pass may go backward here, as far as it is compared with a graph."""
        return True

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether backward may read missing arrays that are not planned to be recomputed."""
        return True

    def before_forward(self) -> Iterator[TapeAction]:
        """Yield the actions due before the next function runs, or at the end of forward."""
        return iter(())

    def begin_backward(self, calls: Sequence[Call]) -> None:
        """Handle the end of forward, if the pass goes backward as the policy decided."""

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the actions due before a step of backward; `ensure` follows them."""
        return iter(())

    def ensure(self, call: Call) -> None:
        """Make the saved tensors that a step of backward reads available."""
        call.ensure()

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Run a step of backward."""
        proceed(func, *args)

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the actions due after a step of backward."""
        return iter(())

    def end(self, popped: Sequence[int], whole: bool) -> Iterator[TapeAction]:
        """Yield the actions due at the end of backward; ``whole``: no exception ended it."""
        return iter(())

    def make_room(self, now: PassSoFar, busy: Collection[int]) -> bool:
        """Drop arrays because a GPU's memory has run out; tell whether there were any to drop.

        By default those of every second call that has any. They are recomputed on demand.

        Args:
            now: the pass.
            busy: the calls whose arrays are read now.
        """
        found = [c for c in now.calls if c.index not in busy and c.holds_droppable][::2]
        now.carry_out(action for call in found for action in _drop(call))
        return bool(found)

    def let_go(self) -> None:
        """Release all references to a pass that is over."""


def other_call(index: int, label: str) -> str:
    """Format the warning that a pass leaves its graph at a call."""
    return (
        f"call {index} ({label}) is not what was planned: this pass keeps everything from there "
        "on. A graph that comes back is planned for"
    )


class FollowPlan(PassPolicy):
    """Drops, recomputes and offloads as a plan says.

    Args:
        seen: the graph, with its plan.
        plan: the plan, which this pass keeps to even if the graph gets another.
    """

    seen: SeenGraph

    def __init__(self, seen: SeenGraph, plan: Carried) -> None:
        self.seen, self.plan = seen, plan
        self._last: Call | None = None
        self._next = 0

    def is_unusual(self, calls: Sequence[Call]) -> bool:
        """Tell whether a function that the planned backward pops is gone."""
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
        while self._next < len(actions) and actions[self._next].lets_go:
            self._next += 1
            yield actions[self._next - 1]
        if not self.plan.fits:
            yield from after_use(call, self.seen.tape.observed[call.index])

    def end(self, popped: Sequence[int], whole: bool) -> Iterator[TapeAction]:
        """Yield the planned drops that are left, of calls that backward has reached."""
        for action in self.plan.backward[self._next :]:
            if action.lets_go and action.call in popped:
                yield action
        self._next = len(self.plan.backward)


def after_use(call: Call, observed: Observed) -> Iterator[TapeAction]:
    """Yield the drops of a call's own arrays after its step of backward, as nothing reads them.

    Actions without effect are left out, because this runs once for each function and pass.
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
"""Calls of the first block; each block is one call longer than the one before."""
PATIENCE = 2
"""A block ends at the latest at this multiple of its length."""


def _unknown(call: Call) -> list[bool]:
    """Return which outputs have a gradient for sure, of a call that has run forward."""
    return [call.output_count == 1] * call.output_count


class KeptBytes:
    """Counts the bytes in memory during the forward of a pass that is observed.

    Counted are the arrays from outside that calls have read, kept outputs and function state, drawn
    masks, and twice the most bytes of one call, as the workspace of the next calls is not known.
    """

    def __init__(self) -> None:
        self._outside: dict[int, int] = {}
        self._calls: list[tuple[Call, Observed]] = []
        self._drawn = self._most = 0

    def add(self, call: Call, observed: Observed) -> int:
        """Add a call that has run; return the bytes in memory."""
        for source in call.sources:
            if source.call is None and source.array is not None:
                root = root_of(source.array)
                self._outside[id(root)] = root.nbytes
        self._calls = [(c, o) for c, o in self._calls if c.values is not None]
        self._calls.append((call, observed))
        self._drawn += observed.drawn_bytes
        self._most = max(self._most, observed.nbytes + observed.workspace_bytes)
        kept = sum(o.nbytes + o.stash_bytes for _, o in self._calls)
        return sum(self._outside.values()) + kept + self._drawn + 2 * self._most

    def every_second(self, last: Call) -> Iterator[TapeAction]:
        """Yield the drops of every second output that is kept and can be recomputed."""
        for call in [c for c, o in self._calls if o.again and c.values is not None][::2]:
            if call is not last and not call.is_held():
                yield from _drop(call)


class Observe(PassPolicy):
    """Drops by a fixed rule while a graph is being learned, as a plain step may not fit.

    Calls are taken in blocks of growing length; there are about as many as the square root of twice
    the number of calls. A block ends once it is long enough and variables of the user hold few of
    its outputs, as the next block starts from those. Its other outputs are dropped then. Outputs
    that variables held only for a while are dropped at the end of a later block, unless a later
    block has read them. In backward, dropped arrays are recomputed on demand from the kept ones,
    or by a plan that is made at the end of forward (`go_back_by`).

    Backward is planned at the end of forward if Chainer's order can be known then, and the budget
    is no share. Up to a function that prevents that, forward keeps little: where what it keeps
    comes near the budget, a block ends at once, and every second output that earlier blocks have
    kept is dropped.

    Args:
        room: the bytes to stay within; 0: as few as can be; None: not limited.
        drops: whether anything is dropped; False for the rest of a pass that has left its plan.
    """

    def __init__(self, room: int | None = None, *, drops: bool = True) -> None:
        self.drops = drops
        self._kept = None if room is None else KeptBytes()
        self._room = room or 0
        self._observed: list[Observed] = []
        self._block: list[tuple[Call, Observed]] = []
        self._ended: set[int] = set()
        self._count = 0
        self._least_held: int | None = None
        self._held: list[Call] = []
        self._crossing: set[int] = set()
        self._plan: FollowPlan | None = None

    def after_forward(self, call: Call, observed: Observed) -> Iterator[TapeAction]:
        """Record an observed call; yield the drops of the block before it, if that ends."""
        self._observed.append(observed)
        if self._kept is not None and not gives_all_gradients(call.func, _unknown(call)):
            self._kept = None
        near = self._kept
        if near is not None and near.add(call, observed) <= self._room:
            near = None
        if self._block and (near is not None or self._is_over()):
            yield from self._end()
        if near is not None:
            yield from near.every_second(call)
        for source in call.sources:
            if source.call is not None and source.call.index in self._ended:
                self._crossing.add(source.call.index)
        self._block.append((call, observed))

    def make_room(self, now: PassSoFar, busy: Collection[int]) -> bool:
        """Drop arrays because a GPU's memory has run out, and keep as few as can be from now on."""
        self._room = 0
        return super().make_room(now, busy)

    def _is_over(self) -> bool:
        length = FIRST_BLOCK + self._count
        held = sum(observed.nbytes for call, observed in self._block if call.is_held())
        least = held if self._least_held is None else self._least_held
        self._least_held = min(least, held)
        long_enough = len(self._block) >= length and held <= least
        return long_enough or len(self._block) >= PATIENCE * length

    def _end(self) -> Iterator[TapeAction]:
        """End the block: yield the drops of its outputs, except those that variables hold.

        Outputs of earlier blocks are dropped if variables hold them no more and no later block read
        them.
        """
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

    def go_back_by(self, plan: FollowPlan) -> None:
        """Let backward follow a plan that was made at the end of forward."""
        self._plan = plan

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the planned actions up to this step; none without a plan."""
        return iter(()) if self._plan is None else self._plan.before_backward(call)

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the drops of the step's own arrays, if anything is dropped, and planned ones."""
        if self._plan is not None:
            return self._plan.after_backward(call)
        return after_use(call, self._observed[call.index]) if self.drops else iter(())

    def end(self, popped: Sequence[int], whole: bool) -> Iterator[TapeAction]:
        """Yield the planned drops that are left."""
        return iter(()) if self._plan is None else self._plan.end(popped, whole)

    def let_go(self) -> None:
        """Release all calls."""
        self._block, self._held, self._plan, self._kept = [], [], None, None


def _drop(call: Call) -> Iterator[TapeAction]:
    yield TapeAction("drop", call.index)
    yield TapeAction("drop_stash", call.index)
