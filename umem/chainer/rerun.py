"""What has to hold when a region runs a second time: random numbers, configuration, statistics."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import function_hook

import umem
from umem.errors import RecomputeCountError, RecomputeDtypeError, RecomputeShapeError

_CONFIG = (
    "train", "dtype", "use_cudnn", "autotune", "cudnn_deterministic", "cudnn_fast",
    "use_cudnn_tensor_core", "use_ideep", "compute_mode", "type_check",
)  # fmt: skip
_STATISTICS = ("running_mean", "running_var")
_numbers = count()
_INSIDE = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (chainer, umem))


class Call(NamedTuple):
    """One function of a region, as the check compares it."""

    label: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def call_of(func: Any, in_data: Sequence[Any]) -> Call:
    """The call of a function on these arrays."""
    shapes = tuple(x.shape for x in in_data if x is not None)
    return Call(func.label, shapes, tuple(x.dtype.name for x in in_data if x is not None))


class _Hook(function_hook.FunctionHook):  # type: ignore[misc, unused-ignore]
    """A hook under a name of its own, so that regions nest."""

    def __init__(self) -> None:
        self.name = f"umem.rerun-{next(_numbers)}"


class FirstRun(_Hook):
    """Runs a region with a graph, and remembers what the second run needs.

    The graph tells which variables the region captures; it is dropped with the outputs.
    """

    def __init__(self, preserve_rng_state: bool, determinism_check: bool) -> None:
        super().__init__()
        self.checks = determinism_check
        self.calls: list[Call] = []
        known = (key for key in _CONFIG if hasattr(chainer.config, key))
        self.config = {key: getattr(chainer.config, key) for key in known}
        self.random = RandomState() if preserve_rng_state else None
        self._functions: set[Any] = set()
        self._stack = ExitStack()

    def __enter__(self) -> FirstRun:
        stack = ExitStack()
        with stack:
            stack.enter_context(chainer.using_config("_will_recompute", True))
            if self.random is not None:
                stack.enter_context(self.random.first())
            super().__enter__()
            stack.callback(super().__exit__)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Remember the function, weakly held by nobody: the set goes with `captured`."""
        self._functions.add(function)
        if self.checks:
            self.calls.append(call_of(function, in_data))

    def captured(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The variables from outside that the outputs depend on, in order of their use."""
        known = {id(x.node) for x in inputs}
        found: dict[int, Any] = {}
        functions = [y.creator_node for y in outputs if y.creator_node in self._functions]
        seen = set(functions)
        while functions:
            for node in functions.pop().inputs:
                creator = node.creator_node
                if creator in self._functions:
                    if creator not in seen:
                        seen.add(creator)
                        functions.append(creator)
                elif node.requires_grad and id(node) not in known:
                    held = node.get_variable_or_none()
                    if held is not None:
                        found.setdefault(id(node), held)
        self._functions = set()
        return list(found.values())


class SecondRun(_Hook):
    """Runs a region again as it was, and checks that it is the same."""

    def __init__(self, first: FirstRun) -> None:
        super().__init__()
        self._first = first
        self._done = 0
        self._statistics: list[tuple[Any, str, Any, Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> SecondRun:
        stack = ExitStack()
        with stack:
            for key, value in self._first.config.items():
                stack.enter_context(chainer.using_config(key, value))
            stack.enter_context(chainer.using_config("in_recomputing", True))
            if self._first.random is not None:
                stack.enter_context(self._first.random.again())
            super().__enter__()
            stack.callback(super().__exit__)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self._stack.close()
        if kind is None and self._first.checks and self._done < len(self._first.calls):
            missing = self._first.calls[self._done]
            raise RecomputeCountError(
                f"the second run made {self._done} functions and the first "
                f"{len(self._first.calls)}: {missing.label!r} is missing. A checkpointed region "
                "must do the same every time"
            )

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Check the function, and put its running statistics aside: they are updated once."""
        if self._first.checks:
            self._check(call_of(function, in_data))
        self._done += 1
        for name in _STATISTICS:
            value: Any = getattr(function, name, None)
            if hasattr(value, "copy"):
                self._statistics.append((function, name, value, value.copy()))

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        """Put the running statistics back."""
        while self._statistics and self._statistics[-1][0] is function:
            _, name, value, before = self._statistics.pop()
            value[...] = before
            setattr(function, name, value)

    def _check(self, call: Call) -> None:
        if self._done >= len(self._first.calls):
            raise RecomputeCountError(
                f"the second run has a function more than the first: {call.label!r}{_where()}"
            )
        before = self._first.calls[self._done]
        if call.label != before.label:
            raise RecomputeCountError(
                f"function {self._done + 1} was {before.label!r} in the first run and is "
                f"{call.label!r} in the second{_where()}"
            )
        if call.shapes != before.shapes:
            raise RecomputeShapeError(
                f"{call.label!r} had inputs of shapes {before.shapes} in the first run and "
                f"{call.shapes} in the second{_where()}"
            )
        if call.dtypes != before.dtypes:
            raise RecomputeDtypeError(
                f"{call.label!r} had inputs of types {before.dtypes} in the first run and "
                f"{call.dtypes} in the second{_where()}"
            )


def _where() -> str:
    """The line outside Chainer and umem that applies the function now."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_INSIDE):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


class RandomState:
    """The random numbers that a region draws, to be drawn again.

    NumPy's global generator is set back and forth. CuPy's cannot be copied, so the region draws
    from a new one each time, with a seed that the current one gave.
    """

    def __init__(self) -> None:
        self._numpy = np.random.get_state()
        self._cupy = _cupy_random()
        self._seed = None if self._cupy is None else int(np.random.randint(2**31))
        if self._cupy is not None:
            self._numpy = np.random.get_state()

    def first(self) -> Any:
        """Context of the first run: NumPy's generator goes on as without a checkpoint."""
        return self._own_cupy(ExitStack())

    def again(self) -> Any:
        """Context of the second run: nothing outside sees that numbers were drawn."""
        stack = ExitStack()
        now = np.random.get_state()
        stack.callback(lambda: np.random.set_state(now))
        np.random.set_state(self._numpy)
        return self._own_cupy(stack)

    def _own_cupy(self, stack: ExitStack) -> ExitStack:
        if self._cupy is not None:
            module = self._cupy
            before = module.get_random_state()
            stack.callback(lambda: module.set_random_state(before))
            module.set_random_state(module.RandomState(self._seed))
        return stack


def _cupy_random() -> Any:
    if "cupy" not in sys.modules or not chainer.backends.cuda.available:
        return None
    return sys.modules["cupy"].random
