"""Raises CUDA's own errors for refusals, with the option that turns them off.

Each error is raised at the same moment as in CUDA. Its message gives the reason, and ends with the
option that turns off all refusals: a correct program may meet one, because umem counts differently
from NVIDIA's compiler and driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def hint() -> str:
    """Return the last sentence of every refusal's message."""
    return (
        "To accept what CUDA refuses: umem.software_gpu(..., strict=False), umem run --not-strict,"
        " or UMEM_SOFTWARE_GPU=...,not-strict"
    )


def refuse(fail: Callable[[int], object], status: int, why: str) -> NoReturn:
    """Raise CUDA's error for a status, with the reason and the option that turns it off.

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
