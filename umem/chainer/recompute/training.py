"""A training run under one budget: its passes, and the facts learned from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import chainer

from umem.chainer.forward_state import ReadArrays
from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.evict import Evict
from umem.chainer.recompute.facts import Experience, meter_of
from umem.chainer.recompute.graph_store import AGAIN, KEEPS, Graphs
from umem.chainer.recompute.observing import PassPeaks, check_tape
from umem.chainer.recompute.offloaded import OffloadTarget
from umem.chainer.recompute.pass_policies import ENDED_EARLY, other_call
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.pressure import Room
from umem.chainer.recompute.seen import Roots, SeenGraph, Target
from umem.chainer.recompute.tape import Call
from umem.chainer.recompute.whole_graph import make_whole, reaches_more, watch_over
from umem.devices import work_seconds
from umem.errors import RecomputeError
from umem.trace.recording import HostMeter, MeteredPools

INTO_EARLIER = "its backward continues into an earlier graph"
ELSEWHERE = "its backward runs, or it is cut, in another thread or inside a backward"
IT_IS_CUT = "it is cut between forward and backward"
ANOTHER_ARRAY = "a variable of it is given another array between forward and backward"
OTHER_ROOTS = "its backward starts from other variables than when it was learned"
OTHER_ORDER = (
    "a pass runs backward in another order than when its graph was learned: it follows no plan, "
    "and the graph is planned again"
)


class AliveCalls:
    """Calls of finished passes, held weakly, the newest pass's last."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[Call]] = []
        self._earlier = 0  # how many of them are of passes before the newest

    def __iter__(self) -> Iterator[Call]:
        return (call for reference in self._calls if (call := reference()) is not None)

    def remember(self, calls: Iterable[Call]) -> None:
        """Add the calls of a finished pass, whose graph may outlive the pass and the block."""
        self.forget_dead()
        self._earlier = len(self._calls)
        self._calls += [weakref.ref(call) for call in calls]

    def forget_dead(self) -> None:
        """Free the references to freed calls."""
        self._earlier = sum(one() is not None for one in self._calls[: self._earlier])
        self._calls = [reference for reference in self._calls if reference() is not None]

    def has_any(self) -> bool:
        """Tell whether any call is alive."""
        self.forget_dead()
        return bool(self._calls)

    def has_newest_graph(self) -> bool:
        """Tell whether part of the newest pass's graph is alive."""
        calls = [reference() for reference in self._calls[self._earlier :]]
        return any(call is not None and call.has_graph for call in calls)

    def take(self) -> list[Call]:
        """Return the live calls, and forget all."""
        found = list(self)
        self._calls, self._earlier = [], 0
        return found


