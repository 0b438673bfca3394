"""Identity of CUDA's streams. Importing this module does not import CuPy."""

from __future__ import annotations

import threading

LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2
"""Special stream handles: cudaStreamLegacy, with two numbers, and cudaStreamPerThread of
driver_types.h, which is a different stream in each thread.
"""


def stream_order(handle: int) -> tuple[int, int]:
    """Return a key that handles share if they name the same stream.

    The per-thread stream's key depends on the calling thread, as in CuPy's pool.
    """
    if handle in LEGACY_STREAMS:
        return 0, 0
    return handle, threading.get_ident() if handle == PER_THREAD_STREAM else 0
