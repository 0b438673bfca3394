"""Callbacks that free memory when CuPy's allocator runs out, after which it tries again.

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
"""Tries of one allocation for as long as a callback says that it has freed something: an end for
callbacks that say so without freeing. A choice that no measurement supports."""
Callback = Callable[[int], Any]
callbacks: tuple[Callback, ...] = ()
"""In the order in which they were given; replaced as a whole, for threads that read it."""
_OUT = MemoryError, cuda_runtime.CUDARuntimeError
_in_callback = threading.local()


def give_back() -> None:
    """Free the free blocks of pools that the one that has run out does not know.

    A device takes the place of this, which does nothing, with the first callback.
    """


class Retrying:
    """An allocator that asks the callbacks for memory when it runs out.

    CuPy's default pool and those of umem have given their free blocks back by then. An allocation
    of a callback itself that fails asks no callback. What counts as running out: a MemoryError, of
    which CuPy's pools raise their own, and RMM Python's; and CUDA's error, which
    ``cupy.cuda.malloc_async`` and allocators without a pool pass on.

    Args:
        inner: the allocator below.
    """

    def __init__(self, inner: Malloc) -> None:
        self.inner = inner

    def malloc(self, nbytes: int) -> Any:
        """Allocate; raises what the allocator below raises once no callback frees anything."""
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
    """Tell whether memory has run out, of the errors that CUDA has beside that."""
    return getattr(error, "status", OUT_OF_MEMORY) == OUT_OF_MEMORY


def _call_callbacks(nbytes: int) -> bool:
    """Call the callbacks in turn; tell whether one has freed something. Its error ends that."""
    _in_callback.now = True
    try:
        return any([callback(nbytes) for callback in callbacks])
    finally:
        _in_callback.now = False


def retrying(malloc: Malloc) -> Malloc:
    """Return an allocator that asks the callbacks; ``malloc`` itself where there are none."""
    return malloc if not callbacks or bare(malloc) is not malloc else Retrying(malloc).malloc


def bare(malloc: Malloc) -> Malloc:
    """Return the allocator below one of `retrying`; another one itself."""
    own = malloc.__self__ if isinstance(malloc, MethodType) else None
    return own.inner if isinstance(own, Retrying) else malloc
