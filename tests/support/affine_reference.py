"""What a quantised layer has to compute, written from the papers alone, in int64 and loops.

Jacob et al. 2018 (arXiv 1712.05877), section 2: a number is r = S (q - Z), with Z the code of
zero; a product of matrices is S1 S2 sum((q1 - Z1) (q2 - Z2)), the sum in int32 (equations 1 to 4).
Krishnamoorthi 2018 (arXiv 1806.08342), sections 2.1, 2.2 and 3.1.1: asymmetric codes of a tensor
for activations, symmetric codes a channel for weights.
"""

import numpy as np


def affine(least, largest, bits):
    """The scale and the code of zero of a range, which is widened to have zero in it."""
    least, largest = min(float(least), 0.0), max(float(largest), 0.0)
    levels = 2**bits - 1
    scale = (largest - least) / levels
    zero = min(max(round(-least / scale), 0), levels)
    return scale, zero


def codes_of(values, scale, zero, bits):
    """round(r / S) + Z, clamped to the codes that there are; int64."""
    q = np.rint(np.asarray(values, np.float64) / scale) + zero
    return np.clip(q, 0, 2**bits - 1).astype(np.int64)


def symmetric(rows, bits):
    """Codes (int64) and a scale a row, 1 for a row of zeros: the largest magnitude is a code."""
    rows = np.asarray(rows, np.float64)
    largest = 2 ** (bits - 1) - 1
    scales = np.ones(len(rows))
    codes = np.zeros(rows.shape, np.int64)
    for i, row in enumerate(rows):
        magnitude = max((abs(v) for v in row.ravel()), default=0.0)
        if magnitude:
            scales[i] = magnitude / largest
            codes[i] = np.clip(np.rint(row / scales[i]), -largest, largest)
    return codes, scales


def linear_sums(x, zero, w):
    """Sums of (x - zero) w, int64 (n, m) that int32 has; x (n, k) and w (m, k) are codes."""
    x, w = np.asarray(x, np.int64), np.asarray(w, np.int64)
    y = np.zeros((len(x), len(w)), np.int64)
    for i in range(len(x)):
        for o in range(len(w)):
            y[i, o] = ((x[i] - zero) * w[o]).sum(dtype=np.int64)
    assert np.abs(y).max(initial=0) < 2**31
    return y


def convolution_sums(x, zero, w, stride=(1, 1), pad=(0, 0), dilate=(1, 1), groups=1):
    """Sums of a convolution of codes; what is padded is the code of zero, whose share is none.

    x (n, c, h, w), w (o, c / groups, kh, kw), both int64; (n, o, out_h, out_w) int64.
    """
    x, w = np.asarray(x, np.int64), np.asarray(w, np.int64)
    n, c, h, width = x.shape
    o, per, kh, kw = w.shape
    assert per * groups == c and o % groups == 0
    out_h = (h + 2 * pad[0] - (kh - 1) * dilate[0] - 1) // stride[0] + 1
    out_w = (width + 2 * pad[1] - (kw - 1) * dilate[1] - 1) // stride[1] + 1
    padded = np.full((n, c, h + 2 * pad[0], width + 2 * pad[1]), zero, np.int64)
    padded[:, :, pad[0] : pad[0] + h, pad[1] : pad[1] + width] = x
    y = np.zeros((n, o, out_h, out_w), np.int64)
    for channel in range(o):
        first = channel // (o // groups) * per
        for i in range(out_h):
            for j in range(out_w):
                top, left = i * stride[0], j * stride[1]
                seen = padded[
                    :,
                    first : first + per,
                    top : top + (kh - 1) * dilate[0] + 1 : dilate[0],
                    left : left + (kw - 1) * dilate[1] + 1 : dilate[1],
                ]
                y[:, channel, i, j] = ((seen - zero) * w[channel]).sum(
                    axis=(1, 2, 3), dtype=np.int64
                )
    return y
