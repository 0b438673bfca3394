"""The windows of a convolution or pooling in its images, and their columns (im2col).

A window at an output position covers the kernel's places in the image; places in the padding belong
to no overlap. So an image is never padded, which would copy it.
Works on arrays of NumPy and of CuPy alike, with any number of axes before the spatial ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

Sizes = tuple[int, ...]
Index = tuple[Any, ...]
Range = tuple[int, int]
REMEMBERED = 2048
"""At most this many overlaps are cached, one for each pair of windows and band; every step needs
the same ones. A guess: some hundred layers, each with its bands."""


class Windows(NamedTuple):
    """The window geometry of one call; each field has one size for each spatial axis.

    Attributes:
        image: the image's size.
        outs: the output's size, the number of windows.
        kernel: the window's size.
        stride: the distance from window to window.
        pad: the padding before the image.
        dilate: the distance from place to place inside a window.
    """

    image: Sizes
    outs: Sizes
    kernel: Sizes
    stride: Sizes
    pad: Sizes
    dilate: Sizes

    @property
    def are_the_image(self) -> bool:
        """Tell whether the windows are the image's own positions in order (a 1x1 kernel)."""
        is_one = {*self.kernel, *self.stride} == {1}
        return is_one and not any(self.pad) and self.outs == self.image


class Overlap(NamedTuple):
    """One kernel offset, and the windows of a band for which it falls inside the image.

    Attributes:
        place: its number, in the order of memory.
        columns: index of the columns whose place is in the image.
        borders: indexes of the other columns of this place.
        outs: like ``columns``, in an array with one value for each window.
        image: their places in the image.
    """

    place: int
    columns: Index
    borders: tuple[Index, ...]
    outs: Index
    image: Index


@lru_cache(REMEMBERED)
def overlaps(windows: Windows, band: tuple[Range, ...]) -> tuple[Overlap, ...]:
    """List the overlaps of a band with the image, one for each kernel offset, in memory order.

    Args:
        windows: the call's windows.
        band: the range of windows along each axis; indexes of outputs and columns are relative to
            it.
    """
    found = []
    for number, place in enumerate(product(*map(range, windows.kernel))):
        inside = [_inside(windows, axis, at, *band[axis]) for axis, at in enumerate(place)]
        outs = tuple(slice(low, high) for low, high, _ in inside)
        image = tuple(
            slice(start, start + (high - low - 1) * step + 1 if high > low else start, step)
            for (low, high, start), step in zip(inside, windows.stride, strict=True)
        )
        borders = tuple((..., *place, *border) for border in _borders(outs, band))
        found.append(Overlap(number, (..., *place, *outs), borders, (..., *outs), (..., *image)))
    return tuple(found)


def _inside(windows: Windows, axis: int, place: int, begin: int, end: int) -> tuple[int, int, int]:
    """Return the range of windows whose kernel offset falls inside the image, and its first
    place.
    """
    step, before = windows.stride[axis], windows.pad[axis] - place * windows.dilate[axis]
    low = max(begin, -(-before // step))
    high = min(end, (windows.image[axis] - 1 + before) // step + 1)
    high = max(low, high)
    return low - begin, high - begin, max(0, low * step - before)


def _borders(outs: Sequence[slice], band: Sequence[Range]) -> list[Index]:
    found: list[Index] = []
    for axis, (part, (begin, end)) in enumerate(zip(outs, band, strict=True)):
        after = (slice(None),) * (len(outs) - axis - 1)
        if min(part.start, end - begin) > 0:
            found.append((*outs[:axis], slice(0, part.start), *after))
        if part.stop < end - begin:
            found.append((*outs[:axis], slice(part.stop, None), *after))
    return found


def fill(columns: Any, image: Any, windows: Windows, band: tuple[Range, ...]) -> None:
    """Copy the image under each window into its column (im2col); padding is zero.

    Args:
        columns: (..., kernel..., band...), the output.
        image: (..., image...), with the same first axes.
        windows: the call's windows.
        band: the range of windows along each axis.
    """
    for overlap in overlaps(windows, band):
        for border in overlap.borders:
            columns[border] = 0
        columns[overlap.columns] = image[overlap.image]


def spread(image: Any, columns: Any, windows: Windows, band: tuple[Range, ...]) -> None:
    """Add each column to the image positions of its window (col2im): the adjoint of `fill`."""
    for overlap in overlaps(windows, band):
        part = image[overlap.image]
        part += columns[overlap.columns]
