"""The arithmetic of operations: by its type and, of matrix products, by the unit that computes it.

GPUs have tensor cores for products of matrices, and a rate of their own for each type of these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32, FLOAT64 = "float32", "float64"
FLOAT64_PRODUCT, TF32_PRODUCT = "float64 product", "tf32 product"
FLOAT16_PRODUCT, BFLOAT16_PRODUCT = "float16 product", "bfloat16 product"
"""Products of 16-bit numbers whose sums are float32, as CuPy asks for."""
ARITHMETIC = (
    FLOAT32, FLOAT64, FLOAT64_PRODUCT, TF32_PRODUCT, FLOAT16_PRODUCT, BFLOAT16_PRODUCT
)  # fmt: skip
"""All kinds. `FLOAT32` includes matrix products of float32, which no tensor core computes, and
whatever else has no kind of its own."""
_DOUBLES = frozenset((np.dtype(np.float64), np.dtype(np.complex128)))
_HALF = np.dtype(np.float16)


def of_dtype(dtype: Any) -> str:
    """Return the arithmetic of what is no matrix product, by the dtype of its numbers."""
    return FLOAT64 if dtype in _DOUBLES else FLOAT32


def of_product(dtype: Any) -> str:
    """Return the arithmetic of a matrix product, by the dtype of its operands.

    Products of float32 go by tensor cores (`TF32_PRODUCT`) only where the program says so, which a
    dtype does not.
    """
    if dtype in _DOUBLES:
        return FLOAT64_PRODUCT
    if dtype == _HALF:
        return FLOAT16_PRODUCT
    return BFLOAT16_PRODUCT if dtype.name == "bfloat16" else FLOAT32
