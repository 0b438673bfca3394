"""Convolutions, their adjoints and their kernels' gradients in parts, whose columns fit a cap.

All three are products of the same columns, (groups, channels x kernel, positions), in which the
output positions of several samples are side by side: a part is one product for each group.

    outputs                   kernel @ columns
    columns of the adjoint    kernel.T @ outputs
    gradient of the kernel    sum over the parts of outputs @ columns.T

Results are C-contiguous, unlike Chainer's own. On NumPy halves are multiplied and summed as
float32, which is faster. Bits depend on shapes, types, layouts, the cap, and the BLAS as always;
the boundaries of parts depend on nothing else.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.chunking import gpu_windows
from umem.chainer.chunking import windows as host_windows
from umem.chainer.chunking.pieces import (
    CACHED_BYTES,
    Cap,
    Part,
    Sides,
    blocks,
    channels_at_a_time,
    least,
    parts,
)
from umem.chainer.chunking.windows import Windows

Array = Any
FAST_COLUMNS = 512
"""Matrix products of fewer columns are slower for each column; the number itself is a guess, not
measured."""


class ConvolutionCall(NamedTuple):
    """The geometry, cap and array module of one call.

    Attributes:
        xp: NumPy or CuPy.
        windows: the windows of outputs in images.
        groups: the number of groups of channels.
        cap: the cap for its columns and their copies.
        label: its name in messages.
    """

    xp: Any
    windows: Windows
    groups: int
    cap: Cap
    label: str

    def positions_at_a_time(
        self, sides: Sides, channel_count: int, total: int, in_place: bool, is_cached: bool = False
    ) -> int:
        """Return how many output positions are computed at a time under the cap, at least one row.

        If a row takes more than the cap, that is reported once.

        With ``in_place`` a sample's columns are in the image. With ``is_cached`` there are not many
        more than the processor's cache holds.
        """
        size, row = prod(self.windows.outs), least(self.windows.outs)
        fitting = sides.positions(channel_count, total, self.cap.nbytes)
        if in_place and (size >= FAST_COLUMNS or fitting < 2 * size):
            return size  # of one sample
        if fitting < row <= total:
            self.cap.exceeded(sides.nbytes(channel_count, row), self.label)
        if is_cached and self.xp is np:
            cached = CACHED_BYTES // sides.nbytes(channel_count, 1)
            fitting = min(fitting, max(cached, FAST_COLUMNS))
        return max(fitting, row)


def convolve(call: ConvolutionCall, x: Array, kernel: Array, bias: Array | None) -> Array:
    """Convolve images (n, channels, image...) with a kernel (outputs, channels, kernel...).

    Returns (n, outputs, outs...) of the type of ``x``.
    """
    xp, outs = call.xp, call.windows.outs
    y = xp.empty((len(x), len(kernel), *outs), x.dtype)
    columns = Columns(call, x, _computed(xp, x, kernel))
    matrix = _matrix(kernel, call.groups, columns.dtype)
    sides = columns.sides(len(kernel))
    total = len(x) * prod(outs)
    count = call.positions_at_a_time(
        sides, columns.channel_count, total, columns.are_the_image, is_cached=True
    )
    flat = _by_position(y, call.groups)
    for part in parts(len(x), outs, count):
        target = flat[part.samples, :, :, part.positions]
        if part.sample_count == 1:
            _multiply(xp, matrix, columns.of(part), target[0])
        else:
            target[...] = _by_sample(_multiply(xp, matrix, columns.of(part)), part)
        if bias is not None:
            target += bias.reshape(1, call.groups, -1, 1)
    return y


def convolve_back(call: ConvolutionCall, y: Array, kernel: Array, bias: Array | None) -> Array:
    """Apply the adjoint of `convolve`, a deconvolution, to (n, outputs, outs...).

    Returns (n, channels, image...) of the type of ``y``: the gradient of the images.
    """
    xp, groups, windows = call.xp, call.groups, call.windows
    x = xp.zeros((len(y), kernel.shape[1] * groups, *windows.image), y.dtype)
    columns = Columns(call, x, _computed(xp, y, kernel))
    matrix = _matrix(kernel, groups, columns.dtype)
    total, sides = len(y) * prod(windows.outs), columns.sides(len(kernel))
    channel_count = channels_at_a_time(sides, columns.channel_count, total, call.cap.nbytes)
    in_place = columns.are_the_image and _are_ready(xp, y, columns.dtype)
    count = call.positions_at_a_time(sides, channel_count, total, in_place, is_cached=True)
    for part in parts(len(y), windows.outs, count):
        given = _side_by_side(xp, y, part, groups, columns.dtype)
        for channels in blocks(columns.channel_count, channel_count):
            rows = columns.rows(channels)
            columns.add(part, channels, matrix[:, :, rows].transpose(0, 2, 1), given)
        del given  # before the next part's
    if bias is not None:
        x += bias.reshape(1, -1, *(1,) * len(windows.image))
    return x


def kernel_gradient(call: ConvolutionCall, x: Array, y: Array, dtype: Any) -> Array:
    """Compute the gradient of a kernel from images and the gradients of their outputs.

    Returns (outputs, channels, kernel...) of type ``dtype``.
    """
    xp, groups, windows = call.xp, call.groups, call.windows
    output_count, total = y.shape[1], len(x) * prod(windows.outs)
    columns = Columns(call, x, _computed(xp, x, y))
    gradient = xp.zeros(
        (groups, output_count // groups, columns.channel_count * columns.kernel_size),
        np.promote_types(columns.dtype, dtype),
    )
    sides = columns.sides(output_count, sums=columns.kernel_size * output_count)
    channel_count = channels_at_a_time(sides, columns.channel_count, total, call.cap.nbytes)
    in_place = columns.are_the_image and _are_ready(xp, y, columns.dtype)
    count = call.positions_at_a_time(sides, channel_count, total, in_place)
    is_first = True
    for part in parts(len(x), windows.outs, count):
        given = _side_by_side(xp, y, part, groups, columns.dtype)
        for channels in blocks(columns.channel_count, channel_count):
            target = gradient[:, :, columns.rows(channels)]
            seen = columns.of(part, channels).transpose(0, 2, 1)
            if is_first:
                _multiply(xp, given, seen, target)
            else:
                target += _multiply(xp, given, seen)
        is_first = False
        del given, seen  # before the next part's
    shape = (output_count, columns.channel_count, *windows.kernel)
    return gradient.reshape(shape).astype(dtype, copy=False)


# -- columns -------------------------------------------------------------------------------------


class Columns:
    """The columns (im2col) of a call's images, a part at a time, in memory shared by the parts.

    Attributes:
        dtype: the columns' type.
        channel_count: channels in each group.
        kernel_size: the number of places in a kernel.
        are_the_image: whether a sample's columns are the sample itself in memory.
    """

    def __init__(self, call: ConvolutionCall, x: Array, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._call = call
        self._on: Any = host_windows if call.xp is np else gpu_windows
        self.channel_count = x.shape[1] // call.groups
        self.kernel_size = prod(call.windows.kernel)
        self.are_the_image = call.windows.are_the_image and _are_ready(call.xp, x, self.dtype)
        self._images = x.reshape(len(x), call.groups, self.channel_count, *x.shape[2:])
        self._memory: Array = call.xp.empty(0, self.dtype)

    def sides(self, output_count: int, sums: int = 0) -> Sides:
        """Return the sizes of matrix products with these columns."""
        kernel = self.kernel_size * self._call.groups
        return Sides(kernel, output_count, sums, self.dtype.itemsize)

    def rows(self, channels: slice) -> slice:
        """Return the rows of the column matrix that belong to some channels."""
        return slice(channels.start * self.kernel_size, channels.stop * self.kernel_size)

    def of(self, part: Part, channels: slice | None = None) -> Array:
        """Return the columns (im2col) of a part of the images.

        The shape is (groups, channels x kernel, positions).

        Args:
            channels: the channels to take of each group; all by default.
        """
        channels = channels or slice(0, self.channel_count)
        images = self._images[part.samples, :, channels]
        if self.are_the_image and part.sample_count == 1:
            seen = _product_ready(self._call.xp, _flat(images[0], 2), self.dtype)
            return seen[:, :, part.positions]
        found, by_sample = self._room(part, channels)
        self._on.fill(by_sample, images, self._call.windows, part.band)
        return found

    def add(self, part: Part, channels: slice, matrix: Array, given: Array) -> None:
        """Add columns to the image positions that they were taken from (col2im)."""
        images = self._images[part.samples, :, channels]
        if self.are_the_image and part.sample_count == 1:
            _multiply(self._call.xp, matrix, given, _flat(images[0], 2)[:, :, part.positions])
            return
        found, by_sample = self._room(part, channels)
        _multiply(self._call.xp, matrix, given, found)
        self._on.spread(images, by_sample, self._call.windows, part.band)

    def _room(self, part: Part, channels: slice) -> tuple[Array, Array]:
        """Return the columns' memory as a matrix for each group, and as one for each sample."""
        groups, kernel = self._call.groups, self._call.windows.kernel
        count = channels.stop - channels.start
        shape = (groups, count, *kernel, part.sample_count, *part.lengths)
        if prod(shape) > self._memory.size:  # only the first time: no part is larger
            self._memory = self._call.xp.empty(prod(shape), self.dtype)
        room = self._memory[: prod(shape)].reshape(shape)
        sample = 2 + len(kernel)
        axes = (sample, *range(sample), *range(sample + 1, room.ndim))
        return room.reshape(groups, count * self.kernel_size, -1), room.transpose(axes)


