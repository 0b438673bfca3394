"""One forward and the backward after it: following a plan, or learning the graph.

While a graph is being learned, arrays are dropped by the rule of `plain_pass`, so that what does
not fit gets through. In backward, what is missing is made again on demand, and goes after its last
use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer

from umem.chainer.recompute.gradients import GradientSums, OldGradients
from umem.chainer.recompute.inputs import ReadArrays
from umem.chainer.recompute.observing import Before, Observed, gradient_bytes, observe
from umem.chainer.recompute.plain_pass import Fallback
from umem.chainer.recompute.seen import Carried, Roots, SeenGraph
from umem.chainer.recompute.tape import Call
from umem.chainer.saved.tiers.tier import Tier

HIGH = 1 << 40
"""Ranks of calls that follow a plan lie above all others."""


class Pass:
    """One forward and its backward.

    Args:
        number: passes are numbered.
        known: the graphs that were seen, as of now.
        debug: whether to keep checksums.
        on_second: called with its calls when its graph goes backward after an update.
        tier: where its plan moves arrays.

    Attributes:
        calls: in the order of forward.
        never: why it keeps everything, where it does.
        differs: whether it has left its plan.
        went_back: whether a backward of it is over.
        popped: by call, its place in this backward.
        has_nested: whether a call's backward had a backward of its own inside.
        is_online: whether it decides as it goes what to let go.
        trail: a number that two passes of one graph have in common, where it learns.
    """

    is_online = False

    def __init__(
        self,
        number: int,
        known: Sequence[SeenGraph],
        debug: bool,
        on_second: Callable[[Sequence[Any]], None],
        tier: Tier | None = None,
    ) -> None:
        self.number = number
        self._tier = tier
        self._known = known
        self._debug = debug
        self.calls: list[Call] = []
        self.observed: list[Observed] = []
        self.workspace: list[int] = []
        self.backward_workspace: dict[int, int] = {}
        self.backward_seconds: dict[int, float] = {}
        self.old_gradients: dict[int, int] = {}
        self.never: str | None = None
        self.differs = False
        self.went_back = self.is_stale = self.forward_is_over = self.is_whole = False
        self.popped: dict[int, int] = {}
        self.trail = 0
        self.roots: Roots = ()
        self.signatures = signatures = list[Any]()
        self.reads = ReadArrays(lambda: on_second(signatures))  # which must not hold the pass
        self._seen: SeenGraph | None = None
        self._carried: Carried | None = None
        self._leaves: dict[int, tuple[int, Any]] = {}
        self._fallback = Fallback()
        self._waits: Call | None = None
        self._next = 0
        self._sums: GradientSums | None = None
        self._gradients: OldGradients | None = None
        self.has_nested = False

    @property
    def follows(self) -> SeenGraph | None:
        """The graph whose plan it follows."""
        return self._seen

    @property
    def _plan(self) -> Carried | None:
        return self._carried

    @property
    def learns(self) -> bool:
        """True where it has to observe its calls."""
        return self._seen is None

    @property
    def looks(self) -> bool:
        """True where the next call may be observed: a pass has left the plan at this one before."""
        return self._seen is None or len(self.calls) in self._seen.forks

    @property
    def is_over(self) -> bool:
        """True where nothing of it can still be used."""
        return bool(self.calls) and not any(call.has_graph for call in self.calls)

    @property
    def goes_on(self) -> bool:
        """True where the next call is one of it."""
        if self.went_back or self.is_stale:
            return False
        return not self.calls or self.calls[-1].has_graph or not self.is_over

    @property
    def is_unusual(self) -> bool:
        """True where backward may read what is neither there nor planned to be made again."""
        if self._seen is None or self.never is not None or self.reads.is_changed:
            return True
        order = self._seen.facts.order
        return any(call.index in order and not call.has_func for call in self.calls)

    def refuse(self, why: str) -> None:
        """Keep everything; the first reason stays."""
        self.never = self.never or why

    def keep_everything(self, why: str) -> None:
        """Keep everything from the first call on, and copy no parameters."""
        self.never = why
        self.reads.stop_copying()

    def go_stale(self) -> None:
        """End with the next call: it reads other arrays, and begins another pass."""
        self.is_stale = True

    def become_whole(self) -> bool:
        """All of its arrays are to be there; whether that is so for the first time."""
        first, self.is_whole = not self.is_whole, True
        return first

    def begin_backward(self, roots: Roots) -> None:
        """Backward begins at these roots."""
        self.roots = roots
        self.signatures += [call.signature for call in self.calls]

    def let_go(self) -> None:
        """Hold no more than its graph does; nothing is looked up in it any more."""
        self._leaves = {}
        if all(call.index in self.popped or not call.has_graph for call in self.calls):
            self.calls = []

    # -- forward ---------------------------------------------------------------------------

    def add(
        self, func: Any, inputs: Any, outputs: Any, before: Before, seconds: float, workspace: int
    ) -> None:
        """A function was applied."""
        call = Call(
            self.number, len(self.calls), func, inputs, outputs, self._leaves, self.reads,
            self._debug,
        )  # fmt: skip
        func._umem_call = call  # Chainer's graph finds it again, and holds it as long as it lives
        self.calls.append(call)
        self.workspace.append(workspace)
        if call.from_elsewhere:
            self.never = "it goes on from an earlier pass"
        if self.forward_is_over and self._seen is not None:
            self._stop_following(self._seen)  # a backward has begun, and forward goes on
        else:
            self._match(call)
        if self._seen is not None:
            self._obey(call, self._seen)
            return
        self.trail = hash((self.trail, func.__class__, sum(y.nbytes for y in call.values or ())))
        observed = observe(call, func, inputs, before, seconds, workspace)
        self.observed.append(observed)
        call.learn(observed.again, observed.stash)
        for x in inputs:
            if isinstance(x, chainer.Parameter) and gradient_bytes(x):
                self.old_gradients[id(x)] = gradient_bytes(x)
        if self.differs or self.never:
            call.let_go()
        else:
            self._fallback.add(call, observed)

    def _match(self, call: Call) -> None:
        """Follow a plan from the first call on, as long as the graph is the planned one."""
        if call.index == 0:
            for seen in reversed(self._known):
                if seen.plan is not None and seen.tape.signatures[0] == call.signature:
                    self._seen, self._carried = seen, seen.plan
                    self.reads.stop_copying()
                    return
        elif self._seen is not None:
            signatures = self._seen.tape.signatures
            if call.index >= len(signatures) or signatures[call.index] != call.signature:
                self._leave(self._seen)

    def _leave(self, old: SeenGraph) -> None:
        """The graph is not the planned one: follow another plan that fits so far, or none."""
        old.fork(len(self.calls) - 1)
        self._seen = self._carried = None
        so_far = [call.signature for call in self.calls]
        for seen in reversed(self._known):
            if seen.plan is not None and seen is not old and seen.tape.begins_with(so_far):
                self._follow_instead(seen, self.calls[:-1])
                return
        self._stop_following(old)

    def _follow_instead(self, seen: SeenGraph, calls: Sequence[Call]) -> None:
        self._seen, self._carried = seen, seen.plan
        for call in calls:
            self._obey(call, seen)
            self.catch_up()

    def _stop_following(self, old: SeenGraph) -> None:
        """Keep everything from the last call on."""
        self._seen = self._carried = None
        self.differs = True
        self.reads.copy_from_now_on()
        self.observed = list(old.tape.observed[: len(self.calls) - 1])
        self.use_plain_ranks()
        for call in self.calls[:-1]:
            call.let_go()

    def _obey(self, call: Call, seen: SeenGraph) -> None:
        assert self._carried is not None
        observed = seen.tape.observed[call.index]
        call.learn(observed.again, observed.stash)
        call.set_rank(HIGH + 2 * self._carried.order[call.index])
        self._waits = call

    def catch_up(self) -> None:
        """Let go what the plan lets go after the last call.

        Not before another one begins: Chainer reads what the function holds once it has run.
        """
        call, seen, plan = self._waits, self._seen, self._plan
        self._waits = None
        if call is None or seen is None or plan is None:
            return
        if plan.solution.packs and seen.tape.observed[call.index].mask_bytes:
            call.pack()
        for due in plan.after_forward.get(call.index, ()):
            due.carry_out(self.calls, self._tier)

    # -- backward --------------------------------------------------------------------------

    def end_forward(self, refuse: str | None) -> None:
        """Forward is over."""
        if self.forward_is_over:
            return
        self.forward_is_over = True
        self.catch_up()
        if self._seen is not None and len(self.calls) < len(self._seen.tape.signatures):
            self._end_early()
        seen, plan = self._seen, self._plan
        if refuse is not None:
            self.never = refuse
            self.use_plain_ranks()
        elif seen is not None and plan is not None and not seen.facts.keeps_order:
            self._gradients = OldGradients(seen.facts.order, self.calls)
            if plan.contended:
                self._sums = GradientSums(seen.facts.order, plan.contended)

    def _end_early(self) -> None:
        self._seen = self._carried = None
        so_far = tuple(call.signature for call in self.calls)
        for seen in reversed(self._known):
            if seen.plan is not None and seen.tape.signatures == so_far:
                self._follow_instead(seen, self.calls)
                return
        self.differs = True
        self.never = "it ended before its plan did"
        self.use_plain_ranks()

    def use_plain_ranks(self) -> None:
        """Have backward go as it would without a plan."""
        for call in self.calls:
            call.set_rank(call.plain_rank)

    def before(self, call: Call) -> None:
        """Carry out what the plan has before this step, and make sure of what it reads."""
        plan = self._plan
        place = -1 if plan is None else plan.places.get(call.index, -1)
        if plan is not None and self.never is None and place >= self._next:
            for due in plan.backward[self._next : place]:
                due.carry_out(self.calls, self._tier)
            self._next = place + 1
        call.ensure()

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Take the step itself."""
        self.popped.setdefault(call.index, len(self.popped))
        if self._gradients is not None:
            self._gradients.begin(call.index, args[2])
        if self._sums is None:
            proceed(func, *args)
        else:
            self._sums.step(proceed, call.index, func, args)
        if self._gradients is not None:
            self._gradients.end()

    def goes_backward_inside(self) -> None:
        """The backward of one of its calls has a backward of its own inside."""
        self.has_nested = True

    def after(self, call: Call, workspace: int, seconds: float) -> None:
        """Let go what nothing reads after this step, which has taken so much workspace and time."""
        self.backward_workspace[call.index] = workspace
        self.backward_seconds[call.index] = seconds
        plan = self._plan
        if plan is not None and self.never is None and not self.went_back:
            actions, at = plan.backward, self._next
            while at < len(actions) and actions[at].lets_go:
                actions[at].carry_out(self.calls, self._tier)
                at += 1
            self._next = at
        if self.never is None and not self.differs:
            observed = self.observed if self._seen is None else self._seen.tape.observed
            if observed[call.index].again or call.below:
                call.drop()
                call.drop_stash()
            if observed[call.index].again:
                call.forget_below()  # who comes again has it made again
            call.pack()

    def finish(self, whole: bool) -> bool:
        """Backward is over, ``whole``: without an exception; whether it was the first one."""
        if self._gradients is not None and not whole:
            self._gradients.put_back()
        self._gradients = None
        plan = self._plan
        if not self.went_back and plan is not None and self.never is None:
            for due in plan.backward[self._next :]:
                if due.lets_go and due.call in self.popped:
                    due.carry_out(self.calls, self._tier)
            self._next = len(plan.backward)
        first, self.went_back = not self.went_back, True
        self._sums = None
        self.use_plain_ranks()
        return first
