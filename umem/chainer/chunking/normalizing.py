"""Batch normalisation some channels at a time, by Chainer's own code, with its bits.

Channels do not mix. NumPy sums the channels of a part as it sums them among all, if arrays are
C-contiguous and there are at least two channels: a single channel's samples would be contiguous
memory. All other calls are computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from chainer.functions.normalization.batch_normalization import GeneralBatchNormalizationImpl

from umem.chainer.chunking.pieces import CACHED_BYTES, Cap

Array = Any
Proceed = Callable[..., Any]
NORMALIZATION = GeneralBatchNormalizationImpl
"""Chainer's implementation for devices without their own library; subclasses, such as ChainerMN's,
may compute anything and are left alone."""
TEMPORARY_COUNT = 6
"""Chainer's code has this many arrays of a part's size at once, its result included."""


def normalize(
    cap: Cap, proceed: Proceed, norm: Any, axis: Any, gamma: Array, x: Array, x_layout: Any,
    xp: Any, expander: Any, beta: Array, eps: float, decay: float, running_mean: Any,
    running_var: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute `GeneralBatchNormalizationImpl.forward` some channels at a time, within a cap.

    Takes its arguments after the cap and the method, ``proceed``, and returns its result. A call
    whose channels cannot be split with the same bits is computed whole.
    """
    running = running_mean, running_var

    def part_of(part: slice) -> Any:
        return proceed(
            norm, axis, gamma[part], x[:, part], x_layout, xp, expander, beta[part], eps, decay,
            *(None if r is None else r[part] for r in running),
        )  # fmt: skip

    arrays = gamma, x, beta, *(r for r in running if r is not None)
    if type(norm) is not NORMALIZATION or not _goes_by_channels(xp, axis, *arrays):
        all_of_it = axis, gamma, x, x_layout, xp, expander, beta, eps, decay, *running
        return tuple(proceed(norm, *all_of_it))
    y = np.empty(x.shape, x.dtype)
    statistics = [np.empty(gamma.shape, gamma.dtype) for _ in range(3)]
    for part in _channels(cap, x):
        found = part_of(part)
        y[:, part] = found[0]
        for whole, value in zip(statistics, found[4:7], strict=True):
            whole[part] = value
        del found  # before the next part's
    return (y, x_layout, *running, *statistics, None)


def normalize_back(
    cap: Cap, proceed: Proceed, norm: Any, axis: Any, gamma: Array, gy: Array, x: Array,
    x_layout: Any, xp: Any, expander: Any, mean: Array, inv_std: Array, eps: float, var: Any,
    forward_data: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute `GeneralBatchNormalizationImpl.backward` some channels at a time, within a cap.

    Takes its arguments after the cap and the method, ``proceed``, and returns its gradients. A call
    whose channels cannot be split with the same bits is computed whole.
    """

    def part_of(part: slice) -> Any:
        return proceed(
            norm, axis, gamma[part], gy[:, part], x[:, part], x_layout, xp, expander, mean[part],
            inv_std[part], eps, None if var is None else var[part], forward_data,
        )  # fmt: skip

    if type(norm) is not NORMALIZATION or not _goes_by_channels(
        xp, axis, gamma, x, gy, mean, inv_std
    ):
        all_of_it = axis, gamma, gy, x, x_layout, xp, expander, mean, inv_std, eps, var
        return tuple(proceed(norm, *all_of_it, forward_data))
    gx = np.empty(x.shape, x.dtype)
    ggamma, gbeta = np.empty_like(gamma), np.empty_like(gamma)
    for part in _channels(cap, x):
        gx[:, part], _, ggamma[part], gbeta[part] = part_of(part)
    return gx, None, ggamma, gbeta


def _goes_by_channels(xp: Any, axis: Any, gamma: Array, x: Array, *others: Array) -> bool:
    """Tell whether each channel gets the same bits in a part of the channels as among all."""
    arrays = gamma, x, *others
    return (
        xp is np
        and gamma.ndim == 1
        and gamma.size >= 2
        and tuple(axis) == (0, *range(2, x.ndim))
        and all(type(a) is np.ndarray and a.dtype == x.dtype for a in arrays)
        and all(a.flags.c_contiguous for a in arrays)
    )


def _channels(cap: Cap, x: Array) -> Iterator[slice]:
    """Split the channels into parts of at least two that fit the cap, if two fit."""
    count = x.shape[1]
    most = max(1, min(cap.nbytes, CACHED_BYTES * TEMPORARY_COUNT) // TEMPORARY_COUNT)
    part_count = max(1, min(count // 2, -(-x.nbytes // most)))
    for number in range(part_count):
        yield slice(number * count // part_count, (number + 1) * count // part_count)
