"""A batch that can be split: the arguments of a loss function, or a list of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple, Protocol

import chainer
import numpy as np

from umem.chainer.function_facts import is_array
from umem.errors import SizeError


class Arguments(NamedTuple):
    """Positional and keyword arguments of a loss function."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Batch(Protocol):
    """A batch from which some samples can be taken."""

    size: int

    def take(self, which: slice | list[int]) -> Arguments:
        """Return the arguments of some of the samples."""
        ...


class ArgumentsBatch:
    """A batch given as arguments: arrays, variables and lists of equal length.

    Arguments without a length (numbers, None, texts, 0-dimensional arrays, functions) are given to
    every part. In a list of arrays that are all as long as the batch, each array is split.

    Raises:
        SizeError: no argument can be split, it is empty, or lengths differ; names each.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._all = Arguments(args, kwargs)
        named = {f"argument {at}": value for at, value in enumerate(args, 1)} | dict(kwargs)
        direct = {name: len(x) for name, x in named.items() if _is_array_like(x) and x.ndim}
        lists = {name: x for name, x in named.items() if isinstance(x, (list, tuple))}
        sizes = direct or {name: len(x) for name, x in lists.items()}
        if not sizes:
            raise SizeError("no argument of the loss function has a first dimension to cut")
        self.size = next(iter(sizes.values()))
        sizes |= {name: _length(x, self.size) for name, x in lists.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise SizeError(f"the arguments of the loss function are of differing lengths: {told}")
        if not self.size:
            raise SizeError("the batch is empty")

    def take(self, which: slice | list[int]) -> Arguments:
        """Return the arguments of some of the samples."""
        args, kwargs = self._all
        return Arguments(
            tuple(self._cut(x, which) for x in args),
            {name: self._cut(x, which) for name, x in kwargs.items()},
        )

    def _cut(self, value: Any, which: slice | list[int]) -> Any:
        if isinstance(value, (list, tuple)):
            if _is_cut_inside(value, self.size):
                return _like(value, [self._cut(x, which) for x in value])
            chosen = value[which] if isinstance(which, slice) else [value[i] for i in which]
            return _like(value, chosen)
        return _cut_array(value, which) if _is_array_like(value) and value.ndim else value


def _like(kind: Any, items: Sequence[Any]) -> Any:
    """Return items in a list, tuple or named tuple of the kind of another."""
    make = getattr(kind, "_make", type(kind))
    return make(items)


def _is_array_like(value: Any) -> bool:
    return is_array(value) or isinstance(value, chainer.Variable)


def _is_cut_inside(values: Sequence[Any], size: int) -> bool:
    """Tell whether a list holds arrays as long as the batch, and is not a list of samples."""
    return (
        len(values) != size
        and len(values) > 0
        and all(_is_array_like(x) and x.ndim and len(x) == size for x in values)
    )


def _length(values: Sequence[Any], size: int) -> int:
    return size if _is_cut_inside(values, size) else len(values)


def _cut_array(value: Any, which: slice | list[int]) -> Any:
    """Return some of the rows, copied: a loss function may change them, and run on them again."""
    if not isinstance(value, chainer.Variable):
        return value[which].copy()
    if value.creator_node is not None:
        return value[which]
    return chainer.Variable(value.array[which].copy(), requires_grad=value.requires_grad)


class SamplesBatch:
    """A list of samples and the updater's converter, which makes arguments of it.

    The whole is converted at once, if that gives arrays to split: padding is then the whole
    batch's. Otherwise each part is converted by itself.

    Raises:
        SizeError: the list is empty.
    """

    def __init__(self, samples: Sequence[Any], convert: Callable[[Sequence[Any]], Any]) -> None:
        if not len(samples):
            raise SizeError("the iterator gave an empty batch")
        self.size, self._samples, self._convert = len(samples), samples, convert
        self._cut = self._whole()

    def _whole(self) -> ArgumentsBatch | None:
        try:
            whole = ArgumentsBatch(*arguments_of(self._convert(self._samples)))
        except SizeError:
            return None
        return whole if whole.size == self.size else None

    def take(self, which: slice | list[int]) -> Arguments:
        """Return the arguments of some of the samples."""
        if self._cut is not None:
            return self._cut.take(which)
        if isinstance(which, slice):
            return arguments_of(self._convert(self._samples[which]))
        return arguments_of(self._convert([self._samples[i] for i in which]))


def arguments_of(converted: Any) -> Arguments:
    """Turn a converted batch into arguments as `StandardUpdater` does."""
    if isinstance(converted, tuple):
        return Arguments(converted, {})
    if isinstance(converted, dict):
        return Arguments((), converted)
    return Arguments((converted,), {})


class ChosenSamples:
    """Some samples of a batch, as a batch."""

    def __init__(self, batch: Batch, which: Sequence[int]) -> None:
        self._batch, self._which, self.size = batch, list(which), len(which)

    def take(self, which: slice | list[int]) -> Arguments:
        """Return the arguments of some of the chosen samples."""
        chosen = self._which[which] if isinstance(which, slice) else [self._which[i] for i in which]
        return self._batch.take(chosen)


def joined(one: Arguments, other: Arguments) -> Arguments | None:
    """Join the samples of two calls; None if that is not possible."""
    if len(one.args) != len(other.args) or one.kwargs.keys() != other.kwargs.keys():
        return None
    try:
        sizes = ArgumentsBatch(*one).size, ArgumentsBatch(*other).size
        args = tuple(_together(a, b, *sizes) for a, b in zip(one.args, other.args, strict=True))
        kwargs = {name: _together(x, other.kwargs[name], *sizes) for name, x in one.kwargs.items()}
        ArgumentsBatch(args, kwargs)
    except (SizeError, ValueError, TypeError):  # of other shapes, or not splittable
        return None
    return Arguments(args, kwargs)


def _together(a: Any, b: Any, size: int, other_size: int) -> Any:
    """Concatenate an argument of two calls: arrays along the first axis, lists by appending."""
    if _is_array_like(a) and a.ndim:
        arrays = [getattr(x, "array", x) for x in (a, b)]
        return chainer.backend.get_array_module(*arrays).concatenate(arrays)
    if isinstance(a, (list, tuple)):
        if _is_cut_inside(a, size) and _is_cut_inside(b, other_size):
            pairs = zip(a, b, strict=True)
            return _like(a, [_together(x, y, size, other_size) for x, y in pairs])
        return _like(a, [*a, *b])
    return a


def is_ragged(given: Arguments) -> bool:
    """Tell whether an argument is a list of arrays of different lengths."""
    lists = [x for x in (*given.args, *given.kwargs.values()) if isinstance(x, (list, tuple))]
    shapes = [{len(y) for y in x if _is_array_like(y) and y.ndim} for x in lists]
    return any(len(lengths) > 1 for lengths in shapes)


def positive_count(value: Any, name: str) -> int:
    """Check and return an integer of at least 1.

    Raises:
        SizeError: it is not a whole number above zero.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise SizeError(f"{name} must be a whole number above 0, not {value!r}")
    return number


def part_sizes(size: int, part: int) -> list[int]:
    """Return the sizes of parts; the last may be shorter."""
    return [min(part, size - at) for at in range(0, size, part)]


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of the given sizes."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]
