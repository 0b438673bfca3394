"""Callbacks for when CuPy's memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem._common.switch import Switch
from umem.devices import current_device
from umem.errors import DeviceError, StateError


class OutOfMemoryCallback(Switch):
    """A callback for when memory runs out; see `on_out_of_memory`.

    Attributes:
        count: number of calls so far.
    """

    def __init__(self, callback: Callable[[int], Any]) -> None:
        self._callback = callback
        self.count = 0
        device: Any = current_device()
        if device.backend != "cupy":
            raise DeviceError("on_out_of_memory is for CuPy's memory, but a virtual GPU is current")
        # Not at import: CuPy is imported where it is used.
        from umem.devices.cuda import add_callback, remove_callback

        self._end = remove_callback
        add_callback(self._call, device.pools.give_back_everything)

    def _call(self, nbytes: int) -> Any:
        self.count += 1
        return self._callback(nbytes)

    def close(self) -> None:
        """Stop calling it; a second `close` has no effect."""
        self.undo()

    def _take_back(self) -> None:
        self._end(self._call)

    def __enter__(self) -> OutOfMemoryCallback:
        if not self.is_on:
            raise StateError("this callback is closed: call umem.on_out_of_memory again")
        return self


def on_out_of_memory(callback: Callable[[int], Any]) -> OutOfMemoryCallback:
    """Call a function when CuPy's memory runs out, and retry if it has freed some.

    The callback applies to all threads, to plain memory, to every mode of umem and to any allocator
    that the program has set before (a pool, ``cupy.cuda.malloc_async``, RMM's). It does not apply
    to an allocator that the program sets afterwards, or for one thread
    (``cupy.cuda.using_allocator``). It ends with `close` of the returned object, or with the block
    of ``with umem.on_out_of_memory(free_some):``. Several callbacks are called in the order in
    which they were given.

    Managed memory seldom runs out; if it does, host memory is full. Cost: 0.04 us an allocation
    (bench/allocation.py). Never run on a GPU yet.

    Args:
        callback: a function that frees memory, such as entries of a cache:
            ``lambda nbytes: cache.evict(nbytes)``. umem first gives back the pools' free blocks,
            then calls it with the requested bytes in the thread that allocates. It returns
            whether to retry, at most 16 times an allocation. Its own allocations may fail, and do
            not call it again. The allocation raises any error that it raises.

    Raises:
        TypeError: ``callback`` is not callable.
        DeviceError: a virtual GPU is current.
        DeviceNotFoundError: there is no CUDA device.
    """
    if not callable(callback):
        raise TypeError(f"on_out_of_memory: callback must be callable; got {callback!r}")
    return OutOfMemoryCallback(callback)
