"""Pass after pass: which one is going on, what it follows, and what was learned so far."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from umem.chainer.recompute.known import Known
from umem.chainer.recompute.learning import Learned, Roots, calibrate, learn, look_outside
from umem.chainer.recompute.outside import Outside
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.plain_pass import ENDED_EARLY, PlainPass, other_call
from umem.chainer.recompute.planning import Budget, prepare
from umem.chainer.recompute.tape import Call
from umem.chainer.recompute.tracing import Tracing, What
from umem.chainer.recompute.whole_graph import bring_one, functions
from umem.errors import BudgetError, RecomputeWarning
from umem.planner.plans import Method
from umem.units import format_bytes

MANY = 8
"""After so many different graphs in a row, none of which came back, the user is told."""
OBJECTS = 1 << 20
"""Bytes over a budget that Python's own objects, which are measured as well, may take."""
INTO_EARLIER = "its backward goes on into an earlier graph"
AGAIN = "it goes backward again after an update"
ELSEWHERE = "it goes backward, or is cut, in another thread or inside a backward"
IT_IS_CUT = "it is cut between forward and backward"
ANOTHER_ARRAY = "a variable of it is given another array between forward and backward"
OTHER_ORDER = (
    "a pass goes backward in another order than when its graph was learned: it does so without a "
    "plan, and the plan is made anew"
)


