"""JPEG files as a dataset, decoded at a reduced size where that is enough.

A JPEG decoder can leave out the fine structure of each 8x8 block of pixels: an image of half the
height and width takes a quarter of the memory, and about half of the time. That is not exact: the
image differs from a full-size one that was resized by other means.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from umem._common.extras import needed
from umem._common.files import open_regular, reason
from umem._common.printable import short
from umem.data.dataset_mixin import DatasetMixin
from umem.errors import DataError, FileError, SizeError

MOST_PIXELS = 1 << 28
"""Images of more pixels are refused: a file of a kilobyte can claim 4 thousand million, which would
take 12 GiB."""
_COLOURS = {1: "GRAY", 3: "RGB"}
StrPath = str | os.PathLike[str]


class JpegImages(DatasetMixin):
    """A dataset of JPEG files, as `chainer.datasets.ImageDataset` is with Pillow.

    An item is an array (channels, height, width) with values from 0 to 255. At full size its bits
    equal Pillow's if both use the same libjpeg-turbo. As in Chainer, the camera's orientation tag
    is not applied. Each request reads and decodes the file; other threads wait meanwhile, because
    simplejpeg 1.9 holds Python's lock.

    Args:
        paths: the paths of the files; or the name of a text file with one path a line.
        root: the folder that the paths are relative to.
        dtype: dtype of the arrays. numpy.uint8 takes a quarter of the memory, in a cache too.
        channels: 1 for grey, 3 for red, green and blue; None: as in each file.
        reduce: 2, 4 or 8 decodes at a half, a quarter or an eighth of height and width, rounded
            up. Not exact.
        at_least: (height, width), or one number for both. Decodes at the smallest number of eighths
            of the full size that is at least this; a smaller image at full size. Not exact.

    Raises:
        SizeError: ``channels``, ``reduce`` or ``at_least`` is invalid, or both of the last two are
            given.
        FileError: the text file cannot be read.
        MissingDependencyError: simplejpeg is not installed.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        root: StrPath = ".",
        dtype: npt.DTypeLike = np.float32,
        *,
        channels: int | None = None,
        reduce: int = 1,
        at_least: int | tuple[int, int] | None = None,
    ) -> None:
        _simplejpeg()
        if channels not in (None, *_COLOURS):
            raise SizeError(f"channels must be 1, 3 or None; got {channels!r}")
        if reduce not in (1, 2, 4, 8):
            raise SizeError(f"reduce must be 1, 2, 4 or 8; got {reduce!r}")
        if reduce != 1 and at_least is not None:
            raise SizeError("give reduce or at_least, not both")
        self._paths = _listed(paths)
        self._root, self._dtype, self._channels = Path(root), np.dtype(dtype), channels
        self._reduce, self._at_least = reduce, _pair(at_least)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def exact(self) -> bool:
        """Tell whether images are decoded at full size, without ``reduce`` and ``at_least``."""
        return self._reduce == 1 and self._at_least is None

    def get_example(self, i: int) -> npt.NDArray[Any]:
        """Decode image ``i``.

        Raises:
            FileError: the file cannot be read. DataError: the image cannot be decoded, is CMYK or
                is too large. The message names the item and its path.
        """
        path = self._root / self._paths[i]
        try:
            with open_regular(path) as file:
                data = file.read()
        except (OSError, ValueError) as error:
            raise FileError(f"item {i}, {short(path)}: {reason(error)}") from error
        try:
            return self._decoded(data)
        except ValueError as error:
            raise DataError(
                f"item {i}, {short(path)}: the image cannot be decoded: {short(str(error))}. "
                "Replace the file, or leave the item out"
            ) from error

    def _decoded(self, data: bytes) -> npt.NDArray[Any]:
        """Decode a JPEG file at the smallest size that satisfies ``reduce`` and ``at_least``.

        Returns:
            an array of shape (channels, height, width).

        Raises:
            ValueError: the image is CMYK, or has more than `MOST_PIXELS` pixels.
        """
        jpeg = _simplejpeg()
        height, width, kind, _ = jpeg.decode_jpeg_header(data)
        if kind in ("CMYK", "YCCK"):
            raise ValueError(f"it is {kind}, not grey or RGB")
        low, wide = self._least(height, width)
        smaller = {"min_height": low, "min_width": wide}
        height, width, *_ = jpeg.decode_jpeg_header(data, **smaller)
        if height * width > MOST_PIXELS:
            raise ValueError(f"its header says {height} x {width} pixels")
        colour = _COLOURS[self._channels or (1 if kind == "Gray" else 3)]
        pixels = jpeg.decode_jpeg(data, colorspace=colour, **smaller)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=self._dtype)

    def _least(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest height and width that the decoder may return."""
        if self._at_least is not None:
            return self._at_least
        return -(-height // self._reduce), -(-width // self._reduce)


class LabeledJpegImages(DatasetMixin):
    """A dataset of JPEG files with labels, as `chainer.datasets.LabeledImageDataset` is.

    An item is a pair: an image as in `JpegImages`, and its label as a zero-dimensional array.

    Args:
        pairs: pairs of a path and a whole number; or the name of a text file with one pair a line,
            separated by white space.
        root: see `JpegImages`.
        dtype: see `JpegImages`.
        label_dtype: dtype of the labels.
        **how: ``channels``, ``reduce`` and ``at_least``; see `JpegImages`.

    Raises:
        DataError: a line is not such a pair. Otherwise as `JpegImages`.
    """

    def __init__(
        self,
        pairs: StrPath | Sequence[tuple[StrPath, int]],
        root: StrPath = ".",
        dtype: npt.DTypeLike = np.float32,
        label_dtype: npt.DTypeLike = np.int32,
        **how: Any,
    ) -> None:
        found = _labelled(pairs)
        self._images = JpegImages([path for path, _ in found], root, dtype, **how)
        self._labels = np.array([label for _, label in found], label_dtype)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def exact(self) -> bool:
        """Tell whether images are decoded at full size."""
        return self._images.exact

    def get_example(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Decode image ``i``; see `JpegImages.get_example`."""
        return self._images.get_example(i), np.array(self._labels[i])


def _lines(path: StrPath) -> list[tuple[int, str]]:
    """Return the non-empty lines of a text file, each with its number."""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except (OSError, ValueError) as error:
        raise FileError(f"{short(Path(path))}: cannot read the list: {reason(error)}") from error
    lines = (line.strip() for line in text.splitlines())
    return [(number, line) for number, line in enumerate(lines, 1) if line]


def _listed(paths: StrPath | Sequence[StrPath]) -> list[StrPath]:
    if not isinstance(paths, (str, os.PathLike)):
        return [*paths]
    return [line for _, line in _lines(paths)]


def _labelled(pairs: StrPath | Sequence[tuple[StrPath, int]]) -> list[tuple[StrPath, int]]:
    if not isinstance(pairs, (str, os.PathLike)):
        return [*pairs]
    return [_labelled_line(pairs, number, line) for number, line in _lines(pairs)]


def _labelled_line(path: StrPath, number: int, line: str) -> tuple[StrPath, int]:
    try:
        name, label = line.split()
        return name, int(label)
    except ValueError:
        raise DataError(
            f"{short(Path(path))}, line {number}: not a path without spaces and a whole "
            f"number: {short(line)}; give pairs where paths have spaces"
        ) from None


def _pair(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2 or not all(isinstance(n, (int, np.integer)) and n > 0 for n in pair):
        raise SizeError(f"at_least must be (height, width) in pixels, above zero; got {size!r}")
    return int(pair[0]), int(pair[1])


def _simplejpeg() -> Any:
    return needed("simplejpeg", "data", "JPEG files are decoded with")
