"""The terms of a loss and their divisors, as far as its tape shows them.

A loss is split where it is a sum or difference of scalars times numbers. The divisor of a term is
known if the term ends in a function of `COUNTS`, whose node shows it. Nothing is inferred: the user
gives the divisor of any other function by ``weight=``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import chainer
from chainer.functions import loss as losses
from chainer.functions.array import cast, get_item, reshape
from chainer.functions.math import average, basic_math, identity

from umem._common.stacks import program_line
from umem.chainer.function_facts import owner_of


class Term(NamedTuple):
    """A summand of a loss.

    Attributes:
        node: the scalar in which it ends; None if only the facts of the term are kept.
        factor: the derivative of the loss by that scalar.
        numbers: the numbers that multiply it.
        kind: the name of the function that made the scalar.
        shape: the shape of the array that this function averaged or summed.
        divisor: the function's divisor; None if that is not known.
        has_labels: the divisor is a count of labels, which add up whatever they are.
        is_once: the term depends on whole parameters only, as a penalty does.
        entry: the name of its loss in a dictionary of losses; "" for a single loss.
        text: the term in words, with the program's line.
        total: names the count that the whole is divided by, alike in every part.
        count: the part's contribution to that; None for terms that add up, or count once.
        is_weighted: ``weight=`` gives its divisor.
        value: the scalar times its factor, if the count is 0.
    """

    node: Any
    factor: float
    numbers: tuple[float, ...]
    kind: str
    shape: tuple[int, ...]
    divisor: float | None
    has_labels: bool
    is_once: bool
    entry: str = ""
    text: str = ""
    total: str = ""
    count: float | None = None  # type: ignore[assignment]  # hides tuple.count
    is_weighted: bool = False
    value: float = 0.0

    @property
    def is_known(self) -> bool:
        """Tell whether its divisor is known."""
        return self.is_once or self.divisor is not None

    @property
    def is_matched(self) -> bool:
        """Tell whether it is the term at its place in every part, with its own count."""
        return not (self.is_weighted or self.is_once)

    def counted(self, total: str, count: float | None, *, is_weighted: bool) -> Term:
        """Return it with its count, and its value if that is 0."""
        y = None if count != 0 else self.node.get_variable_or_none()
        value = 0.0 if count != 0 else (0.0 if y is None else float(y.array.sum())) * self.factor
        return self._replace(total=total, count=count, is_weighted=is_weighted, value=value)


def terms_of(loss: Any) -> list[Term]:
    """Return the terms of the loss at a variable or node, in the program's order.

    Cost: a walk from the loss to its means. A count of labels on a GPU waits for it.
    """
    found: list[Term] = []
    todo: list[_Place] = [(getattr(loss, "node", loss), 1.0, ())]
    while todo:
        place = todo.pop()
        if not place[0].requires_grad:
            continue
        below = _below(*place)
        if below is None:
            found.append(_term(*place))
        else:
            todo += reversed(below)
    return found


_Place = tuple[Any, float, tuple[float, ...]]
_SIGNS: dict[type, tuple[int, ...]] = {
    basic_math.Add: (1, 1),
    basic_math.Sub: (1, -1),
    basic_math.AddConstant: (1,),
    basic_math.SubFromConstant: (-1,),
    basic_math.Neg: (-1,),
    cast.Cast: (1,),
    reshape.Reshape: (1,),
    identity.Identity: (1,),
}


_ADDED = (basic_math.AddConstant, basic_math.SubFromConstant)


def _below(node: Any, factor: float, numbers: tuple[float, ...]) -> list[_Place] | None:
    """Return the summands of a scalar; None if the walk ends at it."""
    func = node.creator_node
    if func is None or any(prod(x.shape) != 1 for x in func.inputs):
        return None
    if type(func) is basic_math.MulConstant:
        number = float(func.value)
        return [(func.inputs[0], factor * number, (*numbers, number))]
    signs = _SIGNS.get(type(func), ())
    if type(func) is basic_math.MultiAdd:
        signs = (1,) * len(func.inputs)
    if len(signs) != len(func.inputs):
        return None
    return [(x, sign * factor, numbers) for x, sign in zip(func.inputs, signs, strict=True)]


def _term(node: Any, factor: float, numbers: tuple[float, ...]) -> Term:
    func = node.creator_node
    if func is None:
        is_once = isinstance(node.get_variable_or_none(), chainer.Parameter)
        return Term(node, factor, numbers, "a variable", node.shape, None, False, is_once)
    counted = COUNTS.get(type(owner_of(func)))
    divisor, has_labels = counted(owner_of(func), func) if counted else _NOT_DIVIDED
    shape, is_once = tuple(func.inputs[0].shape), _is_of_parameters(node)
    return Term(node, factor, numbers, str(func.label), shape, divisor, has_labels, is_once)


def _is_of_parameters(node: Any) -> bool:
    """Tell whether a scalar depends on whole parameters only."""
    return all(
        isinstance(one.get_variable_or_none(), chainer.Parameter)
        if one.creator_node is None
        else type(one.creator_node) is not get_item.GetItem
        for one in below(node)
    )


def below(node: Any) -> Iterator[Any]:
    """Yield a node and the nodes that it was computed from."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        yield node
        func = node.creator_node
        if func is not None and func not in seen:
            seen.add(func)
            todo += func.inputs


