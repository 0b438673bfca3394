"""Recomputation planned for a budget, on Chainer's own tape, without touching the model.

A *pass* is a forward and the backward after it. The first pass of a graph is recorded for its
times, the second for its workspace; in both, arrays are dropped by a fixed rule. Then a plan is
made, and every later pass of the same graph follows it: arrays are dropped as the plan says, made
again block by block in backward, and let go after their last use.

Source: Kusumoto et al., "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation" (NeurIPS 2019), with the cost model of `umem.planner.saved`.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import chainer
from chainer import _backprop, _backprop_utils, configuration, function_hook, function_node

from umem.chainer.learning import Before, Learned, calibrate, constant_bytes, learn, look
from umem.chainer.passes import Pass
from umem.chainer.planning import check_budget, prepare
from umem.chainer.recompute_report import curves, describe
from umem.chainer.tape import Call, owner_of
from umem.chainer.tracing import Tracing
from umem.errors import BudgetError, StateError, UnsupportedError
from umem.planner.plans import Method, Plan
from umem.units import format_bytes

MANY = 8
"""After so many different graphs in a row, none of which came back, the user is told."""
OBJECTS = 1 << 20
"""Bytes over a budget that Python's own objects, which are measured as well, may take."""
REMEMBERED = 32
"""So many graphs without a plan are remembered."""
_on: list[Recompute] = []


class RecomputeWarning(UserWarning):
    """A pass is not, or cannot be, run by a plan; it is exact all the same. Said once each."""


