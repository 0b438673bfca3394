"""A trace at a size that was never run: every figure fitted over the sizes that were recorded.

A size is what the program makes it: a batch, a number of nodes, a sequence's length. Bytes,
operations and times of a step are affine in the batch, so two sizes say all; where a product
of two lengths is made, as in attention, they are squares, and three sizes say all (``degree=2``).

Models: whole numbers, never negative, rounded up; accesses stay within their tensors; the later
of the recorded frees. Where a line is fitted to more than two sizes, workspace follows the
steepest, because NumPy makes other temporaries for small arrays than for large ones.
Does not model: operations that appear or go away with the size, which is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from operator import mul
from typing import Any

from umem.errors import ScalingError, SizeError
from umem.printable import quoted
from umem.trace.align import Aligned, align
from umem.trace.events import Access, Alloc, Event, Free, Hint, Op, TapeEntry
from umem.trace.walk import used_bytes
from umem.units import format_bytes

LARGEST = 1 << 62
"""The largest figure that is predicted: events hold counts of at most 63 bits."""
TOLERANCE = 0.01
"""How far a tensor may be from the fit at a size that checks it, as a share of its bytes."""
MATTERS = 0.001
"""The share of a step's peak below which a tensor is not checked."""


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuse sizes that no step can be fitted over.

    Raises:
        ScalingError, SizeError: see `Trace.join`.
    """
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2:
        raise ScalingError(
            f"a step is scaled from two sizes at least, such as (4, 8); got {quoted(sizes)}"
        )
    for size in sizes:
        check_size(size)
    if len(set(sizes)) < len(sizes):
        raise ScalingError(f"sizes must differ; got {listed(sizes)}")


def check_size(size: int) -> None:
    """Refuse what is no size.

    Raises:
        SizeError: it is not a whole number of at least 1, or has more than 63 bits.
    """
    if type(size) is not int or size < 1:
        found = quoted(size)
        raise SizeError(f"a size is a whole number of at least 1, such as a batch; got {found}")
    if size >= 1 << 63:
        raise SizeError(f"a size has at most 63 bits; got {quoted(size)}")


def events_at(recordings: Mapping[int, list[Event]], size: int, degree: int = 1) -> list[Event]:
    """The events at a size; see `Trace.at`."""
    check_size(size)
    if degree not in (1, 2):
        raise ScalingError(f"degree is 1 (affine) or 2 (squared); got {quoted(degree)}")
    if size in recordings:
        return recordings[size]
    if len(recordings) <= degree:
        raise ScalingError(_too_few(sorted(recordings), degree))
    aligned = align(list(recordings.items()))
    _check_fit(aligned, degree)
    return _Scaler(aligned, size, degree).events()


def _too_few(sizes: list[int], degree: int) -> str:
    if degree == 2:
        return (
            f"degree=2 needs three recorded sizes; this trace has {listed(sizes)}. Record it "
            "with umem.record_at(step, sizes=(4, 8, 16))."
        )
    return (
        "this trace was recorded at one size, so it cannot be scaled. Record the step at two, "
        "umem.record_at(step, sizes=(4, 8)), or join two traces of it, "
        "umem.Trace.join([a, b], sizes=(4, 8))."
    )


def listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


# -- one figure --------------------------------------------------------------------------------


class Fit:
    """The polynomial through what was recorded at each of ``sizes``, taken at ``size``.

    Its weights (Lagrange's) are whole numbers over one divisor, because a trace has a hundred
    thousand figures.
    """

    def __init__(self, sizes: Sequence[int], size: int) -> None:
        weights = [_weight(sizes, own, size) for own in sizes]
        self._divisor = lcm(*(weight.denominator for weight in weights))
        self._weights = [int(weight * self._divisor) for weight in weights]

    def count(self, values: Sequence[int]) -> int:
        """A whole number, rounded up, at least 0."""
        total: int = sum(map(mul, values, self._weights))
        return max(0, -(-total // self._divisor))

    def seconds(self, values: Sequence[float]) -> float:
        """A time; one that shrinks as the size grows is noise, and its mean is taken."""
        if values[-1] <= values[0]:
            return sum(values) / len(values)
        total: float = sum(map(mul, values, self._weights))
        return max(0.0, total / self._divisor)


def _weight(sizes: Sequence[int], own: int, size: int) -> Fraction:
    weight = Fraction(1)
    for other in sizes:
        if other != own:
            weight *= Fraction(size - other, own - other)
    return weight


# -- a whole step ------------------------------------------------------------------------------


class _Scaler:
    """Builds the events at one size."""

    def __init__(self, aligned: Aligned, size: int, degree: int) -> None:
        sizes = aligned.sizes
        self._aligned = aligned
        self._size = size
        self._used = slice(-degree - 1, None)  # the largest sizes are nearest to what is asked
        self._fit = Fit(sizes[self._used], size)
        pairs = list(itertools.pairwise(sizes))
        self._lines = [Fit(pair, size) for pair in pairs[:-1]] if degree == 1 else []
        self._nbytes: list[int] = []
        self._recorded: list[list[int]] = []

    def events(self) -> list[Event]:
        made: list[Event] = []
        for row, frees in zip(self._aligned.rows, self._aligned.frees, strict=False):
            made += map(Free, frees)
            made.append(self._event(row))
        made += map(Free, self._aligned.frees[-1])
        return made

    def _event(self, row: tuple[Any, ...]) -> Event:
        last: Event = row[-1]
        if isinstance(last, Alloc):
            self._recorded.append([event.nbytes for event in row])
            self._nbytes.append(self._count(self._recorded[-1], last.label))
            return last._replace(nbytes=self._nbytes[-1])
        if isinstance(last, Op):
            return last._replace(
                reads=self._accesses([event.reads for event in row]),
                writes=self._accesses([event.writes for event in row]),
                flops=self._count([event.flops for event in row], last.name),
                traffic_bytes=self._count([event.traffic_bytes for event in row], last.name),
                host_seconds=self._seconds([event.host_seconds for event in row]),
                workspace_bytes=self._workspace([event.workspace_bytes for event in row], last),
                entry=self._entry([event.entry for event in row], last.name),
            )
        if isinstance(last, Hint):
            return last._replace(accesses=self._accesses([event.accesses for event in row]))
        return last

    def _entry(self, row: list[TapeEntry | None], what: str) -> TapeEntry | None:
        found = [entry for entry in row if entry is not None]
        if len(found) < len(row):
            return None
        gradient = self._count([entry.gradient_bytes for entry in found], what)
        return found[-1]._replace(gradient_bytes=gradient)

    def _count(self, values: list[int], what: str) -> int:
        if values.count(values[0]) == len(values):
            return values[0]
        return self._checked(self._fit.count(values[self._used]), what)

    def _checked(self, value: int, what: str) -> int:
        if value > LARGEST:
            raise SizeError(
                f"at size {self._size} {quoted(what)} would need a figure of {value:.1e}, more "
                "than a trace can hold: ask for a smaller size"
            )
        return value

    def _accesses(self, rows: list[tuple[Access, ...]]) -> tuple[Access, ...]:
        return tuple(map(self._access, *rows))

    def _access(self, *row: Access) -> Access:
        tensor = row[-1].tensor
        nbytes = self._nbytes[tensor]
        starts, stops = [access.start for access in row], [access.stop for access in row]
        if stops == self._recorded[tensor] and not any(starts):
            return Access(tensor, 0, nbytes)
        start = min(nbytes, self._count(starts, "an access"))
        return Access(tensor, start, max(start, min(nbytes, self._count(stops, "an access"))))

    def _seconds(self, values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return self._fit.seconds(known[self._used]) if len(known) == len(values) else None

    def _workspace(self, values: list[int | None], op: Op) -> int | None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        pairs = itertools.pairwise(known)
        found = [line.count(pair) for line, pair in zip(self._lines, pairs, strict=False)]
        return self._checked(max((self._count(known, op.name), *found)), op.name)


# -- does the fit hold at the sizes that it was not made of? -----------------------------------


def _check_fit(aligned: Aligned, degree: int) -> None:
    used = aligned.sizes[-degree - 1 :]
    for index, size in enumerate(aligned.sizes[: -degree - 1]):
        fit = Fit(used, size)
        least = MATTERS * _held_bytes(aligned, index)
        for row in aligned.rows:
            if isinstance(row[-1], Alloc):
                values = [event.nbytes for event in row if isinstance(event, Alloc)]
                off = abs(fit.count(values[-degree - 1 :]) - values[index])
                if off > TOLERANCE * values[index] and off > least:
                    raise ScalingError(_bent(row[-1], aligned.sizes, values, degree))


def _bent(alloc: Alloc, sizes: tuple[int, ...], values: list[int], degree: int) -> str:
    found = ", ".join(
        f"{format_bytes(value)} at {size}" for size, value in zip(sizes, values, strict=True)
    )
    better = "degree=2 may fit it" if degree == 1 else "record sizes nearer to the one you ask for"
    curve = "line" if degree == 1 else "parabola"
    return (
        f"the tensor {quoted(alloc.label)} ({alloc.kind}) has {found}: no {curve} passes within "
        f"{TOLERANCE:.0%} of that, so it cannot be scaled; {better}"
    )


def _held_bytes(aligned: Aligned, index: int) -> int:
    """The most that tensors hold at once in one of the recordings."""
    steps = zip(aligned.rows, aligned.frees, strict=False)
    events = ([*map(Free, frees), row[index]] for row, frees in steps)
    held = (e for e in itertools.chain.from_iterable(events) if isinstance(e, (Alloc, Free)))
    return max(used_bytes(held), default=0)
