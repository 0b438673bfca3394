"""A call that runs twice: its arguments, its results, and which of them are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple
from zlib import crc32

import chainer
import numpy as np
from chainer import variable

from umem.chainer.checkpointing.calls import outside
from umem.chainer.checkpointing.two_runs import FirstRun, SecondRun
from umem.errors import RecomputeCountError, RecomputeError, UnsupportedError

Result = Callable[[Sequence[Any]], Any]
"""Rebuilds a region's return value around the outputs of its node."""


class _Output(NamedTuple):
    """Placeholder in a result for one of the node's outputs, by number."""

    number: int


class Region:
    """A checkpointed call, with everything that its second run needs.

    ``inputs`` are the Variables among its arguments, each once, until the first run is over; then
    the node keeps their arrays. Parameters are not among them: they are captured.
    """

    def __init__(self, func: Callable[..., Any], xs: Any, kwargs: Any) -> None:
        self._func = func
        self.leaves, self._shape = flatten((xs, kwargs), _is_variable)
        _refuse_chainerx(self.leaves)
        unique = {id(leaf): leaf for leaf in self.leaves if _is_input(leaf)}
        numbers = {key: number for number, key in enumerate(unique)}
        self._numbers = {
            place: numbers[id(leaf)] for place, leaf in enumerate(self.leaves) if id(leaf) in unique
        }
        self.inputs: tuple[Any, ...] = tuple(unique.values())
        self._places: tuple[int, ...] = ()
        self._kinds: tuple[tuple[Any, Any], ...] = ()
        self._sums: tuple[int, ...] | None = None

    def run_first(self, first: FirstRun) -> tuple[Result, list[Any], list[Any]]:
        """Run the region; returns a function that rebuilds the result, the outputs with a graph,
        and captures.
        """
        self._first = first
        given = dict(zip(map(id, stand_ins := self._stand_ins()), self.inputs, strict=True))
        for place in self._numbers:
            self.leaves[place] = None
        with first:
            leaves, shape = self._call(stand_ins)
        captured = _captured(leaves, stand_ins, first)
        sources = (*self.inputs, *captured)
        places: dict[int, int] = {}
        if any(x.requires_grad for x in sources):
            places = _output_places(leaves, first)
        outputs = [leaves[place] for place in places.values()]
        self._remember(outputs, tuple(places.values()))
        marks = [_mark(leaf, given, list(places), first) for leaf in leaves]

        def result(made: Sequence[Any]) -> Any:
            return rebuild([made[m.number] if type(m) is _Output else m for m in marks], shape)

        return result, outputs, captured

    def run_again(
        self, inputs: Sequence[Any], captured: Sequence[Any]
    ) -> tuple[list[Any], Iterable[Any]]:
        """Run the region a second time; returns its outputs with their graph, and its functions."""
        first = self._first
        with SecondRun(first) as second, chainer.using_config("enable_backprop", True):
            leaves, _ = self._call(inputs)
        if not all(place < len(leaves) and _is_variable(leaves[place]) for place in self._places):
            raise RecomputeCountError(
                f"a checkpointed region returned other things in its second run: {leaves!r:.200}"
            )
        outputs = [leaves[place] for place in self._places]
        if first.checks:
            second.check_outputs(outputs, self._kinds)
            second.check_captured(outputs, inputs, captured)
            self._check_values(outputs)
        return outputs, second.functions

    def _stand_ins(self) -> tuple[Any, ...]:
        """Return Variables of the inputs' arrays, at which the first run's graph begins."""
        return tuple(map(detached, self.inputs))

    def _call(self, inputs: Sequence[Any]) -> tuple[list[Any], Shape]:
        leaves = list(self.leaves)
        for place, number in self._numbers.items():
            leaves[place] = inputs[number]
        args, kwargs = rebuild(leaves, self._shape)
        made = flatten(self._func(*args, **kwargs), _is_variable)
        _refuse_chainerx(made[0])
        return made

    def _remember(self, outputs: Sequence[Any], places: tuple[int, ...]) -> None:
        self._places = places
        self._kinds = tuple((y.shape, y.dtype) for y in outputs)
        self._sums = _sums(outputs) if chainer.is_debug() else None

    def _check_values(self, outputs: Sequence[Any]) -> None:
        if self._sums is not None and self._sums != _sums(outputs):
            raise RecomputeError(
                "the second run of a checkpointed region computed other values than the first: an "
                "array that it reads was changed in between, or it keeps state"
            )


