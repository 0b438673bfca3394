"""The two runs of a region: the state that the first leaves, and the check that both are equal."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import chainer
from chainer import function_hook

from umem.chainer.checkpointing.calls import RegionCall, call_of, check_call, outside
from umem.chainer.checkpointing.region_state import FirstCalls, RandomState, SecondCalls
from umem.chainer.forward_state import as_in_forward, configuration_now
from umem.errors import (
    RecomputeCountError,
    RecomputeDtypeError,
    RecomputeError,
    RecomputeShapeError,
)

_READ = ("_running_mean", "_running_var")
"""Running statistics that BatchRenormalization reads before it updates them."""
_STATISTICS = (*_READ, "running_mean", "running_var", "running_projection")
_numbers = count()


class _Hook(function_hook.FunctionHook):
    """A function hook with a unique name, so that regions nest."""

    def __init__(self) -> None:
        self.name = f"umem.rerun-{next(_numbers)}"
        self._stack = ExitStack()

    def _enter(self, *contexts: Any) -> None:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            super().__enter__()
            stack.callback(super().__exit__)
            self._stack = stack.pop_all()


class FirstRun(_Hook):
    """Runs a region with a graph, and records what the second run needs.

    The functions are held weakly, so that intermediate arrays are freed during the run.
    """

    def __init__(self, random: RandomState | None, checks: bool) -> None:
        super().__init__()
        self.random = random
        self.checks = checks
        self.calls: list[RegionCall] = []
        self.config = configuration_now()
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.statistics: dict[int, dict[str, Any]] = {}
        self._done = 0
        self.links = FirstCalls(self.name)

    def __enter__(self) -> FirstRun:
        random = () if self.random is None else (self.random.first(),)
        self._enter(chainer.using_config("_will_recompute", True), *random, self.links)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Record the function."""
        self.functions.add(function)
        if self.checks:
            self.calls.append(call_of(function, in_data))
        if self.random is not None and (self.links.were_made() or _local.jumped):
            self.random.mark(self._done)
        held = vars(_real(function))
        if held.get("_running_mean") is not None:
            self.statistics[self._done] = {name: held[name].copy() for name in _READ}
        self._done += 1


class SecondRun(_Hook):
    """Reruns a region in the first run's state, and checks that it does the same."""

    def __init__(self, first: FirstRun) -> None:
        super().__init__()
        self._first = first
        self.functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._done = 0
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> SecondRun:
        first = self._first
        random = () if first.random is None else (first.random.again(),)
        links = SecondCalls(self.name, first.links.vectors)
        self._enter(as_in_forward(first.config), *random, links)
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        """End the second run, restore the state around it, and check that it was complete.

        Raises:
            RecomputeCountError: functions of the first run are missing.
            RecomputeError: other random numbers were drawn.
        """
        first = self._first
        checks = kind is None and first.checks
        differs = checks and first.random is not None and first.random.differs()
        _local.jumped = False
        self._stack.close()
        if checks and self._done < len(first.calls):
            missing = first.calls[self._done]
            raise RecomputeCountError(
                f"the second run called {self._done} functions and the first {len(first.calls)}: "
                f"{missing.label!r} is missing ({missing.line}). A checkpointed region must do "
                "the same every time"
            )
        if differs:
            raise RecomputeError(
                "the second run of a checkpointed region drew other random numbers than the "
                "first: another thread draws from NumPy's global generator, or the region draws "
                "a different number of them"
            )

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Check the function, and give it copies of running statistics, which must be updated only
        once.
        """
        first = self._first
        call = call_of(function, in_data) if first.checks else None
        self.functions[function] = call
        if call is not None:
            check_call(self._done, first.calls, call)
        if first.random is not None and first.random.jump(self._done):
            _local.jumped = True
        read = first.statistics.get(self._done, {})
        self._done += 1
        function = _real(function)
        held = vars(function)
        for name in _STATISTICS:
            value = held.get(name)
            if value is not None:
                self._kept.append((function, name, value))
                setattr(function, name, read.get(name, value).copy())

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        """Restore the running statistics, for links that store the function's result."""
        _local.jumped = False
        while self._kept and self._kept[-1][0] is _real(function):
            setattr(*self._kept.pop())

    def check_outputs(self, outputs: Sequence[Any], kinds: Sequence[tuple[Any, Any]]) -> None:
        """Raise unless the region's outputs have these shapes and dtypes."""
        for y, (shape, dtype) in zip(outputs, kinds, strict=True):
            if y.creator_node not in self.functions:
                raise RecomputeCountError(
                    "a result of a checkpointed region was computed in the first run, but is "
                    f"passed on in the second: {y.label}"
                )
            call = self.functions[y.creator_node]
            if y.shape != shape:
                raise RecomputeShapeError(
                    f"{call.label!r} made shape {shape} in the first run and {y.shape} in the "
                    f"second ({call.line})"
                )
            if y.dtype != dtype:
                raise RecomputeDtypeError(
                    f"{call.label!r} made type {dtype} in the first run and {y.dtype} in the "
                    f"second ({call.line})"
                )

    def check_captured(
        self, outputs: Sequence[Any], inputs: Sequence[Any], captured: Sequence[Any]
    ) -> None:
        """Raise unless the region captures the variables of the first run."""
        left = {id(x.node): x for x in captured}
        known = {*left, *(id(x.node) for x in inputs)}
        for node, func in outside(outputs, self.functions):
            left.pop(id(node), None)
            if id(node) not in known and _lasts(node):
                call = self.functions[func]
                raise RecomputeError(
                    f"{call.label!r} reads a Variable in the second run that the region did not "
                    f"read in the first ({call.line}). Pass state that changes from call to call "
                    "as an argument"
                )
        for x in left.values():
            if _lasts(x.node):
                raise RecomputeError(
                    f"the second run of a checkpointed region does not read {_name(x)}, which "
                    "the first run read. Pass state that changes from call to call "
                    "as an argument"
                )


class _ThisThread(threading.local):
    """Thread-local flag: an outer run has moved the generator before the present function."""

    jumped = False


_local = _ThisThread()


def _real(function: Any) -> Any:
    """Return the object with a function's attributes; for old-style functions, behind an
    adapter.
    """
    return getattr(function, "_function", None) or function


def _lasts(node: Any) -> bool:
    """Tell whether a node from outside a region existed before it, as far as that is visible.

    A leaf may also be a constant that each run makes for itself.
    """
    return node.rank > 0 or isinstance(node.get_variable_or_none(), chainer.Parameter)


def _name(x: Any) -> str:
    return f"the parameter {x.name!r}" if isinstance(x, chainer.Parameter) else f"a {x.label}"