# -- the table -------------------------------------------------------------------------------------

Counted = tuple[float | None, bool]
_NOT_DIVIDED: Counted = (None, False)


def _first_axis(at: int) -> Callable[[Any, Any], Counted]:
    def count(func: Any, node: Any) -> Counted:
        return (float(node.inputs[at].shape[0]), False) if func.reduce == "mean" else _NOT_DIVIDED

    return count


def _elements(func: Any, node: Any) -> Counted:
    return float(prod(node.inputs[0].shape)), False


def _labels(func: Any, node: Any) -> Counted:
    """Count the labels of a cross entropy that are not ignored.

    With ``normalize=False`` Chainer divides by the first axis, with soft targets by
    ``x.size / x.shape[1]``. Class weights do not change the divisor.
    """
    if func.reduce != "mean":
        return _NOT_DIVIDED
    x, t = node.inputs[0].shape, node.inputs[1]
    if getattr(func, "soft_target", False):
        return float(prod(x)) / float(x[1]), False
    if not func.normalize:
        return float(x[0]), False
    return float((t.data != getattr(func, "ignore_label", -1)).sum()), True


COUNTS: dict[type, Callable[[Any, Any], Counted]] = {
    average.Mean: _elements,
    losses.softmax_cross_entropy.SoftmaxCrossEntropy: _labels,
    losses.sigmoid_cross_entropy.SigmoidCrossEntropy: _labels,
    losses.mean_squared_error.MeanSquaredError: _elements,
    losses.mean_absolute_error.MeanAbsoluteError: _elements,
    losses.hinge.Hinge: _first_axis(0),
    losses.contrastive.Contrastive: _first_axis(-1),
    losses.triplet.Triplet: _first_axis(-1),
    losses.ctc.ConnectionistTemporalClassification: _first_axis(2),
}
"""For each function that divides by a count: reads the count from its node, or None if it has not
divided, and whether the count is of labels."""


# -- the program's lines ---------------------------------------------------------------------------


class TermPlaces:
    """The program's line for each function that made a scalar, for the messages of refusals.

    Attributes:
        numbers: the numbers that the program gave to functions, such as the factor in ``2 * x``.
        functions: the names of all functions that were called.

    Args:
        holds: keep the scalars alive, with their graphs, so that their values are known.

    Thread-safety: none.
    """

    def __init__(self, *, holds: bool = True) -> None:
        self._holds = holds
        self._found: dict[int, tuple[Any, Any, str]] = {}
        self.numbers: list[float] = []
        self.functions: set[str] = set()

    def note(self, func: Any, outputs: Any) -> None:
        """Record a call's name, number and scalars; called by `Subscriber.apply`."""
        self.functions.add(type(func).__name__)
        number = getattr(func, "value", None)
        is_added = type(func) in _ADDED and outputs[0].size == 1
        if isinstance(number, Real) and not is_added:
            self.numbers.append(float(number))
        for y in outputs:
            if y.size == 1:
                held = y if self._holds else None
                self._found[id(y.node)] = weakref.ref(y.node), held, program_line()

    def of(self, term: Term) -> str:
        """Return a term in words: its function, with file and line if known."""
        found = self._found.get(id(term.node))
        is_noted = found is not None and found[0]() is term.node
        return f"'{term.kind}'{f' at {found[2]}' if found and is_noted else ''}"
