"""Products of integers, exact, by matrix products in float32.

NumPy multiplies matrices of integers without BLAS, some hundred times slower than floats, and CuPy
has no simple way to a GPU's instructions for 8 bits. But float32 represents every integer up to
2**24. It rounds neither a product of an input's code (at most 255) and a weight's (at most 127) nor
a sum of `DEPTH` of these, in any order and however a library fuses it: 512 * 255 * 127 is
16,581,120, below 2**24. TF32 should change nothing, because it has 11 bits for a factor and sums in
float32; it has not run on a real GPU. Sums of more products are sums of such tiles in int32.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from chainer.backend import get_array_module

DEPTH = 512
"""At most this many products are summed in float32, so that sums are exact."""
WIDTH = 512
"""Rows of a weight converted to float32 at once: with `DEPTH`, chunks of 1 MiB, which fit a core's
cache. A guess, not measured."""
LARGEST_SUM = 2**31 - 1


class WholeNumbers(Protocol):
    """An integer matrix with values from -127 to 127, whose parts can be read as float32."""

    def part(self, rows: slice, columns: slice) -> Any:
        """Return a block of rows and columns; columns start at a multiple of `DEPTH`."""


def integer_product(codes: Any, weight: WholeNumbers, rows: slice) -> Any:
    """Multiply codes by rows of a weight, with the exact result of int32 arithmetic.

    At most one chunk of the weight, `WIDTH` by `DEPTH`, is float32 at any time.

    Args:
        codes: of shape (m, k), integers from -255 to 255 in float32.
        weight: of k columns; the sum of a row's magnitudes times 255 is at most `LARGEST_SUM`.
        rows: a range of the weight's rows; n of them.

    Returns:
        int32 of shape (m, n): row i has the products of ``codes[i]`` with each row of the weight.
    """
    xp = get_array_module(codes)
    count, depth = codes.shape
    total = xp.empty((count, rows.stop - rows.start), np.int32)
    for left in range(0, depth, DEPTH):
        columns = slice(left, min(left + DEPTH, depth))
        given = codes[:, columns]
        for top in range(rows.start, rows.stop, WIDTH):
            part = slice(top, min(top + WIDTH, rows.stop))
            into = total[:, top - rows.start : part.stop - rows.start]
            product = xp.matmul(given, weight.part(part, columns).T)
            if left:
                into += product.astype(np.int32)
            else:
                into[...] = product
    return total
