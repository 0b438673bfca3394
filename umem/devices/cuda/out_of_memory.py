"""CUDA's out-of-memory errors, both umem's and CuPy's, so that existing handlers work.

Importing this module imports CuPy.
"""

from __future__ import annotations

from cupy.cuda.memory import OutOfMemoryError as CupyOutOfMemoryError

from umem.errors import LimitError, OutOfMemoryError


class CudaOutOfMemoryError(OutOfMemoryError, CupyOutOfMemoryError):  # type: ignore[misc, unused-ignore]
    """GPU and host together cannot hold an allocation; nothing was allocated."""


class CudaLimitError(CudaOutOfMemoryError, LimitError):
    """An allocation on CUDA would exceed the limit; nothing was allocated."""
