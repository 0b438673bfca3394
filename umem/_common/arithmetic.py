"""Kinds of arithmetic: the number type and, for matrix products, the unit that computes them.

GPUs have tensor cores for matrix products, with a separate rate for each type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32, FLOAT64 = "float32", "float64"
FLOAT64_PRODUCT, TF32_PRODUCT = "float64 product", "tf32 product"
FLOAT16_PRODUCT, BFLOAT16_PRODUCT = "float16 product", "bfloat16 product"
"""Products of 16-bit numbers with sums in float32, as CuPy computes them."""
ARITHMETIC = (
    FLOAT32, FLOAT64, FLOAT64_PRODUCT, TF32_PRODUCT, FLOAT16_PRODUCT, BFLOAT16_PRODUCT
)  # fmt: skip
"""All kinds. `FLOAT32` includes float32 matrix products, which no tensor core computes, and
everything without a kind of its own."""
_DOUBLES = frozenset((np.dtype(np.float64), np.dtype(np.complex128)))
_HALF = np.dtype(np.float16)


def of_dtype(dtype: Any) -> str:
    """Return the arithmetic of an operation that is not a matrix product, by its dtype."""
    return FLOAT64 if dtype in _DOUBLES else FLOAT32


def of_product(dtype: Any) -> str:
    """Return the arithmetic of a matrix product, by the dtype of its operands.

    float32 products use tensor cores (`TF32_PRODUCT`) only if the program asks for it, which the
    dtype cannot tell.
    """
    if dtype in _DOUBLES:
        return FLOAT64_PRODUCT
    if dtype == _HALF:
        return FLOAT16_PRODUCT
    return BFLOAT16_PRODUCT if dtype.name == "bfloat16" else FLOAT32
