"""The terms of a loss and their divisors, read from its tape.

A loss is taken apart where it is a sum of scalars times numbers; scalars may be stacked on the way.
Each term ends in a mean, in a sum, or in a loss function of Chainer's, whose node says what it has
counted. `PLAIN` and `COUNTS` are the table; a function that is in neither stands between the loss
and its sum. Numbers and means on the way are marks: whether one depends on the samples is not on
the tape (see `umem.chainer.accumulation.divisor_roles`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan, prod
from typing import Any, NamedTuple

import numpy as np
from chainer.functions.array import (
    broadcast,
    cast,
    concat,
    expand_dims,
    reshape,
    squeeze,
    stack,
)  # fmt: skip
from chainer.functions.array import transpose as transposing
from chainer.functions.math import average, basic_math, identity
from chainer.functions.math import sum as summing

from umem.chainer.accumulation.call_sites import CallSite, CallSites, Key
from umem.chainer.accumulation.loss_counts import COUNTS, valid_labels
from umem.chainer.function_facts import owner_of


class Scaling(NamedTuple):
    """A constant that multiplies a loss, or a mean over some elements.

    Attributes:
        values: the numbers; of a mean, one over its elements.
        is_mean: it is a mean.
        of_first: it is a mean over the first axis, and perhaps others.
        site: where it is.
    """

    values: tuple[float, ...]
    is_mean: bool
    of_first: bool
    site: CallSite

    @property
    def key(self) -> Key:
        """Return what identifies it in every part of a batch."""
        return self.site.key

    def __str__(self) -> str:
        told = "divided by " if self.site.is_division else "multiplied by "
        numbers = [1 / v if self.site.is_division and v else v for v in self.values[:3]]
        told += ", ".join(f"{number:.6g}" for number in numbers)
        return f"{told}{', ...' if len(self.values) > 3 else ''} at {self.site.place}"


class Term(NamedTuple):
    """A summand of a loss, from its scalar down to the sum or mean over samples.

    Attributes:
        node: the scalar in which it ends.
        factor: the derivative of the loss by that scalar.
        marks: the numbers and means between the loss and what is added up.
        counted: by what a function of Chainer's has divided; None for a sum.
        are_labels: the count is of labels, which add up whatever they are.
        is_opaque: a function that umem does not know stands before the sum.
        site: where it is.
        lag: how far ahead of it in its loop its input was made; see `_lag`.
    """

    node: Any
    factor: float
    marks: tuple[Scaling, ...]
    counted: float | None
    are_labels: bool
    is_opaque: bool
    site: CallSite
    lag: int | None

    @property
    def key(self) -> Key:
        """Return what identifies it in every part of a batch."""
        return self.site.key

    def __str__(self) -> str:
        return f"'{_label(self.node)}' at {self.site.place}"

    def value(self) -> float | None:
        """Return its value if its variable is alive, otherwise None."""
        y = self.node.get_variable_or_none()
        return None if y is None else float(y.array.sum())


# -- the table -------------------------------------------------------------------------------------

_SUMS = (summing.Sum, summing.SumTo, average.Mean)
_SIGNS: dict[type, tuple[int, ...]] = {
    basic_math.Add: (1, 1),
    basic_math.Sub: (1, -1),
    basic_math.AddConstant: (1,),
    basic_math.SubFromConstant: (-1,),
    basic_math.Neg: (-1,),
}
_SHAPES = (reshape.Reshape, squeeze.Squeeze, expand_dims.ExpandDims, cast.Cast, identity.Identity)
PLAIN = (
    *_SHAPES, transposing.Transpose, broadcast.BroadcastTo, basic_math.Neg, basic_math.AddConstant,
    basic_math.SubFromConstant,
)  # fmt: skip
"""Functions of one array that leave the divisor as it is."""
_NUMBERS = (basic_math.Mul, basic_math.Div, basic_math.MulConstant)
_JOINS = (stack.Stack, concat.Concat)
MOST_BELOW = 12
"""At most this many functions below a term are searched for an earlier time step."""

# -- the walk --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A node on the way from the loss to its inputs, and what was passed on the way.

    Attributes:
        factors: the derivative of the loss by it, in its shape.
        marks: the divisors on the way.
    """

    node: Any
    factors: Any
    marks: tuple[Scaling, ...]

    def at(self, node: Any, factors: Any) -> _Place:
        return _Place(node, np.broadcast_to(factors, node.shape), self.marks)

    def marked(self, site: CallSite, numbers: Any, *mean: bool) -> _Place:
        values = tuple(nan if number != number else float(number) for number in np.ravel(numbers))
        mark = Scaling(values, bool(mean), any(mean), site)
        return self._replace(marks=(*self.marks, mark))


