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
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from chainer import (
    _backprop,
    _backprop_utils,
    configuration,
    function_node,
    link,
    optimizer,
    variable,
)
from chainer.serializer import Deserializer

from umem.chainer.recompute.afterwards import watch_over
from umem.chainer.recompute.course import ANOTHER_ARRAY, INTO_EARLIER, IT_IS_CUT, Course
from umem.chainer.recompute.learning import Learned, Roots
from umem.chainer.recompute.observing import Before, look
from umem.chainer.recompute.plain_pass import PlainPass
from umem.chainer.recompute.plan_report import curves, describe
from umem.chainer.recompute.planning import check_budget
from umem.chainer.recompute.tape import Call
from umem.chainer.recompute.whole_graph import bring, bring_one, check, functions
from umem.chainer.recompute.wiring import owner_of, wait_for
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
        strict: whether a share that cannot be had is an error, as a size is. Otherwise the step
            takes the least that can be done, and a `RecomputeWarning` says so once.
        debug: keep checksums, to find arrays that are edited between forward and backward, and
            functions that give another result when they run again. Slow.

    Losses, gradients, parameters and running statistics are those of a plain run, to the bit.
    A pass whose graph is not the planned one keeps everything from where it differs.

    Raises:
        SizeError: on making it: not a budget.
        BudgetError: in the first forward that would follow a plan: a size, or a share with
            ``strict``, that nothing fits; names the least that does. Nothing was dropped, and
            training can go on outside the block.
        UnsupportedError: in forward: ChainerX arrays or a static graph.
        RecomputeError: before a backward that reads what cannot be made again; nothing has
            changed. With ``debug``, in backward: what was edited.

    Thread-safety: for the thread that entered it. A graph of that thread may go backward in
    another one, which first makes again all that was dropped. Never run on a GPU yet.
    """

    def __init__(
        self,
        budget: int | str,
        method: Method = "auto",
        *,
        strict: bool = False,
        debug: bool = False,
    ) -> None:
        self._budget = check_budget(budget)
        self._course = Course(self._budget, method, debug=debug, strict=strict)
        self._inside = False
        self._in_plain = False
        self._stepping: Call | None = None
        self._depth = 0
        self._earlier = True
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
        self._wrap(variable.Variable, "unchain", self._unchain_variable)
        self._wrap(variable.VariableNode, "unchain", self._unchain_variable)
        self._wrap(variable.Variable, "_set_array", self._set_array)
        self._wrap(link.Link, "serialize", self._serialize)
        self._wrap(variable.Variable, "copydata", self._copydata)
        _on.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._restores:
            self._restores[-1]()
            self._restores.pop()
        if self in _on:
            _on.remove(self)
        self._inside = self._in_plain = False
        watch_over(self._course.leave())

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

    @property
    def planned_count(self) -> int:
        """The passes so far that followed a plan from their beginning to their end."""
        return self._course.planned_count

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
        from umem.reports.pictures.step_picture import draw_steps

        largest = self._largest()
        if largest is None:
            raise StateError("no graph is planned yet: a plan is made after two passes")
        budget = self._budget if isinstance(self._budget, int) else None
        with whole(Path(path), force=True) as file:
            draw_steps(*curves(largest), budget, largest.measured_bytes, file)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._restores.append(lambda: setattr(owner, name, original))  # first: a signal may come
        setattr(owner, name, make(original))

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
            course.before_call(owner_of(func))
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
            nodes = [node for node, _ in (args[0] if args else kwargs["outputs"])]
            if self._is_elsewhere():
                self._bring_all(nodes)
                original(*args, **kwargs)
                return
            now, plain = self._course.now, self._course.plain
            if plain is not None and not _roots(nodes):
                self._earlier = self._course.has_earlier()
                if self._earlier:
                    check(functions(nodes))
                self._plain_backward(plain, lambda: original(*args, **kwargs))
                return
            self._earlier = True
            if now is None:
                check(functions(nodes))
                if plain is None:
                    self._course.keeps(INTO_EARLIER)
                original(*args, **kwargs)
                return
            if now.went_back or now.is_unusual:
                check(functions(nodes))
            double = configuration.config.enable_backprop
            self._course.settle(now, TWICE if double else None, _roots(nodes), nodes)
            whole, self._depth = False, 1
            try:
                original(*args, **kwargs)
                whole = True
            finally:
                self._depth = 0
                self._course.finish(now, whole)

        return backprop_to_all

    def _is_elsewhere(self) -> bool:
        """Whether a backward begins in another thread than the block's, or inside of another."""
        here = threading.get_ident() == self._thread
        return not here or self._inside or self._in_plain or self._depth > 0

    def _bring_all(self, nodes: Iterable[Any]) -> None:
        """Have the whole graph before some nodes there, for a backward that follows no plan.

        Raises:
            RecomputeError: something of it cannot be made again, or the backward around it has a
                plan that takes its calls in another order. Nothing has changed.
        """
        here = threading.get_ident() == self._thread
        now = self._course.now
        if here and now is not None and self._stepping is not None:
            now.goes_backward_inside(self._stepping)
        found = functions(nodes)
        check(found)
        inside, self._inside = self._inside, self._inside or here
        try:
            numbers = bring(found)
        finally:
            if here:
                self._inside = inside
        self._course.elsewhere(numbers)

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
            if rule.enabled:
                self._before_change(parameter.array)
            original(rule, parameter)
            if threading.get_ident() == self._thread:
                self._course.known.after_update(parameter)

        return update

    def _serialize(self, original: Any) -> Any:
        def serialize(owner: Any, serializer: Any) -> None:
            if isinstance(serializer, Deserializer):
                for name in owner._params:
                    self._before_change(getattr(owner, name).array)
                for name in owner._persistent:
                    self._before_change(getattr(owner, name))
            original(owner, serializer)

        return serialize

    def _copydata(self, original: Any) -> Any:
        def copydata(target: Any, source: Any) -> None:
            self._before_change(target.array)
            original(target, source)

        return copydata

    def _before_change(self, array: Any) -> None:
        """Something is about to change an array in place that a graph may have read."""
        if hasattr(array, "dtype"):
            self._course.before_update(array, here=threading.get_ident() == self._thread)

    def _unchain(self, original: Any) -> Any:
        def unchain(func: Any) -> None:
            self._before_cut(func, gone=True)
            original(func)

        return unchain

    def _unchain_variable(self, original: Any) -> Any:
        def unchain(y: Any) -> None:  # a variable, or its node
            self._before_cut(y.creator_node, gone=False)
            original(y)

        return unchain

    def _set_array(self, original: Any) -> Any:
        def set_array(y: Any, *args: Any, **kwargs: Any) -> None:
            self._before_cut(y.creator_node, gone=False, why=ANOTHER_ARRAY)
            original(y, *args, **kwargs)

        return set_array

    def _before_cut(self, func: Any, *, gone: bool, why: str = IT_IS_CUT) -> None:
        """The graph is about to be cut behind a function; ``gone``: the function goes from it."""
        call = getattr(func, "_umem_call", None)
        if call is None:
            return
        if threading.get_ident() != self._thread:
            self._course.elsewhere(self._course.make_whole(call.number))
            return
        if self._inside:
            return
        self._inside = True
        try:
            self._course.before_cut(call, func, gone=gone, why=why)
        finally:
            self._inside = False

    def _grad(self, original: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            outputs = args[0] if args else kwargs["outputs"]
            nodes = [y.node for y in outputs]
            if self._is_elsewhere():
                self._bring_all(nodes)
            else:
                check(functions(nodes))
                self._earlier = True
                if self._course.now is not None:
                    self._course.settle(self._course.now, "chainer.grad goes through it")
            return original(*args, **kwargs)

        return grad

    def _backprop_step(self, original: Any) -> Any:
        def backprop_step(func: Any, *args: Any) -> None:
            if self._inside or threading.get_ident() != self._thread:
                original(func, *args)
                return
            now = self._course.now
            call = getattr(func, "_umem_call", None)
            if now is None and call is None and not self._earlier:
                original(func, *args)
                return
            self._inside = True
            self._stepping = call
            try:
                if now is None or call is None or call.number != now.number or not now.calls:
                    if now is not None:
                        now.never = now.never or INTO_EARLIER
                        if call is None or not now.went_back:
                            self._course.keeps(INTO_EARLIER)
                    bring_one(func)
                    original(func, *args)
                    return
                now.before(call)
                self._course.tracing.call_begins()
                now.step(original, call, func, args)
                now.backward_workspace[call.index] = self._course.tracing.workspace()
                now.after(call)
            finally:
                self._inside = False
                self._stepping = None

        return backprop_step


def _roots(nodes: Iterable[Any]) -> Roots:
    """The calls and outputs at which a backward begins."""
    found = []
    for node in nodes:
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


__all__ = ["Recompute"]
