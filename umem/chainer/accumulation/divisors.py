"""By what a loss was divided, read from its tape: its terms, and the count behind each mean.

A loss is taken apart where it is a sum of scalars times numbers. Each term ends in a mean, in a
sum, or in a loss function of Chainer's, whose node says what it has counted. `PLAIN` and `COUNTS`
are the table; a function that is in neither stands between the loss and its sum, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from chainer.functions.array import (
    broadcast,
    cast,
    concat,
    expand_dims,
    get_item,
    reshape,
    squeeze,
    stack,
)  # fmt: skip
from chainer.functions.array import transpose as transposing
from chainer.functions.loss import (
    contrastive,
    ctc,
    hinge,
    mean_absolute_error,
    mean_squared_error,
    negative_sampling,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    triplet,
)
from chainer.functions.math import average, basic_math, identity
from chainer.functions.math import sum as summing

from umem.chainer.function_facts import is_array, owner_of
from umem.errors import AccumulationError

ASK = (
    "pass weight=, a function of the loss function's arguments that says by how much the loss of "
    "those was divided, as weight=lambda x, t: len(x)"
)


class Term(NamedTuple):
    """A part of a loss.

    Attributes:
        node: the scalar in which it ends.
        factor: the derivative of the loss by that scalar.
        numbers: those by which the program has multiplied, each perhaps one over a count.
        divisor: by what a mean has divided; None for a sum.
        is_constant: it depends on parameters alone, and on no batch.
        others: shapes of what it was made of beside parameters.
        was: its value, where the tape was let go.
        are_labels: the divisor counts labels, which add up whatever they are.
    """

    node: Any
    factor: float
    numbers: tuple[float, ...]
    divisor: float | None
    is_constant: bool
    others: tuple[tuple[int, ...], ...] = ()
    was: float | None = None
    are_labels: bool = False

    @property
    def perhaps_counts(self) -> tuple[float, ...]:
        """The numbers of which some may be one over a count of the batch."""
        return () if self.is_constant else self.numbers

    def value(self) -> float | None:
        """Its value, where that is known: its variable is alive."""
        if self.node is None:
            return self.was
        y = self.node.get_variable_or_none()
        return None if y is None else float(y.array.sum())

    def is_zero(self) -> bool:
        """Whether it is known to be 0."""
        return self.value() == 0.0

    def without_tape(self) -> Term:
        """The same, holding nothing of the tape."""
        return self._replace(node=None, was=self.value())

    def is_like(self, other: Term) -> bool:
        """Whether it is the same for other samples, of another count."""
        value = self.value()
        return self.others == other.others and value is not None and value == other.value()


# -- the table -------------------------------------------------------------------------------------


def _valid_labels(func: Any, node: Any) -> float | None:
    """Labels that count, of a cross entropy; it divides by 1 where there are none."""
    if func.reduce != "mean":
        return None
    x, t = node.inputs[0].shape, node.inputs[1]
    if getattr(func, "soft_target", False):
        return float(prod(x)) / float(x[1])
    if not func.normalize:
        return len_of(x)
    return float((t.data != getattr(func, "ignore_label", -1)).sum())


def _elements(func: Any, node: Any) -> float | None:
    return float(prod(node.inputs[0].shape))


def _samples(func: Any, node: Any) -> float | None:
    return len_of(node.inputs[-1].shape) if func.reduce == "mean" else None


def _labels(func: Any, node: Any) -> float | None:
    return len_of(node.inputs[2].shape) if func.reduce == "mean" else None


def len_of(shape: tuple[int, ...]) -> float:
    """The first dimension of a shape."""
    return float(shape[0]) if shape else 1.0


COUNTS: dict[type, Callable[[Any, Any], float | None]] = {
    softmax_cross_entropy.SoftmaxCrossEntropy: _valid_labels,
    sigmoid_cross_entropy.SigmoidCrossEntropy: _valid_labels,
    mean_squared_error.MeanSquaredError: _elements,
    mean_absolute_error.MeanAbsoluteError: _elements,
    hinge.Hinge: _samples,
    contrastive.Contrastive: _samples,
    triplet.Triplet: _samples,
    ctc.ConnectionistTemporalClassification: _labels,
    negative_sampling.NegativeSamplingFunction: lambda func, node: None,
}
"""By class, what a loss function of Chainer's has divided by; None for a sum."""

_SUMS = (summing.Sum, summing.SumTo, average.Mean)
_SIGNS: dict[type, tuple[int, ...]] = {
    basic_math.Add: (1, 1),
    basic_math.Sub: (1, -1),
    basic_math.AddConstant: (1,),
    basic_math.SubFromConstant: (-1,),
    basic_math.Neg: (-1,),
}
PLAIN = (
    reshape.Reshape, squeeze.Squeeze, expand_dims.ExpandDims, transposing.Transpose, cast.Cast,
    identity.Identity, broadcast.BroadcastTo, basic_math.Neg, basic_math.AddConstant,
    basic_math.SubFromConstant,
)  # fmt: skip
"""Functions that change no divisor, of one array."""
_JOINS = (stack.Stack, concat.Concat)

# -- the walk --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    node: Any
    factor: float
    numbers: tuple[float, ...]

    def times(self, node: Any, number: float | None) -> _Place:
        if number is None:
            return self._replace(node=node)
        return _Place(node, self.factor * number, (*self.numbers, number))


