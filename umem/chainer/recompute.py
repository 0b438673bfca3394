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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from chainer import (
    _backprop,
    _backprop_utils,
    configuration,
    function_hook,
    function_node,
    optimizer,
)

from umem.chainer.course import INTO_EARLIER, Course, RecomputeWarning
from umem.chainer.learning import Learned, Roots
from umem.chainer.observing import Before, look
from umem.chainer.plain_pass import PlainPass
from umem.chainer.planning import check_budget
from umem.chainer.recompute_report import curves, describe
from umem.chainer.wiring import owner_of, wait_for
from umem.errors import StateError, UnsupportedError
from umem.files import whole
from umem.planner.plans import Method

_on: list[Recompute] = []
TWICE = "it is differentiated twice"


class Recompute:
    """Train within a budget: ``with umem.chainer.Recompute("12GiB"): ...``.

    Cost: nothing while it is not entered. The second pass of each graph is slow (its workspace is
    measured), and so is the first that follows a plan (its peak is measured).

    Args:
        budget: bytes in total that a step may take (parameters, gradients, optimizer state,
            inputs, saved arrays and workspace), as an int or text; ``"60%"`` of what a
            plain step takes; ``"min"``, the least that can be done.
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
        self._course = Course(self._budget, method, debug)
        self._inside = False
        self._in_plain = False
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
        self._wrap(optimizer.UpdateRule, "update", self._update)
        self._wrap(function_node.FunctionNode, "unchain", self._unchain)
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
        self._inside = self._in_plain = False
        for reference in self._course.leave():
            call = reference()
            if call is not None and call.has_graph:
                call.func.add_hook(_MakeAgain())

    # -- what a person asks ----------------------------------------------------------------

    @property
    def predicted_bytes(self) -> int | None:
        """The peak in all that the plan of the largest graph promises; None before it is made."""
        largest = self._largest()
        return None if largest is None else largest.peak_bytes

    @property
    def measured_bytes(self) -> int | None:
        """The peak of the first pass that followed that plan; None before, and on a GPU."""
        largest = self._largest()
        return None if largest is None else largest.measured_bytes

    def _largest(self) -> Learned | None:
        planned = [learned for learned in self._course.learned if learned.plan is not None]
        return max(planned, key=lambda learned: learned.keep_all_bytes, default=None)

    def report(self, picture: str | Path | None = None) -> str:
        """What was planned for each graph that was seen, predicted and measured.

        Args:
            picture: also write the predicted memory over the step, before and after, as PNG.

        Raises:
            StateError: there is no plan to draw. MissingDependencyError: matplotlib is missing.
        """
        if picture is not None:
            self.draw(picture)
        lines = [describe(learned) for learned in self._course.learned] + self._course.said
        return "\n".join(lines) or "no graph was seen yet"

    def draw(self, path: str | Path) -> None:
        """Write a picture of the predicted memory over the step, before and after the plan.

        Raises:
            StateError: there is no plan to draw. MissingDependencyError: matplotlib is missing.
            OSError: it cannot be written; what was there is as it was.
        """
        from umem.reports.step_picture import draw_steps

        largest = self._largest()
        if largest is None:
            raise StateError("no graph is planned yet: a plan is made after two passes")
        budget = self._budget if isinstance(self._budget, int) else None
        with whole(Path(path), force=True) as file:
            draw_steps(*curves(largest), budget, largest.measured_bytes, file)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._restores.append(lambda: setattr(owner, name, original))

    # -- forward ---------------------------------------------------------------------------

    def _apply(self, original: Any) -> Any:
        course = self._course

        def apply(func: Any, inputs: Any) -> Any:
            if self._inside or self._in_plain or threading.get_ident() != self._thread:
                return original(func, inputs)
            plain = course.plain
            if plain is not None and not plain.is_over:  # one more call of it, or outside the graph
                return self._apply_plain(original, plain, func, inputs)
            if not configuration.config.enable_backprop:
                return original(func, inputs)
            now = course.current(func, inputs)
            if now is None or isinstance(now, PlainPass):
                return self._apply_plain(original, now, func, inputs)
            now.catch_up()
            if now.looks:  # the first call of each pass does
                _check(func, inputs)
                before = look(func)
            else:
                before = Before(dict(vars(owner_of(func))), [], None)
            self._inside = True
            course.tracing.call_begins()
            if now.learns:
                wait_for(inputs)
            start = time.perf_counter()
            try:
                outputs = original(func, inputs)
            finally:
                self._inside = False
            if now.learns:
                wait_for(inputs)
            seconds = time.perf_counter() - start
            if func.inputs is not None:
                follows = now.follows
                now.add(func, inputs, outputs, before, seconds, course.tracing.workspace())
                if follows is not None and now.differs:
                    course.left(now)
            return outputs

        return apply

    def _apply_plain(self, original: Any, plain: PlainPass | None, func: Any, inputs: Any) -> Any:
        self._inside = True
        try:
            outputs = original(func, inputs)
        finally:
            self._inside = False
        if plain is not None and func.inputs is not None:
            plain.add(func, outputs)
        return outputs

    # -- backward --------------------------------------------------------------------------

    def _backprop_to_all(self, original: Any) -> Any:
        def backprop_to_all(*args: Any, **kwargs: Any) -> None:
            now, plain = self._course.now, self._course.plain
            if self._inside or self._in_plain or threading.get_ident() != self._thread:
                original(*args, **kwargs)
                return
            roots = args[0] if args else kwargs["outputs"]
            if plain is not None and not _roots(roots):
                self._plain_backward(plain, lambda: original(*args, **kwargs))
                return
            if now is None:
                if plain is None:
                    self._course.keeps(INTO_EARLIER)
                original(*args, **kwargs)
                return
            double = configuration.config.enable_backprop
            self._course.settle(now, TWICE if double else None, _roots(roots))
            whole = False
            try:
                original(*args, **kwargs)
                whole = True
            finally:
                self._course.finish(now, whole)

        return backprop_to_all

    def _plain_backward(self, plain: PlainPass, run: Callable[[], None]) -> None:
        self._course.settle_plain(plain, TWICE if configuration.config.enable_backprop else None)
        self._in_plain, whole = True, False
        try:
            run()
            whole = True
        finally:
            self._in_plain = False
            self._course.finish_plain(plain, whole)

    def _update(self, original: Any) -> Any:
        def update(rule: Any, parameter: Any) -> None:
            if rule.enabled and threading.get_ident() == self._thread:
                self._course.before_update(parameter)
            original(rule, parameter)
            self._course.known.after_update(parameter)

        return update

    def _unchain(self, original: Any) -> Any:
        def unchain(func: Any) -> None:
            now = self._course.now
            call = getattr(func, "_umem_call", None)
            if now is not None and call is not None and threading.get_ident() == self._thread:
                self._inside = True
                try:
                    if call.number == now.number and not now.went_back:
                        self._course.cut(now)
                    else:
                        call.keep(func)
                finally:
                    self._inside = False
            original(func)

        return unchain

    def _grad(self, original: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            now = self._course.now
            if now is None or self._inside or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._course.settle(now, "chainer.grad goes through it")
            return original(*args, **kwargs)

        return grad

    def _backprop_step(self, original: Any) -> Any:
        def backprop_step(func: Any, *args: Any) -> None:
            if self._inside or threading.get_ident() != self._thread:
                original(func, *args)
                return
            now = self._course.now
            call = getattr(func, "_umem_call", None)
            if now is None and call is None:
                original(func, *args)
                return
            self._inside = True
            try:
                if now is None or call is None or call.number != now.number or not now.calls:
                    if now is not None:
                        now.never = now.never or INTO_EARLIER
                        if call is None or not now.went_back:
                            self._course.keeps(INTO_EARLIER)
                    if call is not None:
                        call.restore()
                    original(func, *args)
                    return
                now.before(call)
                self._course.tracing.call_begins()
                now.step(original, call, func, args)
                now.backward_workspace[call.index] = self._course.tracing.workspace()
                now.after(call)
            finally:
                self._inside = False

        return backprop_step


class _MakeAgain(function_hook.FunctionHook):
    """Makes arrays again for a backward after the block was left."""

    name = "umem.recompute"

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Make sure of what the function retained."""
        function._umem_call.restore()


def _roots(outputs: Any) -> Roots:
    """The calls and outputs at which a backward begins."""
    found = []
    for node, _ in outputs:
        creator = node.creator_node
        call = getattr(creator, "_umem_call", None)
        if call is not None:
            found += [(call.index, i) for i, y in enumerate(creator.outputs) if y() is node]
    return tuple(sorted(found))


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


__all__ = ["Recompute", "RecomputeWarning"]
