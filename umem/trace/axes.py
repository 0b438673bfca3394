"""Sizes of a step along one axis or several: what a user writes, and the points of a grid.

A step of one size is recorded at whole numbers, ``sizes=(4, 8)``. One of several is recorded over
a grid, ``sizes={"batch": (4, 8), "length": (16, 32)}``; a size is then one number an axis,
``{"batch": 64, "length": 512}``, and a point the tuple of them in the order of the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from umem.errors import ScalingError, SizeError
from umem.printable import quoted

StepSize = int | Mapping[str, int]
"""A size as a user writes it."""
Point = int | tuple[int, ...]
"""A size as a trace keeps it: a number, or one an axis."""
Nodes = dict[str, tuple[int, ...]]
"""The sizes recorded along each axis, ascending."""
MOST_NODES = 3
"""At most this many sizes along an axis: they determine a square, the steepest that arrays grow."""


def check_sizes(sizes: Sequence[int], what: str = "a step is scaled from") -> None:
    """Raise unless sizes can be fitted over.

    Raises:
        ScalingError, SizeError: see `Trace.join`.
    """
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2:
        raise ScalingError(f"{what} two sizes at least, such as (4, 8); got {quoted(sizes)}")
    for size in sizes:
        check_size(size)
    if len(set(sizes)) < len(sizes):
        raise ScalingError(f"sizes must differ; got {listed(sizes)}")


def check_size(size: object, axis: str = "a size") -> None:
    """Raise unless a value is a size.

    Raises:
        SizeError: it is not a whole number of at least 1, or has more than 63 bits.
    """
    if type(size) is not int or size < 1:
        found = quoted(size)
        raise SizeError(f"{axis} is a whole number of at least 1, such as a batch; got {found}")
    if size >= 1 << 63:
        raise SizeError(f"{axis} has at most 63 bits; got {quoted(size)}")


def check_axes(sizes: Mapping[str, Sequence[int]]) -> Nodes:
    """Check sizes given by axis, and return them in ascending order.

    Raises:
        ScalingError: no axis, a name that no argument can have, fewer than two sizes along an
            axis or more than three, equal ones. SizeError: no whole number of at least 1.
    """
    if not sizes:
        raise ScalingError('name an axis at least, such as sizes={"batch": (4, 8)}; got none')
    found = {}
    for axis, nodes in sizes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ScalingError(
                "the name of an axis is that of an argument of the step, such as 'batch'; "
                f"got {quoted(axis)}"
            )
        check_sizes(nodes, f"the axis {quoted(axis)} needs")
        if len(nodes) > MOST_NODES:
            raise ScalingError(
                f"the axis {quoted(axis)} has {len(nodes)} sizes; two or three of them fit a "
                f"line or a square: {listed(sorted(nodes)[:MOST_NODES])}"
            )
        found[axis] = tuple(sorted(nodes))
    return found


def listed(sizes: Iterable[StepSize]) -> str:
    """Format sizes for a person."""
    found = list(sizes)
    apart = "; " if any(isinstance(size, Mapping) for size in found) else ", "
    return apart.join(map(size_text, found))


def size_text(size: StepSize) -> str:
    """Format a size for a person: ``64``, or ``batch 64, length 512``."""
    if isinstance(size, Mapping):
        return ", ".join(f"{axis} {value}" for axis, value in size.items())
    return str(size)


def size_option(size: StepSize) -> str:
    """Format a size for the command line: ``64``, or ``batch=64,length=512``."""
    if isinstance(size, Mapping):
        return ",".join(f"{axis}={value}" for axis, value in size.items())
    return str(size)


def sizes_option(sizes: Sequence[StepSize]) -> str:
    """Format sizes for the command line."""
    apart = ";" if any(isinstance(size, Mapping) for size in sizes) else ","
    return apart.join(map(size_option, sizes))


# -- the batch -----------------------------------------------------------------------------------


def batch_of(size: StepSize) -> int:
    """Return the batch of a size: the size itself, its axis ``batch``, or its first axis."""
    return size[_batch_axis(size)] if isinstance(size, Mapping) else size


def with_batch(size: StepSize, batch: int) -> StepSize:
    """Return a size with another batch."""
    return {**size, _batch_axis(size): batch} if isinstance(size, Mapping) else batch


def without_batch(size: StepSize) -> dict[str, int]:
    """Return the sizes of the axes other than the batch."""
    if not isinstance(size, Mapping):
        return {}
    return {axis: value for axis, value in size.items() if axis != _batch_axis(size)}


def _batch_axis(size: Mapping[str, int]) -> str:
    return "batch" if "batch" in size else next(iter(size))


# -- points ------------------------------------------------------------------------------------


def point_of(size: StepSize, axes: tuple[str, ...]) -> Point:
    """Return the point of a size along ``axes``; empty axes mean a step of one size.

    Raises:
        SizeError: an axis is unknown or missing, or a number is not at least 1.
    """
    if not axes:
        if isinstance(size, Mapping):
            raise SizeError(
                f"the step was recorded at sizes without a name: give one number, not "
                f"{quoted(dict(size))}"
            )
        check_size(size)
        return size
    if not isinstance(size, Mapping):
        raise SizeError(
            f"the step was recorded along {_named(axes)}: give {_example(axes)}; got {quoted(size)}"
        )
    for axis in size:
        if axis not in axes:
            raise SizeError(
                f"there is no axis {quoted(axis)}: the step was recorded along {_named(axes)}"
            )
    for axis in axes:
        if axis not in size:
            raise SizeError(f"the axis {axis!r} is missing: give {_example(axes)}")
        check_size(size[axis], repr(axis))
    return tuple(size[axis] for axis in axes)


def points_of(sizes: Sequence[StepSize]) -> tuple[tuple[str, ...], list[Point], Nodes]:
    """Return the axes of sizes, each size's point, and the sizes along each axis.

    Raises:
        ScalingError, SizeError: see `Trace.join`.
    """
    named = [size for size in sizes if isinstance(size, Mapping)] if _is_list(sizes) else []
    if not named:
        numbers: Any = sizes
        check_sizes(numbers)
        return (), list(numbers), {"": tuple(sorted(numbers))}
    axes = tuple(named[0])
    if not axes:
        raise ScalingError('a size along a grid names an axis at least, such as {"batch": 4}')
    points = [point_of(size, axes) for size in sizes]
    return axes, points, nodes_of(points, axes)


def _is_list(sizes: object) -> bool:
    return isinstance(sizes, (list, tuple))


def in_order(points: Iterable[Point]) -> list[Point]:
    """Sort points by ascending size, the first axis slowest."""
    return sorted(points, key=lambda point: point if isinstance(point, tuple) else (point,))


def size_of(point: Point, axes: tuple[str, ...]) -> StepSize:
    """Return the size of a point."""
    return dict(zip(axes, point, strict=True)) if isinstance(point, tuple) else point


def grid(nodes: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """List all points of a grid, the first axis slowest; the last point is the largest."""
    return list(product(*nodes.values()))


def nodes_of(points: Iterable[Point], axes: tuple[str, ...]) -> Nodes:
    """Return the sizes along each axis of the grid that points form.

    Raises:
        ScalingError: they are no whole grid, or have more or fewer sizes along an axis than fit.
    """
    rows = [point for point in points if isinstance(point, tuple) and len(point) == len(axes)]
    nodes = {axis: tuple(sorted(set(values))) for axis, *values in zip(axes, *rows, strict=False)}
    if not rows or sorted(rows) != grid(nodes):
        given = listed(size_of(row, axes) for row in rows)
        raise ScalingError(
            f"sizes along {_named(axes)} are a whole grid, each size of an axis with each of the "
            f"others, once; got {given}"
        )
    return check_axes(nodes)


def _named(axes: tuple[str, ...]) -> str:
    return " and ".join(map(repr, axes))


def _example(axes: tuple[str, ...]) -> str:
    return "size={" + ", ".join(f'"{axis}": 8' for axis in axes) + "}"