class Recompute:
    """Train within a budget: ``with umem.chainer.Recompute("12GiB"): ...``.

    Cost: nothing while it is not entered. The second pass of each graph is slow (its workspace is
    measured), and so is the first that follows a plan (its peak is measured).

    Args:
        budget: bytes in total that a step may take (parameters, gradients, optimizer state,
            inputs, saved arrays and workspace), as an int or text; ``"60%"`` of what keeping
            everything takes; ``"min"``, the least that can be done.
        method: a method of `umem.planner.plan`.
        debug: keep checksums, to find arrays that are edited between forward and backward, and
            functions that give another result when they run again. Slow.

    Losses, gradients, parameters and running statistics are those of a plain run, to the bit.
    A pass whose graph is not the planned one keeps everything from where it differs.

    Raises:
        SizeError: on making it: not a budget.
        BudgetError: in the first forward that would follow a plan: nothing fits; names the least
            that does. Nothing was dropped, and training can go on outside the block.
        UnsupportedError: in forward: ChainerX arrays or a static graph.
        RecomputeError: in backward, with ``debug``: what was edited.

    Thread-safety: for the thread that entered it. Never run on a GPU yet.
    """

    def __init__(self, budget: int | str, method: Method = "auto", *, debug: bool = False) -> None:
        self._budget = check_budget(budget)
        self._method: Method = method
        self._debug = debug
        self._learned: list[Learned] = []
        self._pass: Pass | None = None
        self._last: list[weakref.ref[Call]] = []
        self._number = 0
        self._inside = False
        self._tracing = Tracing()
        self._once_seen = 0
        self._said: list[str] = []
        self._thread = 0
        self._restores: list[Callable[[], None]] = []

    def __enter__(self) -> Recompute:
        if self._restores:
            raise StateError("this Recompute is entered already")
        if _on:
            raise StateError("a Recompute is on already; one step has one budget")
        self._thread = threading.get_ident()
        self._wrap(function_node.FunctionNode, "apply", self._apply)
        self._wrap(_backprop_utils, "backprop_step", self._backprop_step)
        self._wrap(_backprop, "_backprop_to_all", self._backprop_to_all)
        self._wrap(function_node, "_backprop", self._grad)
        _on.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _on.remove(self)
        while self._restores:
            self._restores.pop()()
        self._tracing.stop()
        self._inside = False
        if self._pass is not None:
            self._end(self._pass)
        self._pass = None
        for reference in self._last:
            call = reference()
            if call is not None and call.has_graph:
                call.func.add_hook(_MakeAgain())
        self._last = []

    # -- what a person asks ----------------------------------------------------------------

    def report(self, picture: str | Path | None = None) -> str:
        """What was planned for each graph that was seen, predicted and measured.

        Args:
            picture: also write the predicted memory over the step, before and after, as PNG.

        Raises:
            StateError: there is no plan to draw. MissingDependencyError: matplotlib is missing.
        """
        if picture is not None:
            self.draw(picture)
        lines = [describe(learned) for learned in self._learned] + self._said
        return "\n".join(lines) or "no graph was seen yet"

    def draw(self, path: str | Path) -> None:
        """Write a picture of the predicted memory over the step, before and after the plan.

        Raises:
            StateError: there is no plan to draw. MissingDependencyError: matplotlib is missing.
        """
        from umem.reports.step_picture import draw_steps

        planned = [learned for learned in self._learned if learned.plan is not None]
        if not planned:
            raise StateError("no graph is planned yet: a plan is made after two passes")
        largest = max(planned, key=lambda learned: learned.keep_all_bytes)
        budget = self._budget if isinstance(self._budget, int) else None
        draw_steps(*curves(largest), budget, largest.measured_bytes, Path(path))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.append(text)
            warnings.warn(text, RecomputeWarning, stacklevel=4)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._restores.append(lambda: setattr(owner, name, original))

    # -- forward ---------------------------------------------------------------------------

    def _apply(self, original: Any) -> Any:
        def apply(func: Any, inputs: Any) -> Any:
            elsewhere = self._inside or threading.get_ident() != self._thread
            if elsewhere or not configuration.config.enable_backprop:
                return original(func, inputs)
            _check(func, inputs)
            now = self._current(func, inputs)
            if now.learns:
                before = look(func)
            else:
                before = Before(dict(vars(owner_of(func))), [], b"")
            self._inside = True
            self._tracing.call_begins()
            start = time.perf_counter()
            try:
                outputs = original(func, inputs)
            finally:
                self._inside = False
            seconds = time.perf_counter() - start
            if func.inputs is not None:
                follows = now.follows
                now.add(func, inputs, outputs, before, seconds, self._tracing.workspace())
                if follows is not None and now.differs:
                    self._left(now)
            return outputs

        return apply

    def _current(self, func: Any, inputs: Any) -> Pass:
        """The pass that is going forward; a new one after a backward, or after a lost forward."""
        now = self._pass
        if now is not None and not now.went_back:
            if not now.calls or now.calls[-1].has_graph or not now.is_over:
                return now
        if now is not None:
            self._end(now)
        self._pass = None
        self._tracing.stop()
        for learned in self._learned:
            waits = learned.measured and learned.plan is None and learned.never is None
            if waits and _begins(learned, func, inputs):
                self._prepare(learned)
        self._number += 1
        self._pass = Pass(self._number, self._learned, self._debug)
        self._trace_if_needed(func, inputs)
        return self._pass

    def _prepare(self, learned: Learned) -> None:
        if learned.refused is not None:
            raise BudgetError(learned.refused)
        try:
            prepare(learned, self._budget, self._method)
        except BudgetError as error:
            learned.refused = str(error)
            raise

    def _trace_if_needed(self, func: Any, inputs: Any) -> None:
        for learned in reversed(self._learned):
            if learned.never is None and _begins(learned, func, inputs):
                if learned.plan is None and not learned.measured:
                    if self._once_seen < MANY:
                        self._tracing.start("workspace")
                elif learned.plan is not None and learned.measured_bytes is None:
                    self._tracing.start("peak")
                return

    def _left(self, now: Pass) -> None:
        """The pass has just left its plan."""
        self._say(
            f"call {len(now.calls) - 1} ({now.calls[-1].label}) is not what was planned: this pass "
            "keeps everything from there on. A graph that comes back is planned for"
        )
        self._tracing.stop()
        so_far = [call.signature for call in now.calls]
        for learned in self._learned:
            if not learned.measured and learned.signatures[: len(so_far)] == so_far:
                self._tracing.start("workspace")

    # -- backward --------------------------------------------------------------------------

    def _backprop_to_all(self, original: Any) -> Any:
        def backprop_to_all(*args: Any, **kwargs: Any) -> None:
            now = self._pass
            if now is None or self._inside or threading.get_ident() != self._thread:
                original(*args, **kwargs)
                return
            double = configuration.config.enable_backprop
            self._settle(now, "it is differentiated twice" if double else None)
            whole = False
            try:
                original(*args, **kwargs)
                whole = True
            finally:
                self._finish(now, whole)

        return backprop_to_all

    def _grad(self, original: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            now = self._pass
            if now is None or self._inside or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._settle(now, "chainer.grad goes through it")
            return original(*args, **kwargs)

        return grad

    def _backprop_step(self, original: Any) -> Any:
        def backprop_step(func: Any, *args: Any) -> None:
            now = self._pass
            elsewhere = self._inside or threading.get_ident() != self._thread
            if now is None or elsewhere:
                original(func, *args)
                return
            call = getattr(func, "_umem_call", None)
            self._inside = True
            try:
                if call is None or call.number != now.number or not now.calls:
                    now.never = now.never or "its backward goes on into an earlier graph"
                    if call is not None:
                        call.ensure()
                    original(func, *args)
                    return
                now.before(call)
                self._tracing.call_begins()
                now.step(original, call, func, args)
                now.backward_workspace[call.index] = self._tracing.workspace()
                now.after(call)
            finally:
                self._inside = False

        return backprop_step

    def _settle(self, now: Pass, refuse: str | None) -> None:
        if refuse is not None:
            self._say(f"a graph is not planned, and keeps everything: {refuse}")
        follows, settled = now.follows, now.settled
        now.settle(refuse)
        if not settled and follows is not None and now.differs and refuse is None:
            self._say("a pass ended before its plan did: it keeps the rest")
        if now.follows is None and not settled and now.calls:
            signatures = [call.signature for call in now.calls]
            if len(now.observed) == len(now.calls) and self._find(signatures) is None:
                self._remember(learn(now.calls, now.observed))

    def _find(self, signatures: list[Any]) -> Learned | None:
        for learned in self._learned:
            if learned.signatures == signatures:
                return learned
        return None

    def _remember(self, learned: Learned) -> None:
        self._learned.append(learned)
        unplanned = [known for known in self._learned if known.plan is None]
        if len(unplanned) > REMEMBERED:
            self._learned.remove(unplanned[0])
        self._once_seen += 1
        if self._once_seen == MANY:
            self._say(
                f"nothing is planned: the last {MANY} passes were {MANY} different graphs, and a "
                "plan is made for a graph that comes back"
            )

    def _finish(self, now: Pass, whole: bool) -> None:
        first = not now.went_back
        now.finish()
        if not first:
            return
        learned = now.follows
        if whole and learned is None:
            self._finish_learning(now)
        elif whole and learned is not None and not now.differs and now.never is None:
            self._finish_following(now, learned)
        self._tracing.stop()
        self._last = [weakref.ref(call) for call in now.calls]
        now.leaves = {}
        if all(call.index in now.popped or not call.has_graph for call in now.calls):
            now.calls = []  # what the graph still holds is all that is left

    def _finish_learning(self, now: Pass) -> None:
        learned = self._find([call.signature for call in now.calls])
        if learned is None:
            return
        learned.never = learned.never or now.never
        learned.plain = now.popped
        learned.dead = {
            call.index for call in now.calls if call.index not in now.popped and not call.has_graph
        }
        learned.constant_bytes = max(learned.constant_bytes, constant_bytes(now.calls)[0])
        came_back = learned.passes > 0
        learned.passes += 1
        if came_back:
            self._once_seen = 0
            if self._tracing.what == "workspace" and not learned.measured:
                calibrate(learned, now.workspace, now.backward_workspace)

    def _finish_following(self, now: Pass, learned: Learned) -> None:
        assert learned.plan is not None
        self._once_seen = 0
        if self._tracing.what == "peak":
            outside = learned.constant_bytes - learned.gradient_bytes  # made before the pass
            learned.measured_bytes = outside + self._tracing.peak()
            self._keep_the_promise(learned, learned.plan)
        elif learned.rerun_seconds is None:
            learned.rerun_seconds = sum(call.rerun_seconds for call in now.calls)

    def _keep_the_promise(self, learned: Learned, plan: Plan) -> None:
        """More than the budget was needed: plan once more, with that much less room."""
        assert learned.measured_bytes is not None
        budget, found = self._budget, learned.measured_bytes
        if not isinstance(budget, int) or learned.slack_bytes:
            return
        if found <= max(1.02 * budget, budget + OBJECTS):
            return
        predicted = learned.constant(learned.packs) + plan.peak_bytes
        learned.slack_bytes = max(0, found - predicted)
        try:
            prepare(learned, budget, self._method)
            learned.measured_bytes = None
        except BudgetError:
            self._say(
                f"a pass took {format_bytes(found)}, and the budget is {format_bytes(budget)}: "
                "with that much less room there is no plan, and this one stays"
            )

    def _end(self, now: Pass) -> None:
        """A pass is not the current one any more; its graph may live on."""
        if not now.went_back:
            now.use_plain_ranks()
            self._last = [weakref.ref(call) for call in now.calls]


class _MakeAgain(function_hook.FunctionHook):
    """Makes arrays again for a backward after the block was left."""

    name = "umem.recompute"

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Make sure of what the function retained."""
        function._umem_call.ensure()


def _check(func: Any, inputs: Any) -> None:
    """Refuse what does not go through Chainer's own tape."""
    if configuration.config.schedule_func is not None:
        raise UnsupportedError(
            "static_graph runs a schedule of its own, around Chainer's tape: take the decorator "
            "away, or do not use Recompute"
        )
    for x in inputs:
        if getattr(x, "_has_chainerx_array", False) or type(x).__module__ == "chainerx":
            raise UnsupportedError(
                f"{func.label!r} was given a ChainerX array; ChainerX keeps a graph of its own, "
                "which Recompute cannot reach: use NumPy or CuPy arrays"
            )


def _begins(learned: Learned, func: Any, inputs: Any) -> bool:
    """Whether a graph may be the one that begins with this call."""
    kind, wiring, _ = learned.signatures[0]
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    shapes = [(array.shape, array.dtype) for array in arrays]
    return bool(kind is type(owner_of(func)) and [entry[2:] for entry in wiring] == shapes)


__all__ = ["Recompute", "RecomputeWarning"]
