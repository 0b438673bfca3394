"""Splitting of a call's work so that its workspace stays under a cap.

Outputs are split by samples; if one sample takes more, by bands of its output rows. If the channels
can be split, they are split as well, so that a product stays wide enough to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from umem.chainer.chunking.windows import Range, Sizes
from umem.errors import WorkspaceWarning, warn_at_program
from umem.units import format_bytes

WIDE = 2048
"""A matrix product of this many columns is about as fast for each column as a wider one; the number
itself is a guess, not measured."""
CACHED_BYTES = 1 << 20
"""A core's own cache, one or two MiB on today's processors, holds this (bench/recompute.py
--workspace has times under caps)."""


class Cap:
    """A cap, and whether its excess was reported.

    Attributes:
        nbytes: the most that the temporary arrays of one call may take.
        exact: whether Chainer computes calls whose result would differ from its own by a bit.
        layouts: with ``exact``, by call: the strides of Chainer's result, or None if the bits
            differed.
    """

    def __init__(self, nbytes: int, exact: bool) -> None:
        self.nbytes, self.exact = nbytes, exact
        self.layouts: dict[Any, Sizes | None] = {}
        self._has_warned = False

    def exceeded(self, nbytes: int, label: str) -> None:
        """Warn once that the smallest part takes more than the cap."""
        if not self._has_warned:
            self._has_warned = True
            warn_at_program(
                f"a workspace of {format_bytes(self.nbytes)} is too small for one output row of "
                f"{label}: {format_bytes(nbytes)} is used there, the least",
                WorkspaceWarning,
            )


class Part(NamedTuple):
    """Some samples and, if it is a single sample, a band of its output positions.

    Attributes:
        samples: their range.
        band: its first and last output position, along each axis.
        positions: the same, in one number for all axes: a band is one run of them.
    """

    samples: slice
    band: tuple[Range, ...]
    positions: slice

    @property
    def sample_count(self) -> int:
        return int(self.samples.stop - self.samples.start)

    @property
    def lengths(self) -> Sizes:
        """Return the number of output positions along each axis."""
        return tuple(end - begin for begin, end in self.band)

    @property
    def ranges(self) -> tuple[slice, ...]:
        """Return the index of its output positions, one slice an axis."""
        return tuple(slice(begin, end) for begin, end in self.band)


def parts(sample_count: int, outs: Sizes, most: int) -> Iterator[Part]:
    """Split a batch into parts of at most ``most`` output positions, and at least one row."""
    size = prod(outs)
    if most >= size:
        whole = tuple((0, out) for out in outs)
        for samples in blocks(sample_count, most // size):
            yield Part(samples, whole, slice(0, size))
        return
    found = list(_bands(outs, most))
    for sample in range(sample_count):
        end = 0
        for band in found:
            start, end = end, end + prod(high - low for low, high in band)
            yield Part(slice(sample, sample + 1), band, slice(start, end))


def blocks(count: int, most: int) -> Iterator[slice]:
    """Split a range into slices of at most ``most``, as equal as possible, the first the
    largest.
    """
    number = -(-count // most)
    for index in range(number):
        yield slice(-(-index * count // number), -(-(index + 1) * count // number))


def least(outs: Sizes) -> int:
    """Return the fewest output positions of a part: one row, or one position if there is one
    axis.
    """
    return outs[-1] if len(outs) > 1 else 1


def _bands(outs: Sizes, most: int) -> Iterator[tuple[Range, ...]]:
    """Split output positions into runs; the last of several axes stays whole."""
    row = prod(outs[1:])
    if row <= most or len(outs) < 3:
        inner = tuple((0, out) for out in outs[1:])
        for part in blocks(outs[0], max(1, most // row)):
            yield (part.start, part.stop), *inner
        return
    for index in range(outs[0]):
        for band in _bands(outs[1:], most):
            yield (index, index + 1), *band


class Sides(NamedTuple):
    """Sizes of a matrix product of columns, in elements.

    Attributes:
        kernel: elements of a column, for each channel.
        others: beside the column, for each position: an output or its gradient.
        sums: for each channel of a column, if products of several parts are added up.
        itemsize: bytes of an element.
    """

    kernel: int
    others: int
    sums: int
    itemsize: int

    def positions(self, channel_count: int, total: int, nbytes: int) -> int:
        """Return how many columns fit into ``nbytes``; ``total`` if all fit without summing."""
        each = self.kernel * channel_count + self.others
        room = nbytes // self.itemsize
        return total if each * total <= room else (room - self.sums * channel_count) // each

    def nbytes(self, channel_count: int, count: int) -> int:
        """Return the bytes of a number of columns."""
        each = self.kernel * channel_count + self.others
        return (each * count + self.sums * channel_count) * self.itemsize


def channels_at_a_time(sides: Sides, channel_count: int, total: int, nbytes: int) -> int:
    """Halve the channels until wide products fit into ``nbytes``, while that makes a difference."""
    while channel_count > 1 and sides.positions(channel_count, total, nbytes) < min(total, WIDE):
        sums_bytes = sides.sums * channel_count * sides.itemsize
        if sides.kernel * channel_count <= sides.others and 2 * sums_bytes <= nbytes:
            break
        channel_count = -(-channel_count // 2)
    return channel_count
