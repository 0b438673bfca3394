"""Store of the graphs of a training run, which plans them and warns once of each problem."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import chainer

from umem.chainer.function_facts import owner_of, rules_of
from umem.chainer.parameter_updates import OptimizerFacts, state_bytes
from umem.chainer.recompute.late_plan import LatePlan
from umem.chainer.recompute.observing import CalledLinks, gradient_bytes, look_beside
from umem.chainer.recompute.offloaded import OffloadTarget
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.seen import Carried, GraphFacts, SeenGraph, Target, carried, tape_of
from umem.chainer.recompute.tape import Signature
from umem.devices import entered_device
from umem.errors import BudgetError, RecomputeWarning, UnsupportedError, warn_at_program
from umem.planner import PoolGaps, forget_tables
from umem.trace.recording import MeteredPools
from umem.units import format_bytes

REMEMBERED = 32
"""At most this many graphs without a plan are remembered. This and the counts of graphs that follow
are guesses, not measured."""
MANY = 8
"""The user is warned after this many different graphs in a row, none of which repeated.

Also the most fruitless measurements while expecting a graph.
"""
LAST = 16
"""At most this many of the last passes' trails are kept, to see which graphs repeat."""
OFTEN = 5
"""A graph repeats if at least this many of the last passes had its trail."""
STRANGERS = 3
"""Graphs are not expected to repeat once this many of the last trails occurred a single time."""
TRIES = 8
"""Passes of other graphs that are observed while expecting one that repeats, before giving up."""
OBJECTS, OBJECTS_OF_CALL = 1 << 20, 7 << 10
"""Bytes by which a peak measured on the host may exceed the budget: once, and for each call.

They are Python's own objects, which tracemalloc counts: 5.3 to 7.0 KB a call in five networks.
"""
FIRST_PIECE = 64 << 20
"""Bytes that a pool reserves in one piece for passes without a plan, beside the known bytes.

They are for arrays of some MiB: the driver's blocks of 2 MiB cost larger ones little.
"""
KEEPS = "a graph is not planned, and keeps everything: "
AGAIN = "its backward runs again after an update"