def terms_of(loss: Any, model: Any) -> tuple[Term, ...]:
    """Take a loss apart, a variable's node or a variable.

    A term that was made of parameters of ``model`` alone is constant.

    Cost: the functions from the loss to its sums; where a term has no labels, up to the whole tape.
    A count of labels on a GPU waits for it.

    Raises:
        AccumulationError: the loss is no scalar, or a function that is not in the table stands
            before its sum or mean; the message names it.
    """
    todo = [_Place(getattr(loss, "node", loss), 1.0, ())]
    found: list[Term | None] = []
    own = frozenset(id(parameter) for parameter in model.params())
    while todo:
        place = todo.pop()
        if place.factor == 0.0 or not place.node.requires_grad:
            continue
        if place.node.creator_node is None:
            found.append(_term(place, None, own))
            continue
        below = _parts(place)
        if below is None:
            found.append(_ending(place, todo, own))
        else:
            todo += reversed(below)
    return tuple(term for term in found if term is not None)


def _parts(place: _Place) -> list[_Place] | None:
    """The scalars that a scalar is made of; None where it is the end of a term."""
    func = place.node.creator_node
    kind, inputs = type(func), func.inputs
    if kind is basic_math.MultiAdd:
        return [place.times(x, None) for x in inputs]
    if kind in _SIGNS:
        signs = _SIGNS[kind]
        return [
            place._replace(node=x, factor=place.factor * s)
            for x, s in zip(inputs, signs, strict=True)
        ]
    if kind in (basic_math.Mul, basic_math.Div, basic_math.MulConstant):
        scaled = _scaled(func)
        return None if scaled is None else [place.times(*scaled)]
    if kind in PLAIN:
        return [place.times(inputs[0], None)]
    return None


def _scaled(func: Any) -> tuple[Any, float | None] | None:
    """What a function multiplies by a number, and that; None where there is no such number.

    The number is None where it is an array of different numbers.
    """
    if type(func) is basic_math.MulConstant:
        return func.inputs[0], float(func.value)
    a, b = func.inputs
    is_division = type(func) is basic_math.Div
    if (a.requires_grad and b.requires_grad) or (is_division and b.requires_grad):
        return None
    variable, other = (a, b) if a.requires_grad else (b, a)
    number = _one_number(other.data)
    if number is None or not is_division:
        return variable, number
    return variable, 1.0 / number if number else 0.0


def _one_number(array: Any) -> float | None:
    """The number that all of an array is by its layout; one number of one sample is none."""
    if array is None or not array.size or any(array.strides):
        return None
    return float(array[(0,) * array.ndim])


def _ending(place: _Place, todo: list[_Place], own: frozenset[int]) -> Term | None:
    """The term that ends in a scalar; None where it is a sum of scalars, which are still to do."""
    node = place.node.creator_node
    func = owner_of(node)
    if type(func) in COUNTS:
        term = _term(place, COUNTS[type(func)](func, node), own)
        are_labels = COUNTS[type(func)] is _valid_labels and func.normalize
        return term._replace(are_labels=are_labels and not getattr(func, "soft_target", False))
    if type(node) not in _SUMS:
        raise AccumulationError(
            f"'{node.label}' stands between the loss and its sum or mean, and umem does not know "
            f"by what it divides: {ASK}"
        )
    joined = node.inputs[0].creator_node
    if type(joined) in _JOINS and all(prod(x.shape) == 1 for x in joined.inputs):
        number = 1 / len(joined.inputs) if type(node) is average.Mean else None
        todo += [place.times(x, number) for x in reversed(joined.inputs)]
        return None
    return _through_arrays(place, own)


def _through_arrays(place: _Place, own: frozenset[int]) -> Term:
    """Follow a sum down, as long as what is below is linear, for the counts it was divided by."""
    node, count, numbers = place.node, None, place.numbers
    while (func := node.creator_node) is not None:
        kind, owner = type(func), owner_of(func)
        number = None
        if kind is average.Mean:
            mine = prod(func.inputs[0].shape) / max(prod(node.shape), 1)
            if count is None and node.shape:
                number = 1.0 / mine if mine else None  # of the mean of each sample, perhaps
            else:
                count = (count or 1.0) * mine
            node = func.inputs[0]
        elif kind is summing.Sum and count and node.shape and func.axis and 0 in func.axis:
            number, count = 1.0 / count, None  # a mean of what samples were added up to, perhaps
            node = func.inputs[0]
        elif kind in _SUMS or kind in PLAIN:
            node = func.inputs[0]
        elif type(owner) in COUNTS:
            inner = COUNTS[type(owner)](owner, func)  # None where it has not reduced: no divisor
            count = inner if count is None else count * (inner or 1.0)
            break
        elif kind in (basic_math.Mul, basic_math.Div, basic_math.MulConstant):
            scaled = _scaled(func)
            if scaled is None:
                break
            node, number = scaled
        else:
            break
        if number is not None:
            numbers = (*numbers, number)
    return _term(place._replace(numbers=numbers), count, own)


def _term(place: _Place, count: float | None, own: frozenset[int]) -> Term:
    beside = [x.shape for x in leaves(place.node) if id(x.get_variable_or_none()) not in own]
    return Term(place.node, place.factor, place.numbers, count, not beside, tuple(beside))


def leaves(node: Any) -> Iterator[Any]:
    """The nodes that a node was made of, and that no function made."""
    if node.creator_node is None:
        yield node
    for func in _functions(node):
        yield from (x for x in func.inputs if x.creator_node is None)


def takes_rows(node: Any) -> bool:
    """Tell whether rows were taken by an array of places to make a node, which may be a batch's."""
    return any(
        any(is_array(place) or isinstance(place, list) for place in func.slices)
        for func in _functions(node)
        if type(func) is get_item.GetItem
    )


def _functions(node: Any) -> Iterator[Any]:
    todo, seen = [node], set()
    while todo:
        func = todo.pop().creator_node
        if func is not None and func not in seen:
            seen.add(func)
            yield func
            todo += func.inputs
