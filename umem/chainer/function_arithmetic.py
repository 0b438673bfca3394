"""The arithmetic of Chainer's functions: which are matrix products, and in which type.

CuPy up to 14.2 multiplies stacks of float16 matrices in float32 (``cupy.matmul``, which also
computes convolutions in groups), and requests TF32 only for products of two matrices.
"""

from __future__ import annotations

import sys
from typing import Any

from umem._common.arithmetic import FLOAT16_PRODUCT, FLOAT32, TF32_PRODUCT, of_dtype, of_product

_PRODUCTS = frozenset((
    "Convolution2DFunction", "Convolution2DGradW", "ConvolutionND", "ConvolutionNDGradW",
    "Deconvolution2DFunction", "DeconvolutionND", "LinearFunction", "LinearGradData",
    "LinearGradWeight", "MatMul",
))  # fmt: skip
"""Functions whose work is a product of two matrices, or of the columns of images by one."""
_TF32 = 7
"""CuPy's COMPUTE_TYPE_TF32, cupy/_core/_routines_linalg.pxd."""


def is_product(cls: type) -> bool:
    """Return True if functions of a class are matrix products."""
    return cls.__name__ in _PRODUCTS and cls.__module__.startswith("chainer.")


def arithmetic(func: Any, is_product: bool, outputs: list[Any]) -> str:
    """Return the kind of arithmetic of a call, by the type of its first output."""
    first = outputs[0] if outputs else None
    if first is None:
        return FLOAT32
    if not is_product:
        return of_dtype(first.dtype)
    found = of_product(first.dtype)
    if getattr(func, "groups", 1) > 1 or (func.label == "MatMul" and first.ndim > 2):
        return FLOAT32 if found is FLOAT16_PRODUCT else found
    return TF32_PRODUCT if first.dtype.char == "f" and _in_tf32(first) else found


def _in_tf32(output: Any) -> bool:
    """Return True if CuPy multiplies float32 in TF32: by CUPY_TF32=1, or its setting."""
    core = sys.modules.get("cupy._core")
    if core is None or not type(output).__module__.startswith("cupy"):
        return False
    return bool(core.get_compute_type("f") == _TF32)  # CuPy has no public name for it