class Graphs:
    """The seen graphs of a training run, the oldest first, with their plans and counts of passes.

    Args:
        target: the budget to plan for.
        offload: the offload target; None: nothing is offloaded.

    Attributes:
        target: the budget to plan for.
        gaps: the gaps of the GPU's pool, for which a budget in bytes must have room.
        optimizers: the bytes of optimizer state and of the workspace of updates.
        links: the links that were called before the first update.
        warnings: the warnings that the user was given.
        planned_count: passes that followed a plan from beginning to end.
        followed_seconds: of those passes, except measured ones.
        own_seconds: the part of ``followed_seconds`` for recomputing, and for following the plan.
    """

    def __init__(self, target: Target, offload: OffloadTarget | None) -> None:
        self.target = target
        self._offload = offload
        self._card_is_known = False
        self._in_use = 0  # when the free bytes were first measured
        self._others_bytes: int | None = None  # the part of them that a step does not read
        self._seen: list[SeenGraph] = []
        self._count = 0
        self._once_seen = 0
        self._trails: deque[int] = deque(maxlen=LAST)
        self._wanted: dict[int, int] = {}
        self._waiting: list[SeenGraph] = []
        self._wished = False
        self.gaps = PoolGaps()
        self.optimizers = OptimizerFacts()
        self.links = CalledLinks()
        self.warnings: list[str] = []
        self.planned_count = 0
        self.followed_seconds = self.own_seconds = 0.0

    def __iter__(self) -> Iterator[SeenGraph]:
        return iter(list(self._seen))

    def aim_at_card(self, pools: MeteredPools | None) -> None:
        """Measure the card's free bytes, before the first pass and after a run-out.

        They are the budget, if that is "card"; plans for a budget in bytes use no more than them.
        After the first forward, arrays that a step does not read are subtracted. On a virtual GPU
        the budget is all of its VRAM, with the expected gaps of its pool.

        Raises:
            UnsupportedError: the budget is "card", and the arrays are the host's.
        """
        is_first = self.target.is_card and not self.target.budget
        if pools is None:
            if is_first:
                self._aim_at_virtual()
            return
        if is_first:
            self.target = self.target._replace(budget=pools.spare())
        if not self._card_is_known and pools.is_vram:
            self.gaps.keep_to_card(pools.spare() - (self._others_bytes or 0))
        self._card_is_known = True
        if self._others_bytes is None:
            self._in_use = pools.in_use()

    def _aim_at_virtual(self) -> None:
        """Set the budget to the VRAM of the virtual GPU; raise UnsupportedError without one."""
        device = entered_device()
        if device is None:
            raise UnsupportedError(
                'Recompute("card") uses the free memory of a GPU, but the arrays are NumPy\'s: '
                "give a budget in bytes"
            )
        self.target = self.target._replace(budget=device.vram_bytes)
        self._others_bytes = 0
        self.gaps.expect()

    def wanted_bytes(self, alike: Iterable[SeenGraph], in_use: int) -> int:
        """Return the bytes that pools should reserve for a pass that may be of these graphs.

        They are a plan's bytes with the gaps. Without a plan they are twice the bytes in use before
        the pass, and `FIRST_PIECE`. Never more than a budget in bytes.
        """
        planned = [seen.plan.peak_bytes for seen in alike if seen.plan is not None]
        wanted = int(max(planned) * self.gaps.planned) if planned else 2 * in_use + FIRST_PIECE
        return min(wanted, self.target.budget) if isinstance(self.target.budget, int) else wanted

    def _take_others_off(self, facts: GraphFacts) -> None:
        """Subtract arrays that a step does not read from the card's free bytes; only once.

        These are the bytes in use beyond the step's own arrays. They lower the limit for gaps and,
        if the budget is "card", the budget.
        """
        if self._others_bytes is not None:
            return
        known = facts.outside_bytes + facts.forward_bytes
        self._others_bytes = others = max(0, self._in_use - known)
        if self.gaps.card_bytes is not None:
            self.gaps.keep_to_card(self.gaps.card_bytes - others)
        if self.target.is_card:
            assert isinstance(self.target.budget, int)
            self.target = self.target._replace(budget=max(0, self.target.budget - others))

    def warn(self, text: str) -> None:
        """Warn the user, once for each text."""
        if text not in self.warnings:
            self.warnings.append(text)
            warn_at_program(text, RecomputeWarning)

    def find(self, signatures: Sequence[Signature]) -> SeenGraph | None:
        """Return the graph with exactly these calls' signatures; None if it was not seen."""
        wanted = tuple(signatures)
        return next((one for one in self._seen if one.tape.signatures == wanted), None)

    def alike(self, func: Any, inputs: Any) -> list[SeenGraph]:
        """List the graphs whose first call has this class and these input shapes and dtypes."""
        kind = type(owner_of(func))
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        shapes = [(array.shape, array.dtype) for array in arrays]
        return [
            one
            for one in self._seen
            if one.tape.signatures[0][0] is kind
            and [entry[2:] for entry in one.tape.signatures[0][1]] == shapes
        ]

    # -- before a pass ---------------------------------------------------------------------

    def plan(self, func: Any, inputs: Any) -> list[SeenGraph]:
        """Plan the measured graphs that may begin with this call; list all that may.

        Raises:
            BudgetError: one of them has no plan within the budget; the graph remembers it.
        """
        self._count_updated()
        alike = self.alike(func, inputs)
        for seen in alike:
            if seen.is_measured and seen.plan is None and seen.never is None:
                self._plan(seen)
        return alike

    def _plan(self, seen: SeenGraph) -> None:
        """Plan one graph, and adopt the plan; warn once if no plan fits a share.

        Raises:
            BudgetError: no plan is within the budget; remembered, so that the next pass raises at
                once.
        """
        if seen.refused is not None:
            raise BudgetError(seen.refused)
        try:
            plan, warning = self._carried(seen, self.target)
        except BudgetError as error:
            seen.refused = str(error)
            raise
        seen.plan, seen.tries = plan, 0
        if warning is not None and not self._wished:
            self._wished = True  # warn once, for any number of graphs
            self.warn(warning)
        for other in self._seen:
            if other.tape.signatures[0] == seen.tape.signatures[0]:
                other.differed = False

    def _carried(
        self, seen: SeenGraph, target: Target, *, moves: bool = True
    ) -> tuple[Carried, str | None]:
        """Plan a graph; see `carried`. ``moves``: its arrays may be offloaded."""
        link = None if self._offload is None or not moves else self._offload.link
        try:
            return carried(seen, target, link, self.gaps)
        finally:
            forget_tables()

    def to_measure(self, alike: Sequence[SeenGraph], *, plain: bool) -> str | None:
        """Choose the measurement of the pass that begins: ``workspace``, ``peak`` or None.

        Args:
            alike: the graphs that may begin like the pass.
            plain: whether Chainer runs the pass alone, with nothing dropped.
        """
        wait = [one for one in alike if one.never is None and one.tries < MANY]
        unmeasured = [one for one in wait if one.plan is None and not one.is_measured]
        unfollowed = [one for one in wait if one.plan is not None and not one.followed]
        if not plain and (unmeasured or not any(one.plan is not None for one in alike)):
            self._waiting = unmeasured
            return "workspace"
        self._waiting = unfollowed
        return "peak" if self._waiting else None

    def end_tries(self) -> None:
        """Count the measured pass, which is over, as a try of each expected graph."""
        for seen in self._waiting:
            seen.tries += 1
        self._waiting = []

    def saw(self, trail: int, *, learned: bool) -> None:
        """Record the trail of a pass that went forward without a plan, and find trails that repeat.

        Args:
            trail: the pass's; see `Pass`.
            learned: whether all of its calls were observed, so that the graph of this trail is
                known.
        """
        self._trails.append(trail)
        if learned:
            self._wanted = {
                one: tries - (one != trail) for one, tries in self._wanted.items() if tries > 1
            }
        elif trail not in self._wanted and self._trails.count(trail) >= OFTEN:
            self._wanted[trail] = TRIES

    @property
    def are_strange(self) -> bool:
        """True if recent graphs have not repeated, and no graph that repeats is expected."""
        once = sum(count == 1 for count in Counter(self._trails).values())
        return once >= STRANGERS and not self._wanted

    def _count_updated(self) -> None:
        """Add the bytes of optimizers to all graphs, and discard plans made before they grew."""
        if not self.optimizers.take_new():
            return
        for seen in self._seen:
            old = seen.facts.optimizer_bytes
            seen.facts = seen.facts.with_updates(self.optimizers)
            if seen.facts.optimizer_bytes > old and seen.plan is not None:
                seen.forget_plan()

    def beside(self) -> tuple[list[Any], int]:
        """Return the arrays of updated parameters, and the bytes of their state and gradients.

        Before the first update these are the parameters of the links that were called.
        """
        known = self.optimizers.parameters or self.links.parameters
        found = [p for p in known if p.array is not None]
        nbytes = sum(state_bytes(p.update_rule) + gradient_bytes(p) for p in found)
        return [p.array for p in found], nbytes

    # -- learning from passes --------------------------------------------------------------

    def learn(self, now: Pass) -> None:
        """Store the graph of a pass whose forward ran without a plan, and the arrays outside."""
        seen = self.find([call.signature for call in now.calls]) or self._add(now)
        facts = seen.facts.with_beside(look_beside(now.calls), now.old_gradients)
        seen.facts = facts.with_updates(self.optimizers)
        self._take_others_off(seen.facts)

    def _add(self, now: Pass) -> SeenGraph:
        """Store another graph; forget the oldest if more than `REMEMBERED` have no plan."""
        self._count += 1
        keeps_order = any(rules_of(call.signature[0])[1] for call in now.calls)
        seen = SeenGraph(
            self._count, tape_of(now.calls, now.observed, now.trails), keeps_order=keeps_order
        )
        self._seen.append(seen)
        unplanned = [known for known in self._seen if known.plan is None]
        if len(unplanned) > REMEMBERED:
            self._seen.remove(unplanned[0])
        self._once_seen += 1
        if self._once_seen == MANY:
            self.warn(
                f"nothing is planned: the last {MANY} passes were {MANY} different graphs, and "
                "only a graph that repeats gets a plan"
            )
        return seen

    def finish_learning(self, now: Pass, *, measured: bool) -> None:
        """Record the order, roots and times of a backward without a plan.

        ``measured``: the workspace of the pass was measured; a graph that repeats may then be
        planned.
        """
        seen = self.find([call.signature for call in now.calls])
        if seen is None:
            return
        old = seen.facts.with_backward(now.calls, now.roots, now.order())
        facts = replace(
            old,
            keeps_order=old.keeps_order or now.has_nested,
            backward_seconds=old.backward_seconds or dict(now.backward_seconds),
            backward_workspace=now.backward_workspace if measured else old.backward_workspace,
        )
        seen.went_backward(facts, now.why)
        if seen.pass_count > 1:  # the graph repeats
            self._once_seen = 0
            seen.tries = 0
            if measured and not seen.is_measured:
                _calibrate(seen, now)

    def learn_order_anew(self, now: Pass, seen: SeenGraph) -> None:
        """Replace a graph's backward order by this pass's, and discard its plan."""
        ranks = [call.plain_rank for call in now.calls]
        seen.facts = replace(seen.facts, order=dict(now.popped), ranks=ranks)
        seen.forget_plan()

    def note_outliving(self, now: Pass) -> None:
        """Record that a pass's graph is still alive when the next pass begins.

        Its plan is discarded if outputs that must not be recomputed are then alive twice, unless a
        plain step fits.
        """
        seen = now.rule.seen or self.find(now.signatures)
        if seen is None or seen.facts.outlives:
            return
        seen.facts = replace(seen.facts, outlives=True)
        if seen.problem.held_bytes and not (seen.plan is not None and seen.plan.fits):
            seen.forget_plan()  # outputs that must not be recomputed are alive twice

    @property
    def plans_first(self) -> bool:
        """True if passes without a plan are planned at the end of their forward."""
        return self._once_seen < MANY

    def plan_first(self, now: Pass) -> LatePlan | None:
        """Plan the backward of a pass whose forward ran without a plan, for a budget in bytes.

        The workspace of a step of backward is unknown before one has run; the step's forward
        workspace is used instead. The quick method comes first. If no plan is within the budget,
        the plan of the least peak is used; later passes raise.

        Returns:
            The plan, of the graph with the facts known so far; None if a plain step fits, if the
            budget is a share, which has no bytes yet, or if graphs do not repeat.
        """
        seen = self.find(now.signatures)
        if seen is None or seen.never is not None:
            return None
        if now.plain_order is None or not self.plans_first:
            return None
        first = SeenGraph(seen.number, replace(seen.tape, observed=tuple(now.observed)))
        facts = seen.facts.with_backward(now.calls, now.roots, now.plain_order)
        workspace = facts.backward_workspace or dict(enumerate(now.workspace))
        first.facts = replace(facts, backward_workspace=workspace)
        plan = self._first_plan(first)
        return None if plan.fits else LatePlan(first, plan)

    def _first_plan(self, first: SeenGraph) -> Carried:
        """Plan the first backward of a graph, by the quick method if that has a plan."""
        quick = self.target._replace(method="lower_sets")
        for target in (quick, self.target):
            with contextlib.suppress(BudgetError):
                return self._carried(first, target, moves=False)[0]
        return self._carried(first, quick._replace(budget=None), moves=False)[0]

    def goes_again(self, signatures: Sequence[Signature]) -> None:
        """Stop planning a graph whose backward ran again after an update; it keeps everything."""
        seen = self.find(signatures)
        if seen is not None and not seen.keeps:
            seen.keep_everything(AGAIN)
            self.warn(KEEPS + AGAIN)

    # -- after a planned pass --------------------------------------------------------------

    def finish_following(
        self, seen: SeenGraph, rerun_seconds: float | None, seconds: float, own_seconds: float
    ) -> None:
        """Count a pass that has followed a plan to its end.

        Args:
            seen: its graph.
            rerun_seconds: of recomputing; None if the pass was measured.
            seconds: of the whole pass.
            own_seconds: the part that was not Chainer's own work.
        """
        self._once_seen = 0
        self.planned_count += 1
        if rerun_seconds is not None:
            self.followed_seconds += seconds
            self.own_seconds += own_seconds
            seen.recomputed(rerun_seconds)

    def finish_plain(self, seen: SeenGraph) -> None:
        """Count a pass that Chainer has run alone to its end."""
        self._once_seen = 0
        seen.recomputed(0.0)

    def look_at_peak(
        self, seen: SeenGraph, peak_bytes: int | None, gaps: float | None, *, measured: bool
    ) -> None:
        """Compare the measured peak of a pass with the budget, and plan again if it is exceeded.

        Args:
            seen: the graph of the pass.
            peak_bytes: beside the arrays outside of the graph; None if it cannot be measured here.
            gaps: the bytes that the pool has reserved, relative to the bytes in use; None on the
                host.
            measured: whether the pass was measured.
        """
        if not measured or seen.followed:
            seen.tries = 0
            return
        found = None if peak_bytes is None else seen.facts.outside_bytes + peak_bytes
        seen.follow(found)
        if found is not None:
            objects = OBJECTS + OBJECTS_OF_CALL * len(seen.tape.observed)
            self._keep_the_promise(seen, found, 0 if self.gaps.are_expected else objects)
        if gaps is not None and seen.plan is not None and not seen.plan.fits:
            if self.gaps.learn(gaps) and isinstance(self.target.budget, int):
                self._plan_all_anew()

    def ran_out(self) -> None:
        """Leave more room for gaps after a pass has run out of memory, and plan again for that."""
        self._card_is_known = False
        if isinstance(self.target.budget, int) and self.gaps.run_out():
            self._plan_all_anew()

    def _plan_all_anew(self) -> None:
        for seen in self._seen:
            if seen.plan is not None:
                seen.forget_plan()

    def _keep_the_promise(self, seen: SeenGraph, found: int, objects: int) -> None:
        """Plan again with less room if a pass exceeded the budget; warn if then no plan fits.

        ``objects``: the part of the peak that may be Python's own objects.
        """
        budget = self.target.budget
        if seen.plan is None or not isinstance(budget, int):
            return
        if found - objects <= 1.02 * budget:
            return
        try:
            if seen.slack_bytes:
                raise BudgetError
            seen.slack_bytes = max(0, found - seen.plan.peak_bytes)
            plan, _ = self._carried(seen, self.target._replace(strict=True))
            seen.take_tighter(plan)
        except BudgetError:
            self.warn(
                f"a pass took {format_bytes(found)}, and the budget is {format_bytes(budget)}: no "
                "plan fits with that much less room, and the present plan is kept"
            )


def _calibrate(seen: SeenGraph, now: Pass) -> None:
    """Add the measured workspace of a pass to its graph's calls.

    Calls that were never examined also learn from this pass whether they may be recomputed.
    """
    whole = len(now.observed) == len(now.calls)
    looked = now.observed if whole else seen.tape.observed
    observed = [
        replace(
            o,
            workspace_bytes=max(o.workspace_bytes, workspace),
            again=o.again if o.looked else new.again,
        )
        for o, new, workspace in zip(seen.tape.observed, looked, now.workspace, strict=True)
    ]
    seen.measure(observed, dict(now.backward_workspace))
