"""Callbacks for when CuPy's memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem._common.switch import Switch
from umem.devices import current_device
from umem.errors import DeviceError, StateError


class OutOfMemoryCallback(Switch):
    """A callback that is asked when memory runs out; see `on_out_of_memory`.

    Attributes:
        count: how often it was asked.
    """

    def __init__(self, callback: Callable[[int], Any]) -> None:
        self._callback = callback
        self.count = 0
        device: Any = current_device()
        if device.backend != "cupy":
            raise DeviceError(
                "on_out_of_memory asks when CuPy's memory runs out, and a virtual GPU is current"
            )
        # Not at import: CuPy is imported where it is used.
        from umem.devices.cuda import add_callback, remove_callback

        self._end = remove_callback
        add_callback(self._call, device.pools.give_back_everything)

    def _call(self, nbytes: int) -> Any:
        self.count += 1
        return self._callback(nbytes)

    def close(self) -> None:
        """Ask it no more; a second time this has no effect."""
        self.undo()

    def _take_back(self) -> None:
        self._end(self._call)

    def __enter__(self) -> OutOfMemoryCallback:
        if not self.is_on:
            raise StateError("this callback is over: call umem.on_out_of_memory again")
        return self


def on_out_of_memory(callback: Callable[[int], Any]) -> OutOfMemoryCallback:
    """Call a function when CuPy's memory runs out, and try again if it has freed some.

    It is called with the bytes that were asked for, in the thread that asked, once the pools have
    given back what is free; it returns whether to try again, at most 16 times an allocation. It
    applies in all threads, for plain memory, for every mode of umem and for any allocator that the
    program has set (a pool, ``cupy.cuda.malloc_async``, RMM's), until `close` of what is returned,
    or as ``with umem.on_out_of_memory(free_some):`` until the end of the block. Several are called
    in the order in which they were given.

    Args:
        callback: frees memory, such as entries of a cache: ``lambda nbytes: cache.evict(nbytes)``.
            What it allocates itself may fail; it is not asked for that. An error that it raises
            is raised by the allocation.

    Raises:
        TypeError: it cannot be called.
        DeviceError: a virtual GPU is current.
        DeviceNotFoundError: there is no CUDA device.

    Managed memory seldom runs out: when it does, the host's memory has. An allocator that the
    program sets itself afterwards, or for a thread (``cupy.cuda.using_allocator``), asks no
    callback. Cost: 0.04 us an allocation (bench/allocation.py). Never run on a GPU yet.
    """
    if not callable(callback):
        raise TypeError(f"on_out_of_memory: {callback!r} cannot be called")
    return OutOfMemoryCallback(callback)
