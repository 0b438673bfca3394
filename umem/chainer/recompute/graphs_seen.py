"""Remembers the graphs of a training run, plans them, and tells the user once what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import chainer

from umem.chainer.function_facts import owner_of, rules_of
from umem.chainer.recompute.carrying import Target, carried
from umem.chainer.recompute.lower import Lower
from umem.chainer.recompute.observing import gradient_bytes, look_beside
from umem.chainer.recompute.optimizer_facts import OptimizerFacts, state_bytes
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.seen import History, SeenGraph, tape_of
from umem.chainer.recompute.tape import Signature
from umem.errors import BudgetError, RecomputeWarning, warn_at_program
from umem.units import format_bytes

REMEMBERED = 32
"""So many graphs without a plan are remembered."""
MANY = 8
"""After so many different graphs in a row, none of which came back, the user is told."""
OBJECTS = 1 << 20
"""Bytes over a budget that Python's own objects, which are measured as well, may take."""
KEEPS = "a graph is not planned, and keeps everything: "
AGAIN = "it goes backward again after an update"


class Graphs:
    """The graphs that were seen, the oldest first, and all that is remembered of them.

    Args:
        target: what to plan for.
        lower: where plans move what is kept, if they do.

    Attributes:
        optimizers: what they take.
        said: what the user was told.
        planned_count: passes that followed a plan from their beginning to their end.
        followed_seconds: of those of them that were not measured.
        own_seconds: how much of that was for running again, and for following the plan.
    """

    def __init__(self, target: Target, lower: Lower) -> None:
        self._target = target
        self._lower = lower
        self._seen: dict[int, SeenGraph] = {}
        self._count = 0
        self._once_seen = 0
        self._waiting: list[int] = []
        self._wished = False
        self.optimizers = OptimizerFacts()
        self.said: list[str] = []
        self.planned_count = 0
        self.followed_seconds = self.own_seconds = 0.0

    def __iter__(self) -> Iterator[SeenGraph]:
        return iter(list(self._seen.values()))

    def say(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self.said:
            self.said.append(text)
            warn_at_program(text, RecomputeWarning)

    def find(self, signatures: Sequence[Signature]) -> SeenGraph | None:
        """The graph of these calls."""
        wanted = tuple(signatures)
        return next((one for one in self if one.tape.signatures == wanted), None)

    def alike(self, func: Any, inputs: Any) -> list[SeenGraph]:
        """Those that may be the one that begins with this call."""
        kind = type(owner_of(func))
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        shapes = [(array.shape, array.dtype) for array in arrays]
        return [
            one
            for one in self
            if one.tape.signatures[0][0] is kind
            and [entry[2:] for entry in one.tape.signatures[0][1]] == shapes
        ]

    def note(self, number: int, **changes: Any) -> SeenGraph | None:
        """Replace fields of a graph's history; None where the graph is forgotten."""
        seen = self._seen.get(number)
        if seen is not None:
            seen = self._put(replace(seen, history=replace(seen.history, **changes)))
        return seen

    def _put(self, seen: SeenGraph) -> SeenGraph:
        self._seen[seen.number] = seen
        return seen

    def _forget_plan(self, number: int) -> None:
        """Have the plan made anew: there is more to count than there was."""
        forgotten = {"refused": None, "measured_bytes": None, "slack_bytes": 0}
        seen = self.note(number, **forgotten, followed=False)
        if seen is not None:
            self._put(replace(seen, plan=None))

    # -- before a pass ---------------------------------------------------------------------

    def plan(self, func: Any, inputs: Any) -> list[SeenGraph]:
        """Have plans for those that may be the one that begins with this call; returns them.

        Raises:
            BudgetError: one of them has none within the budget.
        """
        self._count_updated()
        for seen in self.alike(func, inputs):
            if seen.history.is_measured and seen.plan is None and seen.history.never is None:
                self._plan(seen)
        return self.alike(func, inputs)

    def _plan(self, seen: SeenGraph) -> None:
        if seen.history.refused is not None:
            raise BudgetError(seen.history.refused)
        try:
            plan, said = carried(seen, self._target, self._lower.link)
        except BudgetError as error:
            self.note(seen.number, refused=str(error))
            raise
        self._put(replace(seen, plan=plan))
        if said is not None and not self._wished:
            self._wished = True  # once, whatever the number of graphs
            self.say(said)
        self.note(seen.number, tries=0)
        for other in self:
            if other.tape.signatures[0] == seen.tape.signatures[0]:
                self.note(other.number, differed=False)

    def to_measure(self, alike: Sequence[SeenGraph], *, plain: bool) -> str | None:
        """Choose what to measure in the pass that begins: ``workspace``, ``peak`` or nothing."""
        wait = [one for one in alike if one.history.never is None and one.history.tries < MANY]
        unmeasured = [one for one in wait if one.plan is None and not one.history.is_measured]
        unfollowed = [one for one in wait if one.plan is not None and not one.history.followed]
        workspace = bool(unmeasured) and not plain and self._once_seen < MANY
        self._waiting = [one.number for one in (unmeasured if workspace else unfollowed)]
        return None if not self._waiting else "workspace" if workspace else "peak"

    def end_tries(self) -> None:
        """The pass that was measured for the sake of some graphs is over."""
        for number in self._waiting:
            seen = self._seen.get(number)
            if seen is not None:
                self.note(number, tries=seen.history.tries + 1)
        self._waiting = []

    def is_unmeasured(self, signatures: Sequence[Signature]) -> bool:
        """Tell whether a graph that begins with these calls has to be measured."""
        return any(
            not seen.history.is_measured and seen.tape.begins_with(signatures) for seen in self
        )

    # -- what passes show ------------------------------------------------------------------

    def learn(self, now: Pass) -> None:
        """A pass has gone forward, and does not follow a plan."""
        seen = self.find([call.signature for call in now.calls])
        if seen is None:
            seen = self._add(now)
        beside, old = look_beside(now.calls), seen.history
        history = replace(
            old,
            constant_bytes=max(old.constant_bytes, beside.constant_bytes),
            stays=beside.stays,
            parameters={**old.parameters, **beside.parameters},
            held_gradients={**old.held_gradients, **beside.held_gradients},
            old_gradients={**old.old_gradients, **now.old_gradients},
        )
        self._put(replace(seen, history=history.counting(self.optimizers)))

    def _add(self, now: Pass) -> SeenGraph:
        """Remember one more; of those without a plan the oldest may be forgotten."""
        self._count += 1
        keeps_order = any(rules_of(call.signature[0])[1] for call in now.calls)
        tape = tape_of(now.calls, now.observed)
        seen = self._put(SeenGraph(self._count, tape, History(keeps_order=keeps_order)))
        unplanned = [known.number for known in self if known.plan is None]
        if len(unplanned) > REMEMBERED:
            del self._seen[unplanned[0]]
        self._once_seen += 1
        if self._once_seen == MANY:
            self.say(
                f"nothing is planned: the last {MANY} passes were {MANY} different graphs, and a "
                "plan is made for a graph that comes back"
            )
        return seen

    def finish_learning(self, now: Pass, *, measured: bool) -> None:
        """A pass has gone backward without a plan; ``measured``: its workspace was."""
        seen = self.find([call.signature for call in now.calls])
        if seen is None:
            return
        old = seen.history
        dead = [c.index for c in now.calls if c.index not in now.popped and not c.has_graph]
        self.note(
            seen.number,
            never=old.never or now.never,
            keeps_order=old.keeps_order or now.has_nested,
            roots=now.roots,
            backward_seconds=old.backward_seconds or dict(now.backward_seconds),
            dead=frozenset(dead),
            pass_count=old.pass_count + 1,
        )
        self._learn_order(now, seen.number)
        if old.pass_count > 0:  # it has come back
            self._once_seen = 0
            self.note(seen.number, tries=0)
            if measured and not old.is_measured:
                self._calibrate(self._seen[seen.number], now)

    def _calibrate(self, seen: SeenGraph, now: Pass) -> None:
        """Add the workspace of a pass, and what was not looked at closely before it."""
        whole = len(now.observed) == len(now.calls)
        looked = now.observed if whole else seen.tape.observed
        observed = tuple(
            o._replace(
                workspace_bytes=max(o.workspace_bytes, workspace),
                again=o.again if o.looked else new.again,
            )
            for o, new, workspace in zip(seen.tape.observed, looked, now.workspace, strict=True)
        )
        self._put(replace(seen, tape=replace(seen.tape, observed=observed)))
        workspace = dict(now.backward_workspace)
        self.note(seen.number, is_measured=True, backward_workspace=workspace)

    def _learn_order(self, now: Pass, number: int) -> None:
        ranks = [call.plain_rank for call in now.calls]
        self.note(number, order=dict(now.popped), ranks=ranks)

    def learn_order_anew(self, now: Pass, number: int) -> None:
        """A pass went backward in another order: its graph is planned for that from now on."""
        self._learn_order(now, number)
        self._forget_plan(number)

    def note_forks(self, now: Pass) -> None:
        """Remember where a pass has left plans."""
        for number, index in now.take_forks():
            seen = self._seen.get(number)
            if seen is not None:
                self.note(number, forks=seen.history.forks | {index})

    def note_outliving(self, now: Pass) -> None:
        """A pass's graph is still there when the next one begins."""
        seen = now.follows or self.find(now.signatures)
        seen = None if seen is None else self._seen.get(seen.number)
        if seen is None or seen.history.outlives:
            return
        fits = seen.plan is not None and seen.plan.fits
        self.note(seen.number, outlives=True)
        if seen.problem.held_bytes and not fits:
            self._forget_plan(seen.number)  # what is held is there twice

    def goes_again(self, signatures: Sequence[Signature]) -> None:
        """A graph was gone through once more after an update: it gets no plan."""
        seen = self.find(signatures)
        if seen is not None and not seen.history.keeps:
            history = replace(seen.history, keeps=True, never=AGAIN)
            self._put(replace(seen, history=history, plan=None))
            self.say(KEEPS + AGAIN)

    # -- what plans come to ----------------------------------------------------------------

    def finish_following(
        self, number: int, rerun_seconds: float | None, seconds: float, own_seconds: float
    ) -> None:
        """A pass has followed a plan to its end.

        Args:
            rerun_seconds: None where it was measured.
            seconds: of all of it.
            own_seconds: what of that was not Chainer's own work.
        """
        self._once_seen = 0
        self.planned_count += 1
        if rerun_seconds is not None:
            self.followed_seconds += seconds
            self.own_seconds += own_seconds
        seen = self._seen.get(number)
        if seen is not None and rerun_seconds is not None and seen.history.rerun_seconds is None:
            self.note(number, rerun_seconds=rerun_seconds)

    def finish_plain(self, number: int) -> None:
        """A pass of a graph that fits was left alone to its end."""
        self._once_seen = 0
        self.note(number, rerun_seconds=0.0)

    def forward_bytes(self, number: int) -> int:
        """Old gradients that a pass of a graph clears between forward and backward."""
        seen = self._seen.get(number)
        return 0 if seen is None else seen.history.forward_bytes

    def look_at_peak(self, number: int, peak_bytes: int | None, *, measured: bool) -> None:
        """Compare the peak of a pass with what was promised; None: it cannot be known here."""
        seen = self._seen.get(number)
        if seen is None or not measured or seen.history.followed:
            self.note(number, tries=0)
            return
        self.note(number, followed=True)
        if peak_bytes is not None:
            found = seen.history.outside_bytes + peak_bytes
            self.note(number, measured_bytes=max(found, seen.problem.update_peak_bytes))
            self._keep_the_promise(self._seen[number], found)

    def _keep_the_promise(self, seen: SeenGraph, found: int) -> None:
        """More than the budget was needed: plan once more, with that much less room."""
        budget = self._target.budget
        if seen.plan is None or not isinstance(budget, int):
            return
        if found <= max(1.02 * budget, budget + OBJECTS):
            return
        try:
            if seen.history.slack_bytes:
                raise BudgetError
            slack = max(0, found - seen.plan.peak_bytes)
            seen = replace(seen, history=replace(seen.history, slack_bytes=slack))
            self._put(seen)
            plan, _ = carried(seen, self._target._replace(strict=True), self._lower.link)
            history = replace(seen.history, measured_bytes=None, followed=False)
            self._put(replace(seen, history=history, plan=plan))
        except BudgetError:
            self.say(
                f"a pass took {format_bytes(found)}, and the budget is {format_bytes(budget)}: "
                "with that much less room there is no plan, and this one stays"
            )

    def beside(self) -> tuple[list[Any], int]:
        """The arrays of parameters that optimizers have updated; their state and gradients."""
        found = [p for p in self.optimizers.parameters if p.array is not None]
        nbytes = sum(state_bytes(p.update_rule) + gradient_bytes(p) for p in found)
        return [p.array for p in found], nbytes

    def _count_updated(self) -> None:
        """Plans that were made before an optimizer had its state are to be made anew."""
        if not self.optimizers.take_new():
            return
        for seen in self:
            old, new = seen.history, seen.history.counting(self.optimizers)
            self._put(replace(seen, history=new))
            grew = new.optimizer_bytes > old.optimizer_bytes
            if grew and seen.plan is not None:
                self._forget_plan(seen.number)