# -- matrices ------------------------------------------------------------------------------------


def _computed(xp: Any, *arrays: Array) -> Any:
    """Return the dtype in which arrays are multiplied."""
    dtype = np.result_type(*(a.dtype for a in arrays))
    return np.dtype(np.float32) if xp is np and dtype == np.float16 else dtype


def _matrix(kernel: Array, groups: int, dtype: Any) -> Array:
    """Return a kernel as (groups, outputs, channels x kernel)."""
    return kernel.reshape(groups, len(kernel) // groups, -1).astype(dtype, copy=False)


def _flat(array: Array, leading: int) -> Array:
    """Return an array with the axes after the first ``leading`` ones merged."""
    return array.reshape(*array.shape[:leading], prod(array.shape[leading:]))


def _by_position(y: Array, groups: int) -> Array:
    """Return a C-contiguous result as (samples, groups, outputs, positions)."""
    return y.reshape(len(y), groups, y.shape[1] // groups, prod(y.shape[2:]))


def _by_sample(product: Array, part: Part) -> Array:
    """Return a product (groups, outputs, positions) as (samples, groups, outputs, positions)."""
    shape = (*product.shape[:2], part.sample_count, product.shape[2] // part.sample_count)
    return product.reshape(shape).transpose(2, 0, 1, 3)


def _side_by_side(xp: Any, y: Array, part: Part, groups: int, dtype: Any) -> Array:
    """Return a part of (samples, outputs, outs...) as (groups, outputs, positions), a view if
    possible.
    """
    found = y[(part.samples, slice(None), *part.ranges)]
    found = found.reshape(len(found), groups, -1, *part.lengths)
    found = found.transpose(1, 2, 0, *range(3, found.ndim))
    if found.dtype != dtype:
        found = found.astype(dtype, order="C")  # one copy; reshaping might need another
    return _product_ready(xp, _flat(found, 2), dtype)


def _are_ready(xp: Any, x: Array, dtype: Any) -> bool:
    """Tell whether BLAS can take each sample of (n, channels, image...) without a copy."""
    if xp is not np:
        return True
    sizes, strides = x.shape[2:], x.strides[2:]
    is_flat = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(len(sizes) - 1))
    return x.dtype == dtype and is_flat and x.itemsize in (x.strides[1], strides[-1])


def _product_ready(xp: Any, matrices: Array, dtype: Any) -> Array:
    """Copy matrices unless BLAS can take them: right dtype, rows or columns contiguous."""
    matrices = matrices.astype(dtype, copy=False)
    if xp is np and matrices.itemsize not in matrices.strides[1:]:
        return np.ascontiguousarray(matrices)
    return matrices


def _multiply(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """Multiply matrices group by group."""
    if len(a) == 1:
        product = xp.matmul(a[0], b[0], out=None if out is None else out[0])
        return product[None]
    return xp.matmul(a, b, out=out)
