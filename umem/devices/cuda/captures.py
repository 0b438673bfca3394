"""Tells whether a given stream, or any stream, is being captured.

While a stream is captured, in any mode, cudaDeviceSynchronize fails and ends the capture (CUDA C++
Programming Guide, "Prohibited and Unhandled Operations"); cudaFree fails too, unless the capture's
mode is relaxed or it is local to another thread. cudaThreadExchangeStreamCaptureMode lifts the
second rule for the calling thread, not the first. So code checks here before it waits or frees. The
software GPU has the first rule for every device; none of this was tried on a real one.

CUDA has no list of streams. CuPy's streams are remembered when their capture begins. Captures that
another library begins on a non-blocking stream are not found, nor captures that begin after the
check.

Importing this module imports CuPy.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import cupy
from cupy.cuda import runtime

CAPTURE_IMPLICIT = 906  # another stream captures, so the legacy stream cannot be used
LEGACY = 0
_begun: dict[int, weakref.ref[Any]] = {}
"""CuPy's streams by address, from the beginning of their capture until its end is noticed."""


def is_captured(stream: int | None = None) -> bool:
    """Tell whether a stream, by default the current one, is being captured.

    Also true for the legacy stream while another stream's capture makes it unusable.
    """
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        if error.status == CAPTURE_IMPLICIT:
            return True
        raise


def is_any_captured() -> bool:
    """Tell whether any stream is being captured, by any thread."""
    for address, stream in list(_begun.items()):
        if stream() is not None and is_captured(address):
            return True
        _begun.pop(address, None)
    return is_captured(LEGACY) or is_captured()


def follow_captures() -> None:
    """Remember CuPy's streams whose capture begins from now on; a second call does nothing.

    Patches CuPy's private base class of streams, because there is no hook for captures.
    """
    streams: Any = cupy.cuda.stream._BaseStream
    begin = streams.begin_capture
    if hasattr(begin, "followed_by_umem"):
        return

    @functools.wraps(begin)
    def begin_capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begun[self.ptr] = weakref.ref(self)  # before: other threads may ask meanwhile
        return begin(self, *args, **kwargs)

    begin_capture.followed_by_umem = True  # type: ignore[attr-defined]
    streams.begin_capture = begin_capture
