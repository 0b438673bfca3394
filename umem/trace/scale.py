"""A trace at a size that was never run: every figure fitted over the sizes that were recorded.

A size is what the program makes it: a batch, a number of nodes, a sequence's length. Bytes,
operations and times of a step are affine in the batch, so two sizes say all; where a product
of two lengths is made, as in attention, they are squares, and three sizes say all (``degree=2``).
Along several axes the recordings are a grid, and the fit is the product of those along each:
through two sizes a line, through three a parabola. It is exact for what is a polynomial of that
degree along each axis, such as batch * length**2 * hidden.

Models: whole numbers, never negative, rounded up; accesses stay within their tensors; the later
of the recorded frees. Where a line is fitted to more than two sizes, workspace follows the
steepest, because NumPy makes other temporaries for small arrays than for large ones; over a
grid it follows one of the operation's tensors (`umem.trace.fits`), else, as times do, the
lines between the outermost sizes where these hold for the ones between: noise squared is no
prediction.
Does not model: operations that appear or go away with the size, which is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from umem.errors import ScalingError, SizeError
from umem.printable import quoted
from umem.trace.align import Aligned
from umem.trace.axes import Point, StepSize, in_order, listed, nodes_of, point_of
from umem.trace.events import Access, Alloc, Event, Free, Hint, Kernels, Op, TapeEntry
from umem.trace.fits import Fit, Fits, along_a_tensor, curve
from umem.trace.walk import used_bytes
from umem.units import format_bytes

LARGEST = 1 << 62
"""The largest predicted figure: counts in events have at most 63 bits."""
TOLERANCE = 0.01
"""At a size that checks the fit, a tensor may be this far from it, as a share of its bytes."""
MATTERS = 0.001
"""Tensors below this share of the peak are not checked."""


def events_at(
    recordings: Mapping[Point, list[Event]],
    axes: tuple[str, ...],
    aligned: Callable[[], Aligned],
    size: StepSize,
    degree: int = 1,
) -> list[Event]:
    """Return the events at a size, from aligned recordings; see `Trace.at`.

    ``aligned`` is called only for a size that was not recorded.
    """
    point = point_of(size, axes)
    if degree not in (1, 2):
        raise ScalingError(f"degree is 1 (affine) or 2 (squared); got {quoted(degree)}")
    if point in recordings:
        return recordings[point]
    if isinstance(point, tuple):
        if degree != 1:
            raise ScalingError(
                "degree is for a size without a name: an axis that was recorded at three sizes "
                "is fitted by a square as it is"
            )
        return _Scaler(aligned(), Fits.over_grid(nodes_of(recordings, axes), point)).events()
    sizes = [each for each in in_order(recordings) if isinstance(each, int)]
    if len(sizes) <= degree:
        raise ScalingError(_too_few(sizes, degree))
    _check_fit(aligned(), sizes, degree)
    return _Scaler(aligned(), Fits.over_sizes(sizes, point, degree)).events()


def grows_faster(one: list[Event], other: list[Event], sizes: tuple[int, ...]) -> bool:
    """Tell whether a tensor may grow faster than linearly with the size."""
    sizes_of = ([e.nbytes for e in events if isinstance(e, Alloc)] for events in (one, other))
    pairs = zip(*sizes_of, strict=False)
    return any(larger * sizes[0] > smaller * sizes[1] for smaller, larger in pairs)


def _too_few(sizes: list[int], degree: int) -> str:
    """Word the error for too few recorded sizes."""
    if degree == 2:
        return (
            f"degree=2 needs three recorded sizes; this trace has {listed(sizes)}. Record it "
            "with umem.record_at(step, sizes=(4, 8, 16))."
        )
    return (
        "this trace was recorded at one size, so it cannot be scaled. Record the step at two, "
        "umem.record_at(step, sizes=(4, 8)), or join two traces of it, "
        "umem.Trace.join([a, b], sizes=(4, 8)); of a script, umem run --record FILE --sizes 4,8."
    )


# -- a whole step ------------------------------------------------------------------------------


class _Scaler:
    """Extrapolates events to one size."""

    def __init__(self, aligned: Aligned, fits: Fits) -> None:
        self._aligned, self._fits = aligned, fits
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
        """Extrapolate one event from its recordings at all sizes."""
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
                kernels=self._kernels([event.kernels for event in row], last.name),
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

    def _kernels(self, row: list[Kernels | None], what: str) -> Kernels | None:
        found = [kernels for kernels in row if kernels is not None]
        if len(found) < len(row):
            return None
        return Kernels(*(self._count(list(values), what) for values in zip(*found, strict=True)))

    def _count(self, values: list[int], what: str) -> int:
        if values.count(values[0]) == len(values):
            return values[0]
        return self._checked(self._fits.count(values), what)

    def _checked(self, value: int, what: str) -> int:
        if value > LARGEST:
            raise SizeError(
                f"at size {self._fits.said} {quoted(what)} would need a figure of {value:.1e}, "
                "more than a trace can hold: ask for a smaller size"
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
        return self._fits.seconds(known) if len(known) == len(values) else None

    def _workspace(self, values: list[int | None], op: Op) -> int | None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if known.count(known[0]) == len(known):
            return known[0]
        found = self._by_a_tensor(known, op) if self._fits.is_grid else None
        return self._checked(self._fits.measured(known) if found is None else found, op.name)

    def _by_a_tensor(self, known: list[int], op: Op) -> int | None:
        tensors = {access.tensor for access in (*op.reads, *op.writes)}
        return along_a_tensor(((self._recorded[n], self._nbytes[n]) for n in tensors), known)


# -- does the fit hold at the sizes that it was not made of? -----------------------------------


def _check_fit(aligned: Aligned, sizes: Sequence[int], degree: int) -> None:
    """Check the fit at sizes it was not made of.

    Raises:
        ScalingError: a tensor that matters is farther from the fit than `TOLERANCE`.
    """
    for index, size in enumerate(sizes[: -degree - 1]):
        fit = Fit(curve(sizes[-degree - 1 :], size))
        least = MATTERS * _held_bytes(aligned, index)
        for row in aligned.rows:
            if isinstance(row[-1], Alloc):
                values = [event.nbytes for event in row if isinstance(event, Alloc)]
                off = abs(fit.count(values[-degree - 1 :]) - values[index])
                if off > TOLERANCE * values[index] and off > least:
                    raise ScalingError(_bent(row[-1], sizes, values, degree))


def _bent(alloc: Alloc, sizes: Sequence[int], values: list[int], degree: int) -> str:
    """Word the error for a tensor that does not follow the fit."""
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
    """Return the most that tensors hold at once in one recording."""
    steps = zip(aligned.rows, aligned.frees, strict=False)
    events = ([*map(Free, frees), row[index]] for row, frees in steps)
    held = (e for e in itertools.chain.from_iterable(events) if isinstance(e, (Alloc, Free)))
    return max(used_bytes(held), default=0)
