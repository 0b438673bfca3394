"""Calls callbacks that free memory when CuPy's allocator runs out, then retries.

Importing this module imports CuPy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

# From cupy.cuda: an import from cupy.cuda.runtime would replace the module by a copy.
from cupy.cuda import runtime as cuda_runtime

from umem.devices.cuda.driver import OUT_OF_MEMORY, Malloc

MOST_TRIES = 16
"""The most tries of one allocation while callbacks report that they freed something: a limit for
callbacks that report it without freeing. A choice that no measurement supports.
"""
Callback = Callable[[int], Any]
callbacks: tuple[Callback, ...] = ()
"""In the order of registration; replaced as a whole, for threads that read it."""
_OUT = MemoryError, cuda_runtime.CUDARuntimeError
_in_callback = threading.local()


def give_back() -> None:
    """Free the free blocks of pools that the exhausted pool does not know.

    Does nothing; a device replaces it with the first callback.
    """


class Retrying:
    """An allocator that calls the callbacks when memory runs out.

    CuPy's default pool and umem's pools have freed their free blocks by then. A failed allocation
    inside a callback calls no callback. Running out means a MemoryError, which CuPy's pools
    subclass and RMM raises itself, or CUDA's error, which ``cupy.cuda.malloc_async`` and allocators
    without a pool pass on.

    Args:
        inner: the allocator below.
    """

    def __init__(self, inner: Malloc) -> None:
        self.inner = inner

    def malloc(self, nbytes: int) -> Any:
        """Allocate; raises the inner allocator's error once no callback frees anything."""
        # No error is kept beyond its handler: its traceback would keep the callers' arrays alive.
        try:
            return self.inner(nbytes)
        except _OUT as error:
            if not (_is_out(error) and callbacks) or getattr(_in_callback, "now", False):
                raise
        give_back()
        for _ in range(MOST_TRIES):
            try:
                return self.inner(nbytes)
            except _OUT as error:
                if not (_is_out(error) and _call_callbacks(nbytes)):
                    raise
        return self.inner(nbytes)


def _is_out(error: Exception) -> bool:
    """Tell whether an error means out of memory, unlike CUDA's other errors."""
    return getattr(error, "status", OUT_OF_MEMORY) == OUT_OF_MEMORY


def _call_callbacks(nbytes: int) -> bool:
    """Call all callbacks in turn; tell whether one has freed something. An error ends the calls."""
    _in_callback.now = True
    try:
        return any([callback(nbytes) for callback in callbacks])
    finally:
        _in_callback.now = False


def retrying(malloc: Malloc) -> Malloc:
    """Return an allocator that calls the callbacks; ``malloc`` itself if there are none."""
    return malloc if not callbacks or bare(malloc) is not malloc else Retrying(malloc).malloc


def bare(malloc: Malloc) -> Malloc:
    """Return the inner allocator of `retrying`; any other allocator itself."""
    own = malloc.__self__ if isinstance(malloc, MethodType) else None
    return own.inner if isinstance(own, Retrying) else malloc
