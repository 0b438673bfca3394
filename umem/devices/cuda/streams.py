"""Identity of CUDA's streams. Importing this module imports no CuPy."""

from __future__ import annotations

import threading

LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2
"""Handles that name no stream of their own: cudaStreamLegacy, by two numbers, and
cudaStreamPerThread of driver_types.h, which is another stream in each thread."""


def stream_order(handle: int) -> tuple[int, int]:
    """Return a key that handles share if they name the same stream.

    That of the per-thread stream is the calling thread's, as CuPy's pool tells streams apart.
    """
    if handle in LEGACY_STREAMS:
        return 0, 0
    return handle, threading.get_ident() if handle == PER_THREAD_STREAM else 0
