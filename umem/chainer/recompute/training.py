"""A training run under one budget: pass after pass, and what was learned so far."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import chainer
import numpy as np

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.carrying import Target
from umem.chainer.recompute.graph_store import AGAIN, KEEPS, Graphs
from umem.chainer.recompute.observing import HostPeaks, check_tape
from umem.chainer.recompute.offloaded import OffloadTarget
from umem.chainer.recompute.online import EvictOnline, Experience, Room
from umem.chainer.recompute.pass_policies import (
    ENDED_EARLY,
    FollowPlan,
    KeepAll,
    Observe,
    other_call,
)
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.seen import Roots, SeenGraph
from umem.chainer.recompute.tape import Call, ReadArrays
from umem.chainer.recompute.whole_graph import make_whole, reaches_more, watch_over
from umem.chainer.saved.tiers.tiers import Where
from umem.errors import RecomputeError

INTO_EARLIER = "its backward goes on into an earlier graph"
ELSEWHERE = "it goes backward, or is cut, in another thread or inside a backward"
IT_IS_CUT = "it is cut between forward and backward"
ANOTHER_ARRAY = "a variable of it is given another array between forward and backward"
OTHER_ROOTS = "another part of it goes backward than when it was learned"
OTHER_ORDER = (
    "a pass goes backward in another order than when its graph was learned: it does so without a "
    "plan, and the plan is made anew"
)


class AliveCalls:
    """Calls that are held weakly, those of the newest pass last."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[Call]] = []
        self._earlier = 0  # so many of them are of passes before the newest

    def __iter__(self) -> Iterator[Call]:
        return (call for reference in self._calls if (call := reference()) is not None)

    def remember(self, calls: Iterable[Call]) -> None:
        """A pass is over; its graph may live on: longer than the pass, and than the block."""
        alive = [reference for reference in self._calls if reference() is not None]
        self._earlier = len(alive)
        self._calls = alive + [weakref.ref(call) for call in calls]

    def has_any(self) -> bool:
        """Tell whether there are any."""
        self._earlier = sum(one() is not None for one in self._calls[: self._earlier])
        self._calls = [reference for reference in self._calls if reference() is not None]
        return bool(self._calls)

    def has_newest_graph(self) -> bool:
        """Tell whether the graph of the newest pass is there."""
        calls = [reference() for reference in self._calls[self._earlier :]]
        return any(call is not None and call.has_graph for call in calls)

    def take(self) -> list[Call]:
        """Return them, and remember none."""
        found = list(self)
        self._calls, self._earlier = [], 0
        return found


