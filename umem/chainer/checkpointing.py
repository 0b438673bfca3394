"""Recomputation by hand: keep a region's inputs, run it again for its backward pass.

The idea is Chainer's ``F.forget``, after Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (arXiv 1604.06174). What differs: the parameters and variables that a region captures are
inputs of its node, so that loss scaling, accumulation, ``chainer.grad`` and second derivatives
treat them like any other; random numbers are drawn again as they were; running statistics are
updated once; arguments and results may be anything; the second run is checked against the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import chainer
from chainer import function_node, variable

from umem.chainer.nesting import Shape, flatten, rebuild
from umem.chainer.rerun import FirstRun, SecondRun
from umem.errors import StateError

_OUTPUT = object()
"""Stands where a result has a Variable."""


def checkpoint(
    func: Callable[..., Any],
    *xs: Any,
    preserve_rng_state: bool = True,
    determinism_check: bool = True,
    **kwargs: Any,
) -> Any:
    """Call ``func(*xs, **kwargs)`` and keep its inputs instead of what it computes on the way.

    Backward runs it a second time. Nests; second derivatives work where the functions inside
    have them.

    Args:
        func: any callable; what it captures may need gradients too.
        xs, kwargs: Variables, arrays, None, anything, also nested in lists, tuples and dicts.
            Variables get gradients.
        preserve_rng_state: draw the same random numbers in the second run (dropout). On CuPy the
            region draws from a generator of its own, seeded from the current one.
        determinism_check: compare the functions of the second run with those of the first.

    Returns:
        what ``func`` returns.

    Raises:
        RecomputeCountError, RecomputeShapeError, RecomputeDtypeError: in backward, where the
            second run differs; they name the function and the line. No gradient was set.
        whatever ``func`` raises, in either run.

    Cost: one more forward run of the region. Memory: its inputs between forward and backward.
    Gradients are those of a plain run bit for bit, except where a parameter is used more than
    once both inside a region and outside: the sum is then taken in another order.

    >>> import numpy as np, umem.chainer, chainer.functions as F
    >>> x = chainer.Variable(np.ones((2, 3), "float32"))
    >>> umem.chainer.checkpoint(lambda x: F.tanh(x) * 2, x).shape
    (2, 3)
    """
    if not callable(func):
        raise TypeError(f"checkpoint needs something to call; got {type(func).__name__}")
    if not chainer.config.enable_backprop:
        return func(*xs, **kwargs)
    leaves, shape = flatten((xs, kwargs))
    first = FirstRun(preserve_rng_state, determinism_check)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, variable.Variable)]
    inputs = [leaves[i] for i in positions]
    region = _Region(func, leaves, shape, positions, first)
    outputs, result, captured = region.run_first()
    if not any(v.requires_grad for v in (*inputs, *captured)):
        return result(outputs)
    node = Checkpoint(region, captured, outputs)
    return result(node.apply((*inputs, *captured)))


def checkpointed(func: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint` as a decorator; the options are passed at the call."""

    @wraps(func)
    def call(*xs: Any, **kwargs: Any) -> Any:
        return checkpoint(func, *xs, **kwargs)

    return call