class Training:
    """The passes of a training run, one after another.

    Args:
        target: the budget to plan for.
        debug: whether passes keep checksums.

    Attributes:
        offload: the offload target; None: nothing is offloaded.
        graphs: the graphs that were seen.
        now: the current pass; None before the first and after the block.
        peaks: measures its workspace or its peak, if a graph needs measuring.
        experience: the facts about functions that passes without a plan have collected.
        alive: calls of finished passes.
        pass_count: passes whose backward has run.
        plain_count: those of them that Chainer ran alone.
    """

    def __init__(self, target: Target, *, debug: bool, offload: OffloadTarget | None) -> None:
        self._debug, self.offload = debug, offload
        self.graphs = Graphs(target, offload)
        self._online_keeps = self._ran_out_observed = False
        self._warned: set[bool] = set()
        self.now: Pass | None = None
        self._ends = False
        self.peaks = PassPeaks()
        self._pools: MeteredPools | None = None
        self.pass_count = self.plain_count = 0
        self._number = 0
        self._began = 0.0
        self._reads: weakref.WeakSet[ReadArrays] = weakref.WeakSet()
        self.experience = Experience()
        self.alive = AliveCalls()

    def keeps(self, why: str) -> None:
        """Warn that a graph keeps everything, and why."""
        self.graphs.warn(KEEPS + why)

    def leave(self) -> None:
        """Handle the end of the block, after which graphs may still run backward.

        Offloaded arrays are restored; others are recomputed when a backward reads them.
        """
        self.peaks.stop()
        if self.now is not None:
            self._end(self.now)
        self.now = None
        calls = self.alive.take()
        try:
            if self.offload is not None:
                self.offload.close(calls)
        finally:
            watch_over(calls)

    # -- forward ---------------------------------------------------------------------------

    @property
    def going_on(self) -> Pass | None:
        """Return the pass that the next call belongs to; None if the call begins another."""
        now = self.now
        if now is None or self._ends or not now.continues:
            return None
        return now

    def begin(self, func: Any, inputs: Any) -> Pass | None:
        """Begin a pass: after a backward, after an update, or after a lost forward.

        Returns None for a call on the output of an earlier graph before a new one has begun, such
        as one on the model's outputs after backward.

        Raises:
            BudgetError: no plan of its graph is within the budget. No pass has begun.
            UnsupportedError: ChainerX arrays, a static graph, or NumPy's arrays with the budget
                "card". No pass has begun.
        """
        if any(isinstance(x, chainer.Variable) and x.creator_node is not None for x in inputs):
            return None
        check_tape(func, inputs)
        if self.now is not None and self._end(self.now):
            self.graphs.note_outliving(self.now)
        if self.now is not None and self.now.has_run_out:
            if self.now.learns:
                self._ran_out_observed = True
            else:
                self.graphs.ran_out()
        self.now = None  # its arrays are freed before anything is measured
        self.alive.forget_dead()
        self._ends = False
        self.peaks.stop()
        if self.offload is not None:
            self.offload.open(inputs)
        meter = meter_of(inputs)
        self.graphs.optimizers.measure_by(type(meter))
        self._pools = meter.pools
        if self._pools is not None:
            self.graphs.gaps.expect()
        self.graphs.aim_at_card(self._pools)
        alike = self.graphs.plan(func, inputs)
        self._number += 1
        self._began = work_seconds()
        self.now = now = self._new(alike)
        self._reads.add(now.reads)
        what = None
        if now.learns or now.rule.is_alone:
            if now.learns and any(one.keeps for one in alike):
                now.keep_everything(AGAIN)
            what = self.graphs.to_measure(alike, plain=not now.learns)
        self._reserve(alike, what)
        if what is not None:
            self._measure(what, inputs)
        return now

    def _reserve(self, alike: Iterable[SeenGraph], what: str | None) -> None:
        """Make a GPU's pool reserve memory for a pass in one piece.

        Free blocks are returned before a pass whose ``peak`` is measured, so that it shows the
        gaps.
        """
        if self._pools is None:
            return
        if what == "peak":
            self._pools.give_back()
            self._pools.forget_use()
        self._pools.reserve(self.graphs.wanted_bytes(alike, self._pools.in_use()))

    def _measure(self, what: str, arrays: Iterable[Any]) -> None:
        """Begin to measure the memory of arrays; warn if that cannot be done.

        The peak is not measured where offloaded arrays are among the host's own.
        """
        meter = meter_of(arrays)
        why_not = meter.why_not()
        if why_not is not None:
            self.graphs.warn(why_not)
        mixes = self.offload is not None and self.offload.is_among_arrays
        mixed = what == "peak" and mixes and isinstance(meter, HostMeter)
        self.peaks.start(what, meter, blind=why_not is not None or mixed)

    def _new(self, alike: list[SeenGraph]) -> Pass:
        """Choose the policy of a pass whose first call matches these graphs."""
        planned = [seen for seen in reversed(alike) if seen.plan is not None]
        budget = self.graphs.target.budget
        # A GPU's memory may run out although a plain step should fit: then there are calls to drop.
        may_run_out = self._pools is not None and isinstance(budget, int)
        is_alone = not self._debug and not may_run_out
        if planned and is_alone and all(one.is_left_alone for one in planned):
            return self._evicting(Room(None, (), 0), self.graphs.goes_again, planned)
        if not planned and budget is not None and self.graphs.are_strange:
            return self._new_online(budget)
        has_room = isinstance(budget, int) and not self._ran_out_observed
        room = self.graphs.gaps.room(int(budget or 0)) if has_room else None
        rule = Evict(Room(room, *self.graphs.beside()), learns=True)
        return Pass(
            self._number,
            rule,  # or a plan, once the first call has run
            self._debug,
            self.graphs.goes_again,
            list(self.graphs),
            None if self.offload is None else self.offload.tier,
            self._pools,
        )

    def _new_online(self, budget: int | float) -> Pass:
        """Make a pass that evicts online, because its graph is not expected to repeat."""
        is_wish = isinstance(budget, float) and not self.graphs.target.strict
        if isinstance(budget, float):  # a share of the most that such a pass would have taken
            budget = round(budget * self.experience.plain_bytes)
        gaps = budget / max(1, self.graphs.gaps.room(budget))
        room = Room(int(budget) or None, *self.graphs.beside(), is_wish=is_wish, gaps=gaps)
        now = self._evicting(room, self._online_goes_again)
        if self._online_keeps:
            now.keep_everything(AGAIN)
        return now

    def _evicting(
        self,
        room: Room,
        goes_again: Callable[[Sequence[Any]], None],
        known: Sequence[SeenGraph] = (),
    ) -> Pass:
        """Make a pass without a plan; see `Evict` and `Pass`."""
        rule = Evict(
            room, known=known, experience=self.experience, debug=self._debug,
            prepare=self._prepare, tell=self._tell,
        )  # fmt: skip
        return Pass(self._number, rule, self._debug, goes_again, pools=self._pools)

    def _online_goes_again(self, signatures: Sequence[Any]) -> None:
        """Handle a recompute after an update in a graph without a plan.

        From then on passes without a plan keep everything.
        """
        self._online_keeps = True
        self.graphs.warn(f"graphs that do not repeat keep everything from now on: one {AGAIN}")

    def _tell(self, text: str, thrashes: bool) -> None:
        """Warn of a problem in a pass without a plan, once of each kind.

        Args:
            text: the warning.
            thrashes: whether the problem is that recomputing takes too long.

        Raises:
            RecomputeError: recomputing takes too long, and the user wants that to be an error.
        """
        if thrashes and self.graphs.target.thrash == "error":
            raise RecomputeError(f"{text}. Nothing is lost; leave the block, and train without it")
        if thrashes not in self._warned:
            self._warned.add(thrashes)
            self.graphs.warn(text)

    def _prepare(self, func: Any, inputs: Any) -> None:
        """Check a function that is about to be observed, and copy arrays that it may change."""
        check_tape(func, inputs)
        self.before_call(owner_of(func))

    def before_call(self, owner: Any) -> None:
        """Copy arrays that a function holds and may change, if an earlier call has read them.

        Running statistics are an example: a graph in test mode reads them as inputs, and a
        recompute must read their old values.
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
        """Handle a pass that has just left its plan: warn, and measure its workspace."""
        self.graphs.warn(other_call(len(now.calls) - 1, now.calls[-1].label))
        self.peaks.stop()
        self._measure("workspace", now.calls[-1].values or ())

    # -- changes outside of a pass ---------------------------------------------------------

    def before_update(self, array: Any, *, here: bool) -> None:
        """Handle the coming change of a parameter's array: the next call begins another pass.

        ``here``: the change is made in the block's own thread; otherwise the current pass
        continues.
        """
        self._ends = self._ends or here
        is_needed = self.alive.has_any() or any(call.has_graph for call in self._calls_now())
        for reads in list(self._reads):
            reads.before_update(array, is_needed=is_needed)

    def elsewhere(self, numbers: set[int]) -> None:
        """Refuse the current pass if its graph's backward runs in another thread or a backward.

        Args:
            numbers: of the passes whose backward does so.
        """
        if (now := self.now) is not None and now.number in numbers and now.phase != "over":
            self._ends = True
            now.refuse(ELSEWHERE)

    def before_cut(self, call: Call, func: Any, node: Any, *, why: str) -> None:
        """Restore or hold the arrays that a graph needs before it is cut behind a call.

        Args:
            call, func: the call, and its function.
            node: the output that it is cut behind; None: all of them.
            why: the reason why the current pass is refused, if the call belongs to it.
        """
        if (now := self.now) is not None and call.reads is now.reads and now.phase != "over":
            if now.integrity == "intact":
                self.end_forward(now, why)
            if now.restore():
                make_whole(now.calls)
        elif why == ANOTHER_ARRAY:  # readers that retain the old one would lose it
            self.make_whole(call.number)
        else:
            call.cut_behind(func, node)

    def make_whole(self, number: int) -> None:
        """Restore all arrays of a pass's graph, and Chainer's ranks."""
        if self.now is not None:
            self.now.catch_up()  # first, as it may drop arrays
        calls = [*self.alive, *self._calls_now()]
        calls = [call for call in calls if call.number == number]
        for call in calls:
            call.set_rank(call.plain_rank)
        make_whole(calls)

    def _calls_now(self) -> list[Call]:
        return [] if self.now is None else list(self.now.calls)

    # -- backward --------------------------------------------------------------------------

    def end_forward(
        self, now: Pass, refuse: str | None, roots: Roots = (), nodes: Sequence[Any] = ()
    ) -> None:
        """Handle the end of a pass's forward, when backward begins at some roots.

        Args:
            now: the pass.
            refuse: the reason why it must keep everything; None if it may follow its policy.
            roots, nodes: where backward begins, as calls and outputs, and as variable nodes.
        """
        rule = now.rule
        if rule.is_alone and (now.phase != "forward" or not now.trail):
            return
        if refuse is not None:
            self.keeps(refuse)
        if now.phase != "forward":
            return
        followed = None if rule.applies or now.learns else rule.seen
        if refuse is None and followed is not None:
            refuse = self._other_backward(now, followed, roots, nodes)
        now.end_forward(refuse, roots, nodes)
        if refuse is None and followed is not None and now.learns:
            self.graphs.warn(ENDED_EARLY)
        self.peaks.turn()
        if rule.is_alone:
            if now.why is not None and rule.seen is not None:
                rule.seen.differed = True  # from the next pass on, calls are observed
                if refuse is None:
                    self.graphs.warn(now.why)
        elif now.rule.seen is None:
            # Passes that learn count separately: graphs repeat if passes without a plan do.
            self.graphs.saw(hash((now.trail, now.learns)), learned=now.learns)
        if now.learns and len(now.observed) == len(now.calls) > 0:
            self.graphs.learn(now)
            first = self.graphs.plan_first(now) if now.integrity == "intact" else None
            if first is not None:
                now.plan_backward(first)

    def _other_backward(
        self, now: Pass, follows: SeenGraph, roots: Roots, nodes: Iterable[Any]
    ) -> str | None:
        """Return the reason why backward is not the planned one; None if it is.

        It differs if it has other roots, reaches more calls, or pops them in another order.
        """
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
                self.graphs.warn(OTHER_ORDER)
                return OTHER_ORDER
        return None

    def finish(self, now: Pass, whole: bool, own_seconds: float) -> None:
        """Handle the end of a backward, and learn from it if it is the first of its pass.

        Args:
            now: the pass.
            whole: whether no exception ended the backward.
            own_seconds: of the pass, beside Chainer's own work.
        """
        if not now.finish():
            return
        self.pass_count += 1
        self.graphs.end_tries()
        if whole:
            self._learn_from(now, own_seconds)
            if now.learns and self._pools is not None:
                self._pools.give_back()  # so that new optimizer state is not among free blocks
        self.plain_count += now.rule.is_alone and now.integrity == "intact"
        self.peaks.stop()
        self.alive.remember(now.calls)
        now.release()

    def _learn_from(self, now: Pass, own_seconds: float) -> None:
        """Record the facts of a pass whose backward ran to its end."""
        rule = now.rule
        if now.learns:
            self.graphs.finish_learning(now, measured=self.peaks.what == "workspace")
        elif rule.seen is None:
            rule.learn(now)
        elif now.why == OTHER_ORDER:
            self.graphs.learn_order_anew(now, rule.seen)
        elif now.integrity == "intact":
            self._look_at_peak(now, rule.seen)
            if rule.applies:
                self.graphs.finish_plain(rule.seen)
                return
            measured = self.peaks.what == "peak"
            seconds = None if measured else sum(call.rerun_seconds for call in now.calls)
            taken = work_seconds() - self._began
            self.graphs.finish_following(rule.seen, seconds, taken, own_seconds)

    def _look_at_peak(self, now: Pass, seen: SeenGraph) -> None:
        measured = self.peaks.what == "peak"
        peak = self.peaks.peak(seen.facts.forward_bytes) if measured else None
        gaps = None if now.has_run_out else self.peaks.gaps()
        self.graphs.look_at_peak(seen, peak, gaps, measured=measured)

    def _end(self, now: Pass) -> bool:
        """Retire the current pass; tell whether its graph is still alive."""
        if now.phase != "over":
            now.use_plain_ranks()
            self.alive.remember(now.calls)
        return now.rule.has_graph() or self.alive.has_newest_graph()