class _TermEnd(NamedTuple):
    place: _Place
    counted: float | None = None
    are_labels: bool = False
    is_opaque: bool = False


class TapeReader:
    """Decomposes losses into terms by walking the tape.

    Args:
        sites: where their functions were called.
        is_count: whether a mean of stacked scalars depends on the samples, by the kind of its site:
            then the mean is the end of a term.
    """

    def __init__(
        self, sites: CallSites, is_count: Callable[[str], bool] = lambda kind: False
    ) -> None:
        self._sites, self._is_count = sites, is_count

    def terms(self, loss: Any) -> tuple[Term, ...]:
        """Decompose the loss at a node or variable into terms, in the program's order.

        Cost: the functions from the loss to its sums. A count of labels on a GPU waits for it.
        """
        node = getattr(loss, "node", loss)
        todo, ends = [_Place(node, np.ones(node.shape), ())], []
        while todo:
            place = todo.pop()
            if not place.node.requires_grad:
                continue
            below = None if place.node.creator_node is None else self._below(place)
            if below is None:
                ends.append(self._end(place))
            else:
                todo += reversed(below)
        return tuple(map(self._term, ends))

    def _term(self, end: _TermEnd) -> Term:
        place, site = end.place, self._sites.of(end.place.node.creator_node)
        factor = float(np.ravel(place.factors)[0])
        return Term(place.node, factor, place.marks, *end[1:], site, self._lag(place.node))

    def _lag(self, node: Any) -> int | None:
        """Return the time step of a term's input relative to the term's own; None outside of loops.

        The third time step's term has an input from the third call of a layer, which is 0, or from
        the call before, which is -1. In a loop that runs backwards, or skips steps, it is another
        number, which depends on the samples.
        """
        passed = self._sites.of(node.creator_node).passed
        for _ in range(MOST_BELOW):
            func = node.creator_node
            if func is None:
                break
            if (mine := self._sites.of(func).passed) != passed:
                return mine - passed
            node = next((x for x in func.inputs if x.creator_node is not None), func.inputs[0])
        return None

    # -- down to the terms ----------------------------------------------------------------------

    def _below(self, place: _Place) -> list[_Place] | None:
        """Return the summands of a node; None if the walk ends here."""
        func, factors = place.node.creator_node, place.factors
        kind, inputs = type(func), func.inputs
        if self._sites.of(func).divisor is not None:
            return None
        if kind is basic_math.MultiAdd and all(x.shape == place.node.shape for x in inputs):
            return [place.at(x, factors) for x in inputs]
        if kind in _SIGNS and all(x.shape == place.node.shape for x in inputs):
            return [place.at(x, s * factors) for x, s in zip(inputs, _SIGNS[kind], strict=True)]
        if kind in _NUMBERS:
            scaled = _scaled(func)
            if scaled is None or scaled[0].shape != place.node.shape:
                return None
            variable, numbers = scaled
            below = place.at(variable, factors * numbers)
            site = self._sites.of(func)
            return [below if site.is_chainers else below.marked(site, numbers)]
        if kind in _SHAPES:
            return [place.at(inputs[0], factors.reshape(inputs[0].shape))]
        if kind is broadcast.BroadcastTo and prod(inputs[0].shape) == 1:
            return [place.at(inputs[0], factors.sum())]
        if kind in _JOINS:
            return self._joined(place, func)
        if kind in _SUMS and prod(place.node.shape) == 1 and _is_join(inputs[0]):
            factor = float(np.ravel(factors)[0])
            if kind is not average.Mean:
                return [place.at(inputs[0], factor)]
            if self._is_count(self._sites.of(func).kind):
                return None
            share = 1 / prod(inputs[0].shape)
            return [place.at(inputs[0], factor * share).marked(self._sites.of(func), share, True)]
        return None

    def _joined(self, place: _Place, func: Any) -> list[_Place] | None:
        if prod(place.node.shape) > 1 and any(prod(x.shape) != 1 for x in func.inputs):
            return None
        factors = np.ravel(place.factors)
        return [place.at(x, f) for x, f in zip(func.inputs, factors, strict=True)]

    # -- from the end of a term -----------------------------------------------------------------

    def _end(self, place: _Place) -> _TermEnd:
        """Classify the function that ends a term: a known loss, a sum, or an unknown function."""
        node = place.node.creator_node
        if node is None:
            return _TermEnd(place)
        if (count := self._sites.of(node).divisor) is not None:
            return _TermEnd(place, count)
        func = owner_of(node)
        if type(func) in COUNTS:
            are_labels = COUNTS[type(func)] is valid_labels and func.normalize
            are_labels = are_labels and not getattr(func, "soft_target", False)
            return _TermEnd(place, COUNTS[type(func)](func, node), are_labels)
        if type(node) not in _SUMS:
            return _TermEnd(place, is_opaque=True)
        return self._through_arrays(place)

    def _through_arrays(self, place: _Place) -> _TermEnd:
        """Follow a sum through linear functions of arrays, to find what it was divided by."""
        node, count = place.node, None
        found = place
        while (func := node.creator_node) is not None:
            kind, owner, site = type(func), owner_of(func), self._sites.of(func)
            if kind is average.Mean:
                shape = func.inputs[0].shape
                of = prod(shape if func.axis is None else (shape[axis] for axis in func.axis))
                of_first = func.axis is None or 0 in func.axis
                found = found.marked(site, 1 / of if of else inf, of_first)
                node = func.inputs[0]
            elif kind in _SUMS or kind in PLAIN:
                node = func.inputs[0]
            elif type(owner) in COUNTS:  # None where it has not reduced: no divisor
                count = COUNTS[type(owner)](owner, func) if count is None else count
                break
            elif kind in _NUMBERS:
                if site.divisor is not None:
                    count = site.divisor
                if (scaled := _scaled(func, of_arrays=True)) is None:
                    break
                node, numbers = scaled
                if numbers is not None and site.divisor is None and not site.is_chainers:
                    found = found.marked(site, numbers)
            else:
                break
        return _TermEnd(found, count)


