"""Recomputation by hand: keep a region's inputs, run it again for its backward pass.

The idea is Chainer's ``F.forget``, after Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (arXiv 1604.06174). It differs in five ways. The parameters and variables that a region
captures are inputs of its node, so that loss scaling, accumulation, ``chainer.grad`` and second
derivatives treat them like any other. The second run draws the same random numbers. Running
statistics are updated once. Arguments and results may be anything. The second run is checked
against the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import sqrt
from typing import Any

import chainer
from chainer import function_node

from umem.chainer.checkpointing.calls import seal
from umem.chainer.checkpointing.region import Region, detached
from umem.chainer.checkpointing.region_state import RandomState
from umem.chainer.checkpointing.two_runs import FirstRun
from umem.errors import SizeError, UnsupportedError


def checkpoint(
    func: Callable[..., Any],
    *xs: Any,
    preserve_rng_state: bool = True,
    determinism_check: bool = True,
    **kwargs: Any,
) -> Any:
    """Call ``func(*xs, **kwargs)``, keep its inputs, and recompute its saved tensors in backward.

    Backward calls ``func`` a second time. Calls may be nested. Second derivatives work if the
    functions inside have them.

    Args:
        func: any callable; variables that it captures may need gradients too. Both runs must do
            the same: pass state that changes from call to call (of a stateful LSTM, say) as an
            argument, and return whatever you need afterwards.
        *xs: Variables, arrays, None or any object, also nested in lists, tuples and dicts.
            Variables get gradients.
        **kwargs: the same, by name.
        preserve_rng_state: draw the same random numbers in the second run (dropout). On CuPy the
            region has its own generator, seeded from the current one.
        determinism_check: compare the functions, shapes, types, captured variables and random
            numbers of both runs; in Chainer's debug mode, on NumPy, also the values of the results.

    Returns:
        The result of ``func``.

    Raises:
        RecomputeCountError, RecomputeShapeError, RecomputeDtypeError: in backward, if the second
            run differs; they name the function and the line. `RecomputeError`: it reads other
            variables or random numbers. The region has set no gradient.
        StateError: in backward, if it passes through a Variable of the region that was not
            returned.
        UnsupportedError: an argument or a result is a ChainerX array, or ``static_graph`` is
            running.

    Exceptions of ``func``, in either run, propagate.

    Cost: one more forward run of the region. Memory: its inputs, between forward and backward.
    Gradients equal a plain run's bit for bit if regions follow one another. If a Variable is used
    more than twice, in a region and in branches beside it, or under ``lazy_grad_sum``, its gradient
    is summed in another order and may differ by rounding.

    >>> import numpy as np, umem.chainer, chainer.functions as F
    >>> x = chainer.Variable(np.ones((2, 3), "float32"))
    >>> umem.chainer.checkpoint(lambda x: F.tanh(x) * 2, x).shape
    (2, 3)
    """
    _check_callable(func, "checkpoint")
    if not chainer.config.enable_backprop:
        return func(*xs, **kwargs)
    if chainer.config.schedule_func is not None:
        raise UnsupportedError("checkpoint does not work inside a static_graph: it runs once")
    region = Region(func, xs, kwargs)
    random = RandomState(region.leaves) if preserve_rng_state else None
    first = FirstRun(random, determinism_check)
    result, outputs, captured = region.run_first(first)
    sources = (*region.inputs, *captured)
    made = _outer(Checkpoint(region, captured, outputs), sources, outputs)
    region.inputs = ()
    del outputs
    seal(first.functions)
    return result(made)


def checkpointed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function run under `checkpoint`; pass options at the call."""
    _check_callable(func, "checkpointed")

    @wraps(func)
    def call(*xs: Any, **kwargs: Any) -> Any:
        return checkpoint(func, *xs, **kwargs)

    return call


