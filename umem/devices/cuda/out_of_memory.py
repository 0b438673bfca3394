"""CUDA's out-of-memory errors: ours and CuPy's at once, so that existing handlers work.

Importing this module imports CuPy.
"""

from __future__ import annotations

from cupy.cuda.memory import OutOfMemoryError as CupyOutOfMemoryError

from umem.errors import LimitError, OutOfMemoryError


class CudaOutOfMemoryError(OutOfMemoryError, CupyOutOfMemoryError):  # type: ignore[misc, unused-ignore]
    """Device and host together cannot hold an allocation; nothing was allocated."""


class CudaLimitError(CudaOutOfMemoryError, LimitError):
    """An allocation on CUDA would pass the limit that was set; nothing was allocated."""
