"""Refusals of what CUDA refuses: its own error, and the option that turns them off.

CUDA's own error comes at the moment at which CUDA raises it.
Each refusal says why, and ends with the option that turns all of them off: a right program may
meet one, because umem counts by other means than NVIDIA's compiler and driver do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def hint() -> str:
    """Return the sentence with which every refusal's message ends."""
    return (
        "To accept what CUDA refuses: umem.software_gpu(..., strict=False), umem run --not-strict,"
        " or UMEM_SOFTWARE_GPU=...,not-strict"
    )


def refuse(fail: Callable[[int], object], status: int, why: str) -> NoReturn:
    """Raise CUDA's error for a status, which says why and how to turn it off.

    Args:
        fail: raises CuPy's error for a status.
        status: a value of CUresult or cudaError.
        why: a clause, without a full stop.
    """
    try:
        fail(status)
    except Exception as error:
        error.args = (f"{error}: {why}. {hint()}",)
        raise
    raise AssertionError(f"status {status} is not an error")