def checkpoint_sequential(
    funcs: Iterable[Callable[..., Any]], x: Any, segments: int | None = None
) -> Any:
    """Run ``funcs`` one after another, checkpointed in segments of about equal length.

    Args:
        funcs: callables, a ``chainer.Sequential`` or a ``ChainList``. Each gets the result of the
            one before; a tuple becomes its arguments, as in ``chainer.Sequential``.
        x: the argument of the first.
        segments: the number of segments; None: about the square root of the number of callables
            (Chen et al. 2016).

    Raises:
        SizeError: ``funcs`` is empty, or ``segments`` is not between 1 and their number.
    """
    steps = list(funcs)
    for step in steps:
        _check_callable(step, "checkpoint_sequential")
    if not steps:
        raise SizeError("checkpoint_sequential needs at least one function")
    count = _segment_count(segments, len(steps))
    bounds = [index * len(steps) // count for index in range(count + 1)]
    for low, high in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
        x = checkpoint(_Sequence(steps[low:high]), x)
    return x


def _segment_count(segments: Any, steps: int) -> int:
    if segments is None:
        return max(1, round(sqrt(steps)))
    whole = hasattr(segments, "__index__") and not isinstance(segments, bool)
    if not whole or not 1 <= segments <= steps:
        raise SizeError(f"segments must be a whole number from 1 to {steps}; got {segments!r}")
    return int(segments)


class _Sequence:
    """A composition of functions."""

    def __init__(self, steps: list[Callable[..., Any]]) -> None:
        self._steps = steps

    def __call__(self, x: Any) -> Any:
        for step in self._steps:
            x = step(*x) if isinstance(x, tuple) else step(x)
        return x


class Checkpoint(function_node.FunctionNode):
    """The function node of a region: its inputs, then the variables it captures."""

    def __init__(self, region: Region, captured: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._region = region
        self._captured = tuple(captured)
        self._made: Any = tuple(y.array for y in outputs)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arrays that the first run computed, and drop its graph."""
        self.retain_inputs(tuple(range(len(inputs) - len(self._captured))))
        made, self._made = self._made, None
        return tuple(made)

    def backward_accumulate(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...], grad_inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Rerun the region, run backward through it, and add to the given gradients.

        Adding here, and not afterwards, keeps the order of a plain run's sum.
        """
        if all(gy is None for gy in grad_outputs):
            return grad_inputs
        double = bool(chainer.config.enable_backprop)
        inputs = self.get_retained_inputs()
        if not double:
            inputs = tuple(map(detached, inputs))
        sources = (*inputs, *self._captured)
        with _Cut(sources):
            outputs, functions = self._region.run_again(inputs, self._captured)
            pairs = [(y, gy) for y, gy in zip(outputs, grad_outputs, strict=True) if gy is not None]
            grads = chainer.grad(
                [y for y, _ in pairs],
                [sources[i] for i in indexes],
                [gy for _, gy in pairs],
                grad_inputs,
                enable_double_backprop=double,
            )
        if not double:  # otherwise the graph of the second run is part of the outer one
            del outputs, pairs
            seal(functions)
        return tuple(grads)


class _Cut:
    """Removes the creators of a region's inputs in a block, so that backward stops there."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._nodes = list({id(x.node): x.node for x in sources}.values())
        self._creators: list[Any] = []

    def __enter__(self) -> None:
        # By the private attribute: the property's setter would also set the node's rank.
        self._creators = [node._creator_node for node in self._nodes]
        for node in self._nodes:
            node._creator_node = None

    def __exit__(self, *exception: Any) -> None:
        for node, creator in zip(self._nodes, self._creators, strict=True):
            node._creator_node = creator


def _outer(node: Checkpoint, sources: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Apply the region's node with the rank that the region has in a plain run."""
    if not outputs:
        return ()
    rank = max(y.node.rank for y in outputs) - 1  # a plan changes the ranks of functions only
    made: tuple[Any, ...] = node.apply(sources)
    call = getattr(node, "_umem_call", None)
    if call is None or node.rank == call.plain_rank:  # otherwise a plan has set its rank
        node.rank = rank
    if call is not None:
        call.plain_rank = rank
    for y in made:
        # Backward orders functions by rank, which has no public setter.
        y.node._rank = rank + 1
    return made


def _check_callable(func: Any, caller: str) -> None:
    if not callable(func):
        raise TypeError(f"{caller} needs something to call; got {type(func).__name__}")