def checkpoint_sequential(
    funcs: Sequence[Callable[..., Any]], x: Any, segments: int | None = None
) -> Any:
    """Run ``funcs`` one after another, checkpointed in segments of about equal length.

    Args:
        funcs: callables, a ``chainer.Sequential`` or a ``ChainList``; each gets what the one
            before returned.
        x: the first one's argument.
        segments: how many; None is about the square root of their number (Chen et al. 2016).

    Raises:
        StateError: there is nothing to run, or ``segments`` is not between 1 and their number.
    """
    steps = list(funcs)
    count = max(1, round(len(steps) ** 0.5)) if segments is None else segments
    if not steps or isinstance(count, bool) or not isinstance(count, int):
        raise StateError("checkpoint_sequential needs functions, and a whole number of segments")
    if not 1 <= count <= len(steps):
        raise StateError(f"segments must be between 1 and {len(steps)}; got {segments}")
    bounds = [index * len(steps) // count for index in range(count + 1)]
    for low, high in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
        x = checkpoint(_Chain(steps[low:high]), x)
    return x


class _Chain:
    """Functions one after another."""

    def __init__(self, steps: list[Callable[..., Any]]) -> None:
        self._steps = steps

    def __call__(self, x: Any) -> Any:
        for step in self._steps:
            x = step(x)
        return x


class _Region:
    """A call, and how to make it again."""

    def __init__(
        self, func: Callable[..., Any], leaves: list[Any], shape: Shape, positions: list[int],
        first: FirstRun,
    ) -> None:  # fmt: skip
        # The Variables themselves are not held: their arrays are the node's inputs.
        gaps = set(positions)
        self._func = func
        self._rest = [None if i in gaps else leaf for i, leaf in enumerate(leaves)]
        self._shape, self._positions = shape, positions
        self._first = first
        self._inputs: list[Any] | None = [leaves[i] for i in positions]

    def run_first(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any], list[Any]]:
        """Returns the output Variables, how to put them into the result, and what is captured."""
        assert self._inputs is not None
        inputs = [_detached(x.array, x.requires_grad) for x in self._inputs]
        self._inputs = None
        with self._first:
            outputs, shape, rest = self._call(inputs)
        captured = self._first.captured(outputs, inputs)

        def result(made: Sequence[Any]) -> Any:
            variables = iter(made)
            return rebuild([next(variables) if leaf is _OUTPUT else leaf for leaf in rest], shape)

        return outputs, result, captured

    def run_again(self, inputs: Sequence[Any]) -> list[Any]:
        """The output Variables of the second run, its graph behind them."""
        with SecondRun(self._first), _force_backprop():
            outputs, _, _ = self._call(inputs)
            nodes = {id(x.node) for x in inputs}
            return [chainer.functions.identity(y) if id(y.node) in nodes else y for y in outputs]

    def _call(self, inputs: Sequence[Any]) -> tuple[list[Any], Shape, list[Any]]:
        leaves = list(self._rest)
        for position, x in zip(self._positions, inputs, strict=True):
            leaves[position] = x
        args, kwargs = rebuild(leaves, self._shape)
        made, shape = flatten(self._func(*args, **kwargs))
        outputs = [leaf for leaf in made if isinstance(leaf, variable.Variable)]
        rest = [_OUTPUT if isinstance(leaf, variable.Variable) else leaf for leaf in made]
        return outputs, shape, rest


class Checkpoint(function_node.FunctionNode):
    """The node of a region in the outer graph: its inputs, then what it captures."""

    def __init__(self, region: _Region, captured: list[Any], outputs: list[Any]) -> None:
        self._region = region
        self._captured = captured
        self._made: list[Any] | None = [y.array for y in outputs]

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hand out what the first run made, and let its graph go."""
        self.retain_inputs(tuple(range(len(inputs) - len(self._captured))))
        made, self._made = self._made, None
        assert made is not None
        return tuple(made)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the region again and differentiate it."""
        double = bool(chainer.config.enable_backprop)
        retained = self.get_retained_inputs()
        inputs = (
            list(retained) if double else [_detached(x.array, x.requires_grad) for x in retained]
        )
        sources = [*inputs, *self._captured]
        with _Cut(sources):
            outputs = self._region.run_again(inputs)
            wanted = [i for i in indexes if sources[i].requires_grad]
            pairs = [
                (y, gy) for y, gy in zip(outputs, grad_outputs, strict=True)
                if gy is not None and y.requires_grad
            ]  # fmt: skip
            if not pairs or not wanted:
                return (None,) * len(indexes)
            grads = chainer.grad(
                [y for y, _ in pairs], [sources[i] for i in wanted], [gy for _, gy in pairs],
                enable_double_backprop=double,
            )  # fmt: skip
        found = dict(zip(wanted, grads, strict=True))
        return tuple(found.get(i) for i in indexes)


class _Cut:
    """For a moment the nodes of a region's inputs have no creators: differentiation stops there."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._nodes = list({id(x.node): x.node for x in sources}.values())
        self._creators: list[Any] = []

    def __enter__(self) -> None:
        self._creators = [node._creator_node for node in self._nodes]
        for node in self._nodes:
            node._creator_node = None

    def __exit__(self, *exception: Any) -> None:
        for node, creator in zip(self._nodes, self._creators, strict=True):
            node._creator_node = creator


def _force_backprop() -> Any:
    """Backward runs with backprop off; the second run needs a graph."""
    return chainer.using_config("enable_backprop", True)


def _detached(array: Any, requires_grad: bool) -> Any:
    return variable.Variable(array, requires_grad=requires_grad)
