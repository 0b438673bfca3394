"""The parameters that a pass reads, as they were in its forward.

An optimizer's update changes parameters, and so do loading a file and copying from another link.
A call that runs again has to find its parameters as they were. Where one forward serves two
updates, as in the usual training of two networks against each other, the second backward goes
through a graph whose parameters the first update has changed. While a graph is being learned,
those parameters are copied before an update, so that this comes out exact; such a graph is not
planned. Where it happens under a plan for the first time, it is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import numpy as np

from umem.errors import RecomputeError
from umem.trace.recording.storage import root_of


def checksum(array: Any) -> int:
    """A checksum of an array's contents."""
    host = chainer.backend.CpuDevice().send(array)
    return zlib.crc32(np.ascontiguousarray(host).tobytes())


def wait_for(inputs: Any) -> None:
    """On a GPU, wait for all kernels: the host's time of a call is that of launching them."""
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    device = chainer.backend.get_device_from_array(*arrays)
    if device.xp is not np:
        device.device.synchronize()


class ReadArrays:
    """The parameters that one pass reads, as they were in its forward.

    Args:
        tell: called when a call has to run again after an update.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._copies: dict[int, Any] = {}
        self._changed: dict[int, Any] = {}
        self._does_copy = True
        self._reads: set[int] = set()
        self._sums: dict[int, int] = {}

    def stop_copying(self) -> None:
        """Copy no parameter before an update."""
        self._does_copy = False

    def copy_from_now_on(self) -> None:
        """Copy parameters before an update."""
        self._does_copy = True

    def add(self, arrays: Iterable[Any]) -> None:
        """A call has read these arrays from outside."""
        self._reads.update(map(id, arrays))

    def has(self, array: Any) -> bool:
        """Tell whether a call has read it."""
        return id(array) in self._reads

    @property
    def is_changed(self) -> bool:
        """True where an optimizer has changed any parameter since."""
        return bool(self._changed)

    def before_update(self, array: Any) -> None:
        """An optimizer is about to change a parameter's array."""
        if id(array) not in self._changed:
            self._changed[id(array)] = array  # held, so that nothing else gets its identity
            if self._does_copy:
                self._copies[id(array)] = array.copy()

    def watch(self, array: Any) -> None:
        """Remember what an array holds, now that nobody says any more when it changes."""
        if array is not None and id(array) not in self._sums:
            self._sums[id(array)] = checksum(array)

    def find(self, array: Any, label: str) -> Any:
        """An array from outside as it was in forward.

        Raises:
            RecomputeError: it was changed since, and there is no copy.
        """
        known = self._sums.get(id(array))
        if known is not None and known != checksum(array):
            raise RecomputeError(
                f"{label!r} has to run again, and what it reads was changed since the block of "
                "Recompute was left: go backward before that, or within the block"
            )
        if array is None or not self._changed:
            return array
        key = id(array)
        if key not in self._changed:
            key = id(root_of(array))
        if key not in self._changed:
            return array
        self._tell()
        if key == id(array) and key in self._copies:
            return self._copies[key]
        raise RecomputeError(
            f"{label!r} has to run again, and an optimizer has changed its parameters since: the "
            "graph goes backward once more after an update. From the next pass on everything of "
            "it is kept; take all backward passes before the first update to have it planned"
        )