def _scaled(func: Any, *, of_arrays: bool = False) -> tuple[Any, Any] | None:
    """Return a product's variable factor and its constant one; None if both are variables.

    Of arrays the numbers are None where they differ.
    """
    if type(func) is basic_math.MulConstant:
        return func.inputs[0], float(func.value)
    a, b = func.inputs
    is_division = type(func) is basic_math.Div
    if (a.requires_grad and b.requires_grad) or (is_division and b.requires_grad):
        return None
    variable, other = (a, b) if a.requires_grad else (b, a)
    array = other.data
    if array is None or not array.size:
        return (variable, None) if of_arrays else None
    if of_arrays:
        if array.ndim and any(array.strides):
            return variable, None
        array = array[(0,) * array.ndim]
    numbers = np.asarray([float(number) for number in array.ravel()]).reshape(array.shape)
    if not is_division:
        return variable, numbers
    with np.errstate(divide="ignore"):
        return variable, 1.0 / numbers


def _is_join(node: Any) -> bool:
    """Tell whether an array was made by stacking scalars, perhaps scaled."""
    while (func := node.creator_node) is not None:
        if type(func) in _JOINS:
            return all(prod(x.shape) == 1 for x in func.inputs)
        if type(func) in _NUMBERS:
            scaled = _scaled(func, of_arrays=True)
            if scaled is None or scaled[0].shape != node.shape:
                return False
            node = scaled[0]
        elif type(func) in (*_SHAPES, *_SIGNS) and len(func.inputs) == 1:
            node = func.inputs[0]
        else:
            return False
    return False


def _label(node: Any) -> str:
    func = node.creator_node
    return "a parameter" if func is None else str(func.label)
