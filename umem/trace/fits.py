"""Polynomials through what was recorded at some sizes, taken at another.

Workspace over a grid is affine in the bytes of one of the operation's own tensors: NumPy's
temporaries are as large as what an operation reads or writes, and its buffers grow only up to some
size. Over the lengths 16, 32 and 48 the workspace of a softmax is neither a line nor a parabola,
and still a line over the bytes of its scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm, prod
from operator import mul
from typing import NamedTuple

from umem.trace.axes import Nodes, grid, size_text

NOISE, NOISE_BYTES = 0.03, 512
"""Workspace between the outermost sizes may be this far from a line, as a share and in bytes, and
still count as on it."""
OFF = 0.1
"""The larger recorded sizes may be this far from a line, as a share of the largest workspace."""
AS_NEAR = 0.01
"""Two lines whose distances differ by less than this share are equally good."""


class Fit:
    """A polynomial through recorded values, evaluated at one size as a weighted sum.

    The weights (Lagrange's) are whole numbers over one divisor, because a trace has a hundred
    thousand figures.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._divisor = lcm(*(weight.denominator for weight in weights))
        self._weights = [int(weight * self._divisor) for weight in weights]

    def count(self, values: Sequence[int]) -> int:
        """Evaluate a count, rounded up, at least 0."""
        total: int = sum(map(mul, values, self._weights))
        return max(0, -(-total // self._divisor))

    def seconds(self, values: Sequence[float]) -> float:
        """Evaluate a time; if it falls with the size, it is noise, and the mean is returned."""
        if values[-1] <= values[0]:
            return sum(values) / len(values)
        total: float = sum(map(mul, values, self._weights))
        return max(0.0, total / self._divisor)


def curve(sizes: Sequence[int], size: int) -> list[Fraction]:
    """Return the weights of the polynomial through all sizes of one axis."""
    return [_weight(sizes, own, size) for own in sizes]


def _weight(sizes: Sequence[int], own: int, size: int) -> Fraction:
    weight = Fraction(1)
    for other in sizes:
        if other != own:
            weight *= Fraction(size - other, own - other)
    return weight


def surface(nodes: Nodes, point: Sequence[int], outer: bool = False) -> list[Fraction]:
    """Return the weights of the product of each axis's curve, over the points of a grid.

    With ``outer`` the curves are the lines between the smallest and the largest size of an axis.
    """
    along = []
    for sizes, size in zip(nodes.values(), point, strict=True):
        if outer:
            ends = curve((sizes[0], sizes[-1]), size)
            along.append([ends[0], *[Fraction(0)] * (len(sizes) - 2), ends[1]])
        else:
            along.append(curve(sizes, size))
    return [prod(weights, start=Fraction(1)) for weights in itertools.product(*along)]


@dataclass(frozen=True)
class Fits:
    """Extrapolators to one size, one for each kind of figure, fitted to the recorded sizes.

    Attributes:
        fit: extrapolates exact figures, from the values in ``used``.
        used: the slice of recorded values that the fit uses.
        measured: extrapolates workspace.
        rough: extrapolates times.
        said: the size, for errors.
        is_grid: whether workspace may follow a tensor (`along_a_tensor`).
    """

    fit: Fit
    used: slice
    measured: Callable[[Sequence[int]], int]
    rough: Fit
    said: str
    is_grid: bool = False

    @classmethod
    def over_sizes(cls, sizes: Sequence[int], size: int, degree: int) -> Fits:
        """Fit along one axis: a line or parabola through the largest recorded sizes."""
        used = slice(-degree - 1, None)
        fit = Fit(curve(sizes[used], size))
        pairs = list(itertools.pairwise(sizes))[:-1] if degree == 1 else []
        lines = [Fit(curve(pair, size)) for pair in pairs]

        def steepest(values: Sequence[int]) -> int:
            found = map(Fit.count, lines, itertools.pairwise(values))
            return max((fit.count(values[used]), *found))

        return cls(fit, used, steepest, fit, str(size), False)

    @classmethod
    def over_grid(cls, nodes: Nodes, point: Sequence[int]) -> Fits:
        """Fit over a grid: a line through two sizes of an axis, a parabola through three."""
        fit, lines = Fit(surface(nodes, point)), Fit(surface(nodes, point, outer=True))
        between = [
            (place, Fit(surface(nodes, each, outer=True)))
            for place, each in enumerate(grid(nodes))
            if any(size not in (s[0], s[-1]) for size, s in zip(each, nodes.values(), strict=True))
        ]

        def straightest(values: Sequence[int]) -> int:
            bent = any(
                abs(line.count(values) - values[place]) > max(NOISE_BYTES, NOISE * values[place])
                for place, line in between
            )
            return (fit if bent else lines).count(values)

        said = size_text(dict(zip(nodes, point, strict=True)))
        return cls(fit, slice(None), straightest, lines, said, True)

    def count(self, values: Sequence[int]) -> int:
        """Extrapolate an exact figure: bytes, operations, offsets in a tensor."""
        return self.fit.count(values[self.used])

    def seconds(self, values: Sequence[float]) -> float:
        """Extrapolate a measured time."""
        return self.rough.seconds(values[self.used])


# -- workspace over a grid ---------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of workspace over a tensor's bytes, and its distance from the measurements."""

    off: float
    slope: float
    start: float

    def at(self, nbytes: int) -> int:
        """Evaluate the workspace for a tensor's bytes, at least 0."""
        return max(0, round(self.start + self.slope * nbytes))


def along_a_tensor(
    tensors: Iterable[tuple[Sequence[int], int]], workspace: Sequence[int]
) -> int | None:
    """Extrapolate workspace as a function of one tensor's bytes; None if no tensor explains it.

    Where several tell it as well, the most that they say.

    Args:
        tensors: of each tensor of the operation the bytes at the recorded sizes, and at the size.
        workspace: measured at the recorded sizes.
    """
    lines = [(_line(recorded, workspace), nbytes) for recorded, nbytes in tensors]
    found = [(line, nbytes) for line, nbytes in lines if line is not None]
    nearest = min((line.off for line, _ in found), default=0.0)
    most = max(workspace)
    if not found or nearest > OFF * most:
        return None
    return max(line.at(n) for line, n in found if line.off <= nearest + AS_NEAR * most)


def _line(recorded: Sequence[int], workspace: Sequence[int]) -> _Line | None:
    """Fit a line through a tensor's two largest sizes; None if it falls or the sizes are equal."""
    pairs = sorted(zip(recorded, workspace, strict=True))
    top, most = pairs[-1]
    below = [pair for pair in pairs if pair[0] < top]
    if not below or below[-1][1] > most:
        return None
    slope = (most - below[-1][1]) / (top - below[-1][0])
    start = most - slope * top
    larger = pairs[len(pairs) // 2 :] if len(pairs) > 3 else pairs
    off = max(abs(start + slope * nbytes - each) for nbytes, each in larger)
    return _Line(off, slope, start)