class Training:
    """The passes of a training run, one after another.

    Args:
        target: the budget to plan for.
        debug: whether passes keep checksums.
        offload: the offload target; False: nothing moves.

    Attributes:
        offload: the offload target.
        graphs: the graphs that were seen.
        now: the pass that is going on.
        peaks: measures it, where it is to be measured.
        alive: calls of passes that are over.
        pass_count: passes that have gone backward.
        plain_count: those of them that were left alone.
    """

    def __init__(self, target: Target, *, debug: bool, offload: Where = False) -> None:
        self._target, self._debug = target, debug
        self.offload = OffloadTarget(offload)
        self._may_be: list[SeenGraph] = []
        self.graphs = Graphs(target, self.offload)
        self._online_keeps = False
        self._told: set[bool] = set()
        self.now: Pass | None = None
        self._ends = False
        self.peaks = HostPeaks()
        self.pass_count = self.plain_count = 0
        self._number = 0
        self._began = 0.0
        self._reads: weakref.WeakSet[ReadArrays] = weakref.WeakSet()
        self.alive = AliveCalls()

    @cached_property
    def experience(self) -> Experience:
        """What passes without a plan have shown of their functions."""
        return Experience()

    def keeps(self, why: str) -> None:
        """Tell the user that a graph keeps everything, and why."""
        self.graphs.say(KEEPS + why)

    def leave(self) -> None:
        """The block is left: graphs that are alive have back what they need, or make it again."""
        self.peaks.stop()
        if self.now is not None:
            self._end(self.now)
        self.now = None
        calls = self.alive.take()
        try:
            self.offload.close(calls)
        finally:
            watch_over(calls)

    # -- forward ---------------------------------------------------------------------------

    @property
    def going_on(self) -> Pass | None:
        """The pass that the next call is one of; None where it begins another."""
        now = self.now
        if now is None or self._ends or not now.goes_on:
            return None
        return now

    def begin(self, func: Any, inputs: Any) -> Pass | None:
        """Begin a pass: after a backward, after an update, or after a lost forward.

        None for what goes on from an earlier graph before a new one has begun, such as a look at
        the outputs after backward.

        Raises:
            BudgetError: no plan of its graph is within the budget.
            UnsupportedError: ChainerX arrays, or a static graph.
        """
        if any(isinstance(x, chainer.Variable) and x.creator_node is not None for x in inputs):
            return None
        check_tape(func, inputs)
        if self.now is not None and self._end(self.now):
            self.graphs.note_outliving(self.now)
        self.now = None  # what it holds goes before anything is measured
        self._ends = False
        self.peaks.stop()
        self.offload.open(inputs)
        alike = self.graphs.plan(func, inputs)
        self._number += 1
        self._began = time.perf_counter()
        self.now = now = self._new(alike)
        self._reads.add(now.reads)
        if not isinstance(now.rule, (KeepAll, Observe)):
            return now
        if now.learns and any(one.keeps for one in alike):
            now.keep_everything(AGAIN)
        what = self.graphs.to_measure(alike, plain=not now.learns)
        if what is not None:
            blind = what == "peak" and self.offload.is_among_arrays
            self.peaks.start(what, blind=blind or not _on_host(inputs))
            self._may_be = [one for one in alike if not one.is_measured]
        return now

    def _new(self, alike: list[SeenGraph]) -> Pass:
        """Choose the policy of a pass whose first call is that of these graphs."""
        planned = [seen for seen in reversed(alike) if seen.plan is not None]
        if planned and not self._debug and all(one.is_left_alone for one in planned):
            return Pass(self._number, KeepAll(planned), self._debug, self.graphs.goes_again)
        if not planned and self._target.budget is not None and self.graphs.are_strange:
            return self._new_online(self._target.budget)
        return Pass(
            self._number,
            Observe(),  # or a plan, once the first call has run
            self._debug,
            self.graphs.goes_again,
            list(self.graphs),
            self.offload.tier,
        )

    def _new_online(self, budget: int | float) -> Pass:
        """Begin a pass whose graph is not expected back."""
        is_wish = isinstance(budget, float) and not self._target.strict
        if isinstance(budget, float):  # a share of the most that such a pass would have taken
            budget = round(budget * self.experience.plain_bytes)
        room = Room(int(budget) or None, *self.graphs.beside(), is_wish=is_wish)
        rule = EvictOnline(
            room, self.experience, self._debug, self._prepare, self._tell, self.offload
        )
        now = Pass(self._number, rule, self._debug, self._online_goes_again)
        if self._online_keeps:
            now.keep_everything(AGAIN)
        return now

    def _online_goes_again(self, signatures: Sequence[Any]) -> None:
        """A graph without a plan went backward once more after an update."""
        self._online_keeps = True
        self.graphs.say(f"graphs that do not come back keep everything from now on: one {AGAIN}")

    def _tell(self, text: str, thrashes: bool) -> None:
        """Tell the user of what goes wrong in a pass without a plan, once of each kind.

        Raises:
            RecomputeError: recomputing takes too long, and the user wants that to be an error.
        """
        if thrashes and self._target.thrash == "error":
            raise RecomputeError(f"{text}. Nothing is lost; leave the block, and train without it")
        if thrashes not in self._told:
            self._told.add(thrashes)
            self.graphs.say(text)

    def stop_in_vain(self, now: Pass) -> None:
        """Measure no more where the pass is none of the graphs for whose sake it is measured."""
        if self.peaks.what == "workspace" and now.learns:
            place, signature = len(now.calls) - 1, now.calls[-1].signature
            self._may_be = [one for one in self._may_be if one.tape.has(place, signature)]
            if not self._may_be:
                self.peaks.stop()

    def _prepare(self, func: Any, inputs: Any) -> None:
        """A function is about to run, in a pass that looks at it."""
        check_tape(func, inputs)
        self.before_call(owner_of(func))

    def before_call(self, owner: Any) -> None:
        """A function is about to run, and may change arrays that it holds.

        Running statistics are such; a graph in test mode reads them as inputs, and has to find them
        as they were if it runs again.
        """
        arrays = [value for value in vars(owner).values() if hasattr(value, "dtype")]
        if not arrays:
            return
        reads = list(self._reads)
        for array in arrays:
            if any(read.has(array) for read in reads):
                copy = array.copy()
                for call in (*self._calls_now(), *self.alive):
                    call.replace_input(array, copy)

    def left_plan(self, now: Pass) -> None:
        """The pass has just left its plan."""
        self.graphs.say(other_call(len(now.calls) - 1, now.calls[-1].label))
        self.peaks.stop()
        if self.graphs.is_unmeasured([call.signature for call in now.calls]):
            self.peaks.start("workspace", blind=not _on_host(now.calls[-1].values or ()))

    # -- what changes outside --------------------------------------------------------------

    def before_update(self, array: Any, *, here: bool) -> None:
        """A parameter's array is about to change: the next call begins another pass.

        ``here``: in the block's own thread.
        """
        self._ends = self._ends or here
        for reads in list(self._reads):
            reads.before_update(array)

    def update(self, run: Callable[[], None], parameter: Any) -> None:
        """Have an optimizer update a parameter, and learn what that takes."""
        if self.peaks.what is None:
            self.graphs.optimizers.update(run, parameter)
        else:  # in the middle of a pass, whose peak it would reset
            run()

    def call_hook(self, run: Callable[[], None], hook: Any) -> None:
        """Have an optimizer call a hook, and learn what that takes."""
        if self.peaks.what is None:
            self.graphs.optimizers.call_hook(run, hook)
        else:
            run()

    def elsewhere(self, numbers: set[int]) -> None:
        """A graph goes backward outside of its pass: in another thread, or inside a backward."""
        if (now := self.now) is not None and now.number in numbers and now.phase != "over":
            self._ends = True
            now.refuse(ELSEWHERE)

    def before_cut(self, call: Call, func: Any, *, gone: bool, why: str) -> None:
        """The graph is about to be cut behind a call: what is left of it has to have its arrays.

        ``gone``: the function goes from the graph, too.
        """
        if (now := self.now) is not None and call.reads is now.reads and now.phase != "over":
            if now.integrity == "intact":
                self.end_forward(now, why)
            if now.restore():
                make_whole(now.calls)
        elif gone:
            call.keep(func)
        else:
            self.make_whole(call.number)

    def make_whole(self, number: int) -> set[int]:
        """Have all arrays of a pass's graph there, which goes backward in plain order then."""
        if self.now is not None:
            self.now.catch_up()  # nothing is dropped any more
        calls = [*self.alive, *self._calls_now()]
        calls = [call for call in calls if call.number == number]
        for call in calls:
            call.set_rank(call.plain_rank)
        make_whole(calls)
        return {number}

    def _calls_now(self) -> list[Call]:
        return [] if self.now is None else list(self.now.calls)

    # -- backward --------------------------------------------------------------------------

    def end_forward(
        self, now: Pass, refuse: str | None, roots: Roots = (), nodes: Iterable[Any] = ()
    ) -> None:
        """Backward begins at some roots; ``refuse`` says why a graph must keep everything."""
        rule = now.rule
        if isinstance(rule, KeepAll):
            self._end_plain_forward(now, rule, refuse)
            return
        if refuse is not None:
            self.keeps(refuse)
        if now.phase != "forward":
            return
        if rule.wants == "calls":
            now.sign()
        if refuse is None and isinstance(rule, FollowPlan):
            refuse = self._other_backward(now, rule.seen, roots, nodes)
        now.end_forward(refuse, roots)
        if refuse is None and isinstance(rule, FollowPlan) and now.learns:
            self.graphs.say(ENDED_EARLY)
        self.peaks.turn()
        if not isinstance(now.rule, FollowPlan):
            self.graphs.saw(now.trail, learned=now.learns)
        if now.learns and len(now.observed) == len(now.calls) > 0:
            self.graphs.learn(now)

    def _end_plain_forward(self, now: Pass, rule: KeepAll, refuse: str | None) -> None:
        """The same for a pass that keeps all: ``refuse`` says why it takes more than learned."""
        if now.phase != "forward" or not rule.has_begun:
            return
        now.end_forward(None if refuse is None else KEEPS + refuse)
        if now.why is not None and not rule.seen.differed:
            rule.seen.differ(True)  # passes are looked at in full from the next one on
            self.graphs.say(now.why)
        self.peaks.turn()

    def _other_backward(
        self, now: Pass, follows: SeenGraph, roots: Roots, nodes: Iterable[Any]
    ) -> str | None:
        """Why the backward that begins is not the one that was planned, if it is not."""
        if len(now.calls) != len(follows.tape.signatures):
            return None
        if follows.facts.roots != roots:
            self.keeps(OTHER_ROOTS)
            return OTHER_ROOTS
        if now.integrity == "intact":
            ranks = [call.plain_rank for call in now.calls]
            if not follows.facts.goes_back_alike(ranks) or reaches_more(
                now.calls, follows.facts.order, nodes
            ):
                self.graphs.say(OTHER_ORDER)
                return OTHER_ORDER
        return None

    def finish(self, now: Pass, whole: bool, own_seconds: float = 0.0) -> None:
        """Backward is over; ``whole``: without an exception; ``own_seconds``: not Chainer's."""
        if not now.finish(whole):
            return
        self.pass_count += 1
        self.graphs.end_tries()
        if whole:
            self._learn_from(now, own_seconds)
        self.plain_count += isinstance(now.rule, KeepAll) and now.integrity == "intact"
        self.peaks.stop()
        self.alive.remember(now.calls)
        now.let_go()

    def _learn_from(self, now: Pass, own_seconds: float) -> None:
        """Learn from a pass that has gone backward to its end."""
        rule = now.rule
        if isinstance(rule, Observe):
            self.graphs.finish_learning(now, measured=self.peaks.what == "workspace")
        elif isinstance(rule, EvictOnline):
            rule.learn(now)
        elif isinstance(rule, FollowPlan) and now.why == OTHER_ORDER:
            self.graphs.learn_order_anew(now, rule.seen)
        elif isinstance(rule, KeepAll) and now.integrity == "intact":
            self._look_at_peak(rule.seen)
            self.graphs.finish_plain(rule.seen)
        elif isinstance(rule, FollowPlan) and now.integrity == "intact":
            self._look_at_peak(rule.seen)
            measured = self.peaks.what == "peak"
            seconds = None if measured else sum(call.rerun_seconds for call in now.calls)
            taken = time.perf_counter() - self._began
            self.graphs.finish_following(rule.seen, seconds, taken, own_seconds)

    def _look_at_peak(self, seen: SeenGraph) -> None:
        measured = self.peaks.what == "peak"
        peak = self.peaks.peak(seen.facts.forward_bytes) if measured else None
        self.graphs.look_at_peak(seen, peak, measured=measured)

    def _end(self, now: Pass) -> bool:
        """A pass is not the current one any more; whether its graph lives on."""
        if now.phase != "over":
            now.use_plain_ranks()
            self.alive.remember(now.calls)
        return now.rule.has_graph() or self.alive.has_newest_graph()


def _on_host(arrays: Iterable[Any]) -> bool:
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in arrays]
    return all(isinstance(array, np.ndarray) for array in arrays)
