"""Quantised layers from the formulas of the papers, in loops and int64; nothing of umem's."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def weight_codes(weight: Array, largest: int) -> tuple[Array, Array]:
    """Codes and scales a row, symmetric (Krishnamoorthi 2018, section 2.2)."""
    codes, scales = np.zeros(weight.shape, np.int64), np.ones(len(weight), np.float32)
    for row, numbers in enumerate(weight.astype(np.float32)):
        most = np.float32(np.abs(numbers).max())
        if most > 0:
            scales[row] = most / np.float32(largest)
            codes[row] = np.clip(np.round(numbers / scales[row]), -largest, largest)
    return codes, scales


def range_of(low: float, high: float, levels: int) -> tuple[np.float32, int]:
    """Scale and zero point of a range with zero in it (Jacob et al. 2018, section 3)."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    scale = np.float32((high - low) / levels)
    return scale, int(np.clip(np.round(-low / float(scale)), 0, levels))


def input_codes(x: Array, scale: np.float32, zero: int, levels: int) -> Array:
    """The codes themselves, from 0 to ``levels``."""
    return np.clip(np.round(x.astype(np.float32) / scale) + zero, 0, levels).astype(np.int64)


def products(codes: Array, zero: int, weight: Array) -> Array:
    """sum((q1 - Z1) * q2), one number after the other (equation 4 with Z2 = 0); then int32."""
    found = np.zeros((len(codes), len(weight)), np.int64)
    for row, column in np.ndindex(*found.shape):
        found[row, column] = sum(
            (int(a) - zero) * int(b) for a, b in zip(codes[row], weight[column], strict=True)
        )
    assert np.abs(found).max(initial=0) < 2**31
    return found.astype(np.int32)


def linear(x: Array, weight: Array, bias: Array | None, low: float, high: float, largest: int = 127,
           levels: int = 255) -> Array:  # fmt: skip
    """A linear layer whose input ranges from low to high."""
    scale, zero = range_of(low, high, levels)
    codes, scales = weight_codes(weight, largest)
    sums = products(input_codes(x, scale, zero, levels), zero, codes)
    y = sums.astype(np.float32) * (scale * scales)
    return y if bias is None else y + bias.astype(np.float32)


def convolution(x: Array, weight: Array, bias: Array | None, low: float, high: float,
                stride: tuple[int, int], pad: tuple[int, int], dilate: tuple[int, int],
                groups: int, largest: int = 127, levels: int = 255) -> Array:  # fmt: skip
    """A convolution, output by output."""
    scale, zero = range_of(low, high, levels)
    outs, ins, *kernel = weight.shape
    codes, scales = weight_codes(weight.reshape(outs, -1), largest)
    padded = np.full((*x.shape[:2], *(x.shape[2 + a] + 2 * pad[a] for a in (0, 1))), zero)
    inside = tuple(slice(pad[a], pad[a] + x.shape[2 + a]) for a in (0, 1))
    padded[:, :, inside[0], inside[1]] = input_codes(x, scale, zero, levels)
    size = [
        (padded.shape[2 + a] - dilate[a] * (kernel[a] - 1) - 1) // stride[a] + 1 for a in (0, 1)
    ]
    y = np.zeros((len(x), outs, *size), np.float32)
    for sample, out, i, j in np.ndindex(*y.shape):
        group = out // (outs // groups)
        corner = (i * stride[0], j * stride[1])
        seen = padded[sample, group * ins : (group + 1) * ins][
            :,
            corner[0] : corner[0] + dilate[0] * (kernel[0] - 1) + 1 : dilate[0],
            corner[1] : corner[1] + dilate[1] * (kernel[1] - 1) + 1 : dilate[1],
        ]
        total = int(((seen - zero).reshape(-1) * codes[out]).sum())
        y[sample, out, i, j] = np.float32(total) * (scale * scales[out])
        if bias is not None:
            y[sample, out, i, j] += np.float32(bias[out])
    return y


def group_weight(weight: Array, group: int) -> Array:
    """What 4 bits with a multiplier a group stand for, number by number (Dai et al. 2021)."""
    found = np.zeros(weight.shape, np.float32)
    for row, numbers in enumerate(weight.astype(np.float32)):
        parts = [numbers[at : at + group] for at in range(0, len(numbers), group)]
        wanted = [np.float32(np.abs(part).max()) / np.float32(7) for part in parts]
        scale = max(wanted) / np.float32(18)
        if scale == 0:
            continue
        done = []
        for part, each in zip(parts, wanted, strict=True):
            multiplier = np.clip(np.round(each / scale), 1, 18).astype(np.float32)
            codes = np.clip(np.round(part / (multiplier * scale)), -7, 7)
            done.append((codes * multiplier) * scale)
        found[row] = np.concatenate(done)
    return found