def detached(x: Any) -> Any:
    """Make a Variable of the same array and rank without a creator."""
    alone = variable.Variable(x.array, name=x.name, requires_grad=x.requires_grad)
    # Backward orders functions by rank, which has no public setter.
    alone.node._rank = x.node.rank
    return alone


def _captured(leaves: Sequence[Any], inputs: Sequence[Any], first: FirstRun) -> list[Any]:
    """Return outside Variables that the results depend on, in order of use."""
    known = {id(x.node) for x in inputs}
    found: dict[int, Any] = {}
    variables = [leaf for leaf in leaves if _is_variable(leaf)]
    for node, _ in outside(variables, first.functions):
        held = node.get_variable_or_none()  # None: the region's own constant
        if held is not None and id(node) not in known:
            found.setdefault(id(node), held)
    return list(found.values())


def _output_places(leaves: Sequence[Any], first: FirstRun) -> dict[int, int]:
    """Map the id of each differentiable result to its place; a Variable may occur twice."""
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if _is_variable(leaf) and leaf.requires_grad and leaf.creator_node in first.functions:
            places.setdefault(id(leaf), place)
    return places


def _mark(leaf: Any, given: dict[int, Any], outputs: list[int], first: FirstRun) -> Any:
    """Replace a leaf of the result by a placeholder that holds nothing of the first run's graph."""
    if id(leaf) in given:
        return given[id(leaf)]
    if id(leaf) in outputs:
        return _Output(outputs.index(id(leaf)))
    if _is_variable(leaf) and leaf.creator_node in first.functions:
        return variable.Variable(leaf.array, name=leaf.name, requires_grad=False)
    return leaf


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, variable.Variable)


def _is_input(leaf: Any) -> bool:
    """Tell whether a Variable is an input; Parameters are not replaced, and may have no array
    yet.
    """
    return _is_variable(leaf) and not isinstance(leaf, variable.Parameter)


def _refuse_chainerx(leaves: Sequence[Any]) -> None:
    if any(_is_variable(leaf) and leaf._has_chainerx_array for leaf in leaves):
        raise UnsupportedError(
            "checkpoint does not work on ChainerX arrays: ChainerX keeps a graph of its own. "
            "Move the model and its inputs to NumPy or CuPy with to_device"
        )


def _sums(outputs: Sequence[Any]) -> tuple[int, ...]:
    arrays = (y.array for y in outputs)
    return tuple(crc32(np.ascontiguousarray(a).data) for a in arrays if type(a) is np.ndarray)


Shape = Any
"""The nesting of leaves; only this file knows its form."""


def flatten(value: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], Shape]:
    """Return the leaves of nested containers from left to right, and their nesting.

    Lists, tuples, named tuples and dicts of every kind are taken apart if they hold something
    wanted; any other object is a leaf, and stays the same object.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves, wanted)


def rebuild(leaves: list[Any], shape: Shape) -> Any:
    """Rebuild nested containers from leaves and a nesting of `flatten`."""
    return _put_together(iter(leaves), shape)


def _take_apart(value: Any, leaves: list[Any], wanted: Callable[[Any], bool]) -> Shape:
    """Append the leaves of ``value`` to a list; returns the nesting, None for a leaf."""
    start = len(leaves)
    shape: Shape = None
    if type(value) in (list, tuple):
        shape = type(value), [_take_apart(item, leaves, wanted) for item in value]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Any = type(value)
        shape = make._make, [_take_apart(item, leaves, wanted) for item in value]
    elif isinstance(value, dict):
        empty = copy(value)  # an OrderedDict stays one, a defaultdict keeps its factory
        empty.clear()
        shapes = [_take_apart(item, leaves, wanted) for item in value.values()]
        shape = empty, list(value), shapes
    if shape is not None and any(map(wanted, leaves[start:])):
        return shape
    leaves[start:] = [value]
    return None


def _put_together(leaves: Iterator[Any], shape: Shape) -> Any:
    """Rebuild a value from the next leaves and its nesting."""
    if shape is None:
        return next(leaves)
    if isinstance(shape[0], dict):
        empty, keys, shapes = shape
        made = copy(empty)
        for key, inner in zip(keys, shapes, strict=True):
            made[key] = _put_together(leaves, inner)
        return made
    make, shapes = shape
    return make([_put_together(leaves, inner) for inner in shapes])