class Course:
    """The course of a training run under one budget.

    Args:
        budget, method, strict: what to plan for; see `umem.chainer.Recompute`.
        debug: whether passes keep checksums.
    """

    def __init__(self, budget: Budget, method: Method, *, debug: bool, strict: bool) -> None:
        self._budget = budget
        self._strict = strict
        self._method: Method = method
        self._debug = debug
        self.known = Known()
        self.now: Pass | None = None
        self.plain: PlainPass | None = None
        self.last: list[weakref.ref[Call]] = []
        self.tracing = Tracing()
        self.said: list[str] = []
        self._number = 0
        self._once_seen = 0
        self._outsides: weakref.WeakSet[Outside] = weakref.WeakSet()
        self._waiting: list[Learned] = []
        self._earlier = 0
        self._wished = False
        self.planned_count = 0

    @property
    def learned(self) -> list[Learned]:
        """The graphs that are known."""
        return self.known.graphs

    def say(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self.said:
            self.said.append(text)
            warnings.warn(text, RecomputeWarning, stacklevel=5)

    def leave(self) -> list[Call]:
        """The block is left: the calls that may still need what was dropped."""
        self.tracing.stop()
        if self.now is not None:
            self.end(self.now)
        self.now = self.plain = None
        last, self.last = self.last, []
        return [call for call in (reference() for reference in last) if call is not None]

    def keeps(self, why: str) -> None:
        """Tell the user that a graph keeps everything, and why."""
        self.say(f"a graph is not planned, and keeps everything: {why}")

    def current(self, func: Any, inputs: Any) -> Pass | PlainPass | None:
        """The pass that is going forward; a new one after a backward, or after a lost forward.

        None for what goes on from an earlier graph before a new one has begun, such as a look at
        the outputs after backward.
        """
        now = self.now
        if now is not None and not now.went_back and not now.is_stale:
            if not now.calls or now.calls[-1].has_graph or not now.is_over:
                return now
        if any(isinstance(x, chainer.Variable) and x.creator_node is not None for x in inputs):
            return None
        if self.plain is not None:  # the caller asks only where it is over
            self.plain.learned.outlives |= self.plain.has_graph
            self.plain = None
        if now is not None:
            if self.end(now):
                self._outlives(now)
        now = self.now = None  # what it holds goes before anything is measured
        self.tracing.stop()
        self.known.count_updated()
        alike = self.known.alike(func, inputs)
        for learned in alike:
            if learned.measured and learned.plan is None and learned.never is None:
                self._prepare(learned)
        self._number += 1
        planned = [learned for learned in reversed(alike) if learned.plan is not None]
        if planned and not self._debug and all(one.is_left_alone for one in planned):
            self.plain = PlainPass(planned)
            self._trace_if_needed(alike, inputs, plain=True)
            return self.plain
        self.now = self._new_pass()
        if any(one.keeps for one in alike):
            self.now.never = AGAIN
            self.now.outside.copies = False
        self._trace_if_needed(alike, inputs, plain=False)
        return self.now

    def _outlives(self, now: Pass) -> None:
        learned = now.follows or self.known.find(now.signatures)
        if learned is not None and not learned.outlives:
            learned.outlives = True
            if learned.held_bytes and not learned.fits:
                learned.forget_plan()  # what is held is there twice

    def _new_pass(self) -> Pass:
        signatures: list[Any] = []
        outside = Outside(lambda: self._goes_again(signatures))
        self._outsides.add(outside)
        made = Pass(self._number, self.learned, self._debug, outside)
        made.signatures = signatures
        return made

    def _goes_again(self, signatures: list[Any]) -> None:
        """A graph was gone through once more after an update."""
        learned = self.known.find(signatures)
        if learned is not None and not learned.keeps:
            learned.keeps, learned.never, learned.plan = True, AGAIN, None
            self.keeps(AGAIN)

    def before_update(self, array: Any, *, here: bool) -> None:
        """A parameter's array is about to change: what comes then reads another one.

        ``here``: in the block's own thread.
        """
        for one in (self.now, self.plain):
            if one is not None and here:
                one.is_stale = True
        for outside in list(self._outsides):
            outside.before_update(array)

    def before_call(self, owner: Any) -> None:
        """A function is about to run, and may change arrays that it holds.

        Running statistics are such; a graph in test mode reads them as inputs, and has to find them
        as they were if it runs again.
        """
        reads = [outside.reads for outside in self._outsides]
        for array in vars(owner).values():
            if any(id(array) in read for read in reads):
                self._copy_for_earlier(array)

    def _copy_for_earlier(self, array: Any) -> None:
        copy = array.copy()
        calls = [] if self.now is None else list(self.now.calls)
        for call in (*calls, *(reference() for reference in self.last)):
            if call is not None:
                call.replace_input(array, copy)

    def elsewhere(self, numbers: set[int]) -> None:
        """A graph goes backward outside of its pass: in another thread, or inside a backward."""
        now = self.now
        if now is not None and now.number in numbers and not now.went_back:
            now.is_stale = True
            now.never = now.never or ELSEWHERE

    def has_earlier(self) -> bool:
        """Whether graphs of earlier passes are alive."""
        self._earlier = sum(reference() is not None for reference in self.last[: self._earlier])
        self.last = [reference for reference in self.last if reference() is not None]
        return bool(self.last)

    def _prepare(self, learned: Learned) -> None:
        if learned.refused is not None:
            raise BudgetError(learned.refused)
        try:
            said = prepare(learned, self._budget, self._method, strict=self._strict)
        except BudgetError as error:
            learned.refused = str(error)
            raise
        if said is not None and not self._wished:
            self._wished = True  # once, whatever the number of graphs
            self.say(said)
        learned.tries = 0
        for known in self.learned:
            if known.signatures[0] == learned.signatures[0]:
                known.differed = False

    def _trace_if_needed(self, alike: list[Learned], inputs: Any, *, plain: bool) -> None:
        """Measure the pass where a graph that it may be one of has to be measured."""
        self._waiting = []
        wait = [one for one in alike if one.never is None and one.tries < MANY]
        unmeasured = [one for one in wait if one.plan is None and not one.measured]
        unfollowed = [one for one in wait if one.plan is not None and not one.followed]
        wanted = unfollowed
        if unmeasured and not plain and self._once_seen < MANY:
            wanted = unmeasured
        if not wanted:
            return
        self._waiting = wanted
        what: What = "workspace" if wanted is unmeasured else "peak"
        self.tracing.start(what, blind=not _on_host(inputs))

    def finish_plain(self, plain: PlainPass, whole: bool) -> None:
        """The backward of a plain pass is over; ``whole``: without an exception."""
        first = not plain.went_back
        plain.went_back = True
        if first:
            self._tried()
        if first and whole and plain.differs is None:
            self._once_seen = 0
            self._look_at_peak(plain.learned)
            plain.learned.rerun_seconds = 0.0
        self.tracing.stop()

    def settle_plain(self, plain: PlainPass, refuse: str | None) -> None:
        """The backward of a plain pass begins; ``refuse`` says why it takes more than learned."""
        if plain.went_back or plain.is_empty:
            return
        plain.settle()
        if refuse is not None:
            plain.differs = f"a graph is not planned, and keeps everything: {refuse}"
        if plain.differs is not None and not plain.learned.differed:
            plain.learned.differed = True  # from now on passes are looked at in full
            self.say(plain.differs)
        self.tracing.turn()

    def left(self, now: Pass) -> None:
        """The pass has just left its plan."""
        self.say(other_call(len(now.calls) - 1, now.calls[-1].label))
        self.tracing.stop()
        so_far = [call.signature for call in now.calls]
        for learned in self.learned:
            if not learned.measured and learned.signatures[: len(so_far)] == so_far:
                self.tracing.start("workspace", blind=not _on_host(now.calls[-1].values or ()))

    def settle(
        self, now: Pass, refuse: str | None, roots: Roots = (), nodes: Iterable[Any] = ()
    ) -> None:
        """Backward begins at some roots; ``refuse`` says why a graph must keep everything."""
        follows, whole = now.follows, False
        if not now.settled:
            now.roots = roots
            now.signatures += [call.signature for call in now.calls]
            whole = follows is not None and len(now.calls) == len(follows.signatures)
            if refuse is None and follows is not None and whole and follows.roots != roots:
                refuse = "another part of it goes backward than when it was learned"
        if refuse is not None:
            self.keeps(refuse)
        elif not now.settled and follows is not None and whole and now.never is None:
            alike = follows.goes_back_alike([call.plain_rank for call in now.calls])
            if not alike or _reaches_more(now, follows, nodes):
                refuse = OTHER_ORDER
                self.say(refuse)
        follows, settled = now.follows, now.settled
        now.settle(refuse)
        if not settled and follows is not None and now.differs and refuse is None:
            self.say(ENDED_EARLY)
        if not settled:
            self.tracing.turn()
            if now.follows is None and len(now.observed) == len(now.calls) > 0:
                self._learn(now)

    def before_cut(self, call: Call, func: Any, *, gone: bool, why: str) -> None:
        """The graph is about to be cut behind a call: what is left of it has to have its arrays.

        ``gone``: the function goes from the graph, too.
        """
        now = self.now
        if now is not None and call.number == now.number and not now.went_back:
            if now.never is None:
                self.settle(now, why)
            if not now.is_whole:
                now.is_whole = True
                _make_whole(now.calls)
        elif gone:
            call.keep(func)
        else:
            self.make_whole(call.number)

    def make_whole(self, number: int) -> set[int]:
        """Have all arrays of a pass's graph there, which goes backward in plain order then."""
        calls = [call for reference in self.last if (call := reference()) is not None]
        if self.now is not None:
            self.now.catch_up()  # nothing is dropped any more
            calls += self.now.calls
        calls = [call for call in calls if call.number == number]
        for call in calls:
            call.set_rank(call.plain_rank)
        _make_whole(calls)
        return {number}

    def _tried(self) -> None:
        """A pass that was measured for the sake of some graphs is over."""
        for learned in self._waiting:
            learned.tries += 1
        self._waiting = []

    def _learn(self, now: Pass) -> None:
        learned = self.known.find([call.signature for call in now.calls])
        if learned is None:
            learned = learn(now.calls, now.observed)
            self._remember(learned)
        look_outside(learned, now.calls, now.old_gradients, self.known.updated)

    def _remember(self, learned: Learned) -> None:
        self.known.add(learned)
        self._once_seen += 1
        if self._once_seen == MANY:
            self.say(
                f"nothing is planned: the last {MANY} passes were {MANY} different graphs, and a "
                "plan is made for a graph that comes back"
            )

    def finish(self, now: Pass, whole: bool) -> None:
        """Backward is over; ``whole``: without an exception."""
        first = not now.went_back
        now.finish(whole)
        if not first:
            return
        self._tried()
        learned = now.follows
        if whole and learned is None:
            self._finish_learning(now)
        elif whole and learned is not None and now.never == OTHER_ORDER:
            self._learn_order(now, learned)
            learned.forget_plan()
        elif whole and learned is not None and not now.differs and now.never is None:
            self._finish_following(now, learned)
        self.tracing.stop()
        self._remember_calls(now)
        now.leaves = {}
        if all(call.index in now.popped or not call.has_graph for call in now.calls):
            now.calls = []  # what the graph still holds is all that is left

    def _finish_learning(self, now: Pass) -> None:
        learned = self.known.find([call.signature for call in now.calls])
        if learned is None:
            return
        learned.never = learned.never or now.never
        learned.is_ordered |= now.has_nested
        self._learn_order(now, learned)
        learned.roots = now.roots
        learned.dead = {
            call.index for call in now.calls if call.index not in now.popped and not call.has_graph
        }
        came_back = learned.passes > 0
        learned.passes += 1
        if came_back:
            self._once_seen = learned.tries = 0
            if self.tracing.what == "workspace" and not learned.measured:
                seen = now.observed if len(now.observed) == len(now.calls) else learned.observed
                calibrate(learned, seen, now.workspace, now.backward_workspace)

    def _learn_order(self, now: Pass, learned: Learned) -> None:
        learned.plain = now.popped  # a second backward adds to it
        learned.plain_ranks = [call.plain_rank for call in now.calls]

    def _finish_following(self, now: Pass, learned: Learned) -> None:
        self._once_seen = 0
        self.planned_count += 1
        self._look_at_peak(learned)
        if self.tracing.what != "peak" and learned.rerun_seconds is None:
            learned.rerun_seconds = sum(call.rerun_seconds for call in now.calls)

    def _look_at_peak(self, learned: Learned) -> None:
        if self.tracing.what != "peak" or learned.followed:
            learned.tries = 0
            return
        learned.followed = True
        peak = self.tracing.peak(cleared=learned.forward_bytes)
        if peak is not None:
            learned.measured_bytes = learned.outside_bytes + peak
            self._keep_the_promise(learned, learned.measured_bytes)

    def _keep_the_promise(self, learned: Learned, found: int) -> None:
        """More than the budget was needed: plan once more, with that much less room."""
        budget, predicted = self._budget, learned.peak_bytes
        assert predicted is not None
        if not isinstance(budget, int) or found <= max(1.02 * budget, budget + OBJECTS):
            return
        try:
            if learned.slack_bytes:
                raise BudgetError
            learned.slack_bytes = max(0, found - predicted)
            prepare(learned, budget, self._method)
            learned.measured_bytes, learned.followed = None, False
        except BudgetError:
            self.say(
                f"a pass took {format_bytes(found)}, and the budget is {format_bytes(budget)}: "
                "with that much less room there is no plan, and this one stays"
            )

    def end(self, now: Pass) -> bool:
        """A pass is not the current one any more; whether its graph lives on."""
        if not now.went_back:
            now.use_plain_ranks()
            self._remember_calls(now)
        calls = [reference() for reference in self.last[self._earlier :]]
        return any(call is not None and call.has_graph for call in calls)

    def _remember_calls(self, now: Pass) -> None:
        """The graph may live on: longer than its pass, and than the block."""
        alive = [reference for reference in self.last if reference() is not None]
        self._earlier = len(alive)
        self.last = alive + [weakref.ref(call) for call in now.calls]


def _make_whole(calls: Iterable[Call]) -> None:
    for call in calls:
        if call.has_graph and call.func.inputs is not None:
            bring_one(call.func)


def _reaches_more(now: Pass, learned: Learned, nodes: Iterable[Any]) -> bool:
    """Whether a backward from these nodes comes to calls that it did not come to when learned.

    Then their place is not known. A variable may have been cut, or its gradient not asked for.
    """
    more = [
        call
        for call in now.calls
        if call.index not in learned.plain
        and call.has_graph
        and any(x.requires_grad for x in call.func.inputs or ())
    ]
    return bool(more) and not {call.func for call in more}.isdisjoint(functions(nodes))


def _on_host(arrays: Iterable[Any]) -> bool:
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in arrays]
    return all(isinstance(array, np.ndarray) for array in arrays)
