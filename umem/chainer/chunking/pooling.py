"""Poolings and their gradients on NumPy, a place of the window at a time, without columns.

Sums are over the places of a window in the order of memory, like Chainer's, except if an image has
one window: then NumPy adds in another order, and the last bits may differ. Halves are summed as
float32 if Chainer computes a mean. Results are C-contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.chunking.pieces import (
    CACHED_BYTES,
    Cap,
    Part,
    Sides,
    blocks,
    channels_at_a_time,
    parts,
)
from umem.chainer.chunking.windows import Index, Overlap, Sizes, Windows, overlaps

Array = Any
Overlaps = tuple[Overlap, ...]


class Planes(NamedTuple):
    """The planes of one call: images (n, channels, image...) and outputs (n, channels, outs...).

    Attributes:
        windows: the windows of outputs in images.
        cap: the cap for values that are compared and selected at a time.
    """

    windows: Windows
    cap: Cap

    def gathered(self, shape: Sizes) -> Iterator[tuple[Index, Index, Overlaps]]:
        """Iterate over parts of an output: index of the images, index of the outputs, overlaps."""
        for images, bands in self._planes(shape):
            for band in bands:
                yield images, (*images, *band.ranges), overlaps(self.windows, band.band)

    def scattered(self, shape: Sizes) -> Iterator[tuple[Index, Index, Overlap]]:
        """Iterate as `gathered`, but one kernel offset at a time, over all bands.

        So sums in an image are in the same order, however it is split.
        """
        for images, bands in self._planes(shape):
            found = [overlaps(self.windows, band.band) for band in bands]
            for place in zip(*found, strict=True):
                for band, overlap in zip(bands, place, strict=True):
                    yield images, (*images, *band.ranges), overlap

    def _planes(self, shape: Sizes) -> Iterator[tuple[Index, list[Part]]]:
        """Iterate over planes of some samples and channels, with the bands they are computed in."""
        outs, size = self.windows.outs, prod(self.windows.outs)
        # Two temporary arrays, of any type.
        sides = Sides(kernel=1, others=0, sums=0, itemsize=2 * 8)
        nbytes = min(self.cap.nbytes, CACHED_BYTES)
        total = shape[0] * size
        count = channels_at_a_time(sides, shape[1], total, nbytes)
        positions = max(1, sides.positions(count, total, nbytes))
        bands = list(parts(1, outs, positions))
        for samples in blocks(shape[0], max(1, positions // size)):
            for channels in blocks(shape[1], count):
                yield (samples, channels), bands


def sum_windows(planes: Planes, x: Array, divisor: Any = 1) -> Array:
    """Sum each window of (n, channels, image...); padding counts as zero.

    Args:
        divisor: the divisor of the sums: a number, or an array (outs...).
    """
    y = np.zeros((*x.shape[:2], *planes.windows.outs), x.dtype)
    for images, outputs, found in planes.gathered(y.shape):
        image, target = x[images], y[outputs]
        summed = target if x.dtype != np.float16 else target.astype(np.float32)
        for overlap in found:
            seen = summed[overlap.outs]
            seen += image[overlap.image]
        summed /= _divisor_of(divisor, outputs)
        if summed is not target:
            target[...] = summed
    return y


def sum_back(planes: Planes, y: Array, dtype: Any, divisor: Any = 1) -> Array:
    """Add each value of (n, channels, outs...) to all places of its window: the adjoint of a sum.

    Args:
        dtype: the result's type.
        divisor: the divisor of the values: a number, or an array (outs...).
    """
    x = np.zeros((*y.shape[:2], *planes.windows.image), dtype)
    is_one = isinstance(divisor, int)
    for images, outputs, overlap in planes.scattered(y.shape):
        seen, given = x[images][overlap.image], y[outputs][overlap.outs]
        seen += given if is_one else given / _divisor_of(divisor, outputs)[overlap.outs]
    if is_one and divisor != 1:
        x /= divisor
    return x


def largest(planes: Planes, x: Array) -> tuple[Array, Array]:
    """Find each window's largest value and its place: the first of equal ones, or the first NaN.

    Padding counts as minus infinity. Places are int32, as Chainer's are on a GPU.
    """
    y = np.full((*x.shape[:2], *planes.windows.outs), -np.inf, x.dtype)
    places = np.zeros(y.shape, np.int32)
    for images, outputs, found in planes.gathered(y.shape):
        image, best, at = x[images], y[outputs], places[outputs]
        for overlap in found:
            seen, held = image[overlap.image], best[overlap.outs]
            is_better = ~(seen <= held)
            is_better &= held == held  # NaN stays
            np.copyto(at[overlap.outs], overlap.place, where=is_better)
            np.maximum(held, seen, out=held)
    return y, places


def select(planes: Planes, x: Array, places: Array, otherwise: float) -> Array:
    """Take from each window of ``x`` the value at its place.

    Args:
        places: (n, channels, outs...), each a number of a place in its window.
        otherwise: the value in the padding.
    """
    y = np.full(places.shape, otherwise, x.dtype)
    for images, outputs, found in planes.gathered(y.shape):
        image, target, at = x[images], y[outputs], places[outputs]
        for overlap in found:
            held = target[overlap.outs]
            is_here = at[overlap.outs] == overlap.place
            held[...] = np.where(is_here, image[overlap.image], held)
    return y


def select_back(planes: Planes, y: Array, places: Array, dtype: Any) -> Array:
    """Add each value of ``y`` to the place of its window: the adjoint of `select`."""
    x = np.zeros((*y.shape[:2], *planes.windows.image), dtype)
    zero = y.dtype.type(0)
    for images, outputs, overlap in planes.scattered(y.shape):
        seen, given = x[images][overlap.image], y[outputs][overlap.outs]
        is_here = places[outputs][overlap.outs] == overlap.place
        seen += np.where(is_here, given, zero)
    return x


def _divisor_of(divisor: Any, outputs: Index) -> Any:
    """Return the divisor of some outputs: a number, or the part of an array."""
    return divisor if isinstance(divisor, int) else divisor[outputs[2:]]
