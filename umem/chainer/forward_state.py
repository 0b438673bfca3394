"""Chainer's configuration and outside arrays as in forward, for functions that run again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any

import chainer
import numpy as np
from chainer import configuration

from umem.chainer.chunking.capped import cap_here, in_parts, under
from umem.errors import RecomputeError
from umem.trace.recording import root_of

NOT_CARRIED = frozenset((
    "enable_backprop", "in_recomputing", "_will_recompute", "debug", "warn_nondeterministic",
    "keep_graph_on_report", "schedule_func", "use_static_graph",
))  # fmt: skip
"""Entries that a recomputation takes from its surroundings, or sets itself."""
_CAP = "umem.chainer.workspace"
"""Extra entry beside Chainer's own: the cap on workspace, on which bits depend."""


def configuration_now() -> dict[str, Any]:
    """Return the calling thread's Chainer configuration, and its cap on workspace.

    Only the entries that a recomputation restores.
    """
    # Chainer offers no list of entries: a thread's own are in config._local, over global_config.
    of_thread = vars(configuration.config._local)
    cap = cap_here() if in_parts.holders else None
    found = {**vars(chainer.global_config), **of_thread, _CAP: cap}
    for name in NOT_CARRIED:
        found.pop(name, None)
    return found


class Configurations:
    """The configuration of one thread, as one object for all calls between two changes of it."""

    def __init__(self) -> None:
        self._of_thread: dict[str, Any] = {}
        self._of_all: dict[str, Any] = {}
        self._now: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Return the result of `configuration_now`, which must not be changed."""
        of_thread, of_all = vars(configuration.config._local), vars(chainer.global_config)
        is_capped = bool(in_parts.holders) or self._now.get(_CAP) is not None
        if is_capped or not (_same(of_thread, self._of_thread) and _same(of_all, self._of_all)):
            self._of_thread, self._of_all = dict(of_thread), dict(of_all)
            self._now = configuration_now()
        return self._now


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two configurations hold the same objects; arrays are not compared by value."""
    return list(one) == list(other) and all(map(is_, one.values(), other.values()))


def as_in_forward(then: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context that restores a saved configuration; entries that were absent are None."""
    now = configuration_now()
    recomputing: AbstractContextManager[Any] = configuration.using_config("in_recomputing", True)
    # Mostly nothing has changed, and this is called for each function that runs again.
    if _same(now, then):
        return recomputing
    return _restoring(then, now, recomputing)


@contextmanager
def _restoring(
    then: dict[str, Any], now: dict[str, Any], recomputing: AbstractContextManager[Any]
) -> Iterator[None]:
    with recomputing, ExitStack() as stack:
        for key in {*then, *now}:
            if key not in now or now[key] is not then.get(key):
                stack.enter_context(_restored(key, then.get(key)))
        yield


def _restored(key: str, value: Any) -> AbstractContextManager[Any]:
    return under(value) if key == _CAP else configuration.using_config(key, value)


def checksum(array: Any) -> int:
    """Return a checksum of an array's contents; a device's array is copied to the host."""
    host = chainer.backend.CpuDevice().send(array)
    return zlib.crc32(np.ascontiguousarray(host).tobytes())


class ReadArrays:
    """The arrays that one pass reads from outside, as they were in its forward.

    An optimizer's update changes parameters, and so do loading a file and copying from another
    link. A recomputed call must read its parameters' old values. If one forward serves two updates,
    as in the usual training of two networks against each other, the second backward passes through
    a graph whose parameters the first update has changed. While a graph is being learned, those
    parameters are copied before an update, so that the result is exact; such a graph is not
    planned. If that happens under a plan for the first time, it is an error.

    Args:
        tell: called when a call is recomputed after an update.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._copies: dict[int, Any] = {}
        self._changed: dict[int, Any] = {}
        self._does_copy = True
        self._reads: set[int] = set()
        self._sums: dict[int, int] = {}

    def stop_copying(self) -> None:
        """Stop copying parameters before updates."""
        self._does_copy = False

    def copy_from_now_on(self) -> None:
        """Copy parameters before updates from now on."""
        self._does_copy = True

    def add(self, arrays: Iterable[Any]) -> None:
        """Record that a call has read these arrays from outside."""
        self._reads.update(map(id, arrays))

    def has(self, array: Any) -> bool:
        """Tell whether a call has read an array from outside."""
        return id(array) in self._reads

    @property
    def is_changed(self) -> bool:
        """True once an optimizer or a loader has changed a parameter since the pass began."""
        return bool(self._changed)

    def before_update(self, array: Any, *, is_needed: bool) -> None:
        """Record that a parameter's array is about to change, and copy it if copying is on.

        The copy is in host memory. ``is_needed``: a live graph may read it.
        """
        if id(array) not in self._changed:
            self._changed[id(array)] = array  # held, so that no other array gets its id
            if self._does_copy and is_needed:
                host = chainer.backend.CpuDevice().send(array)
                self._copies[id(array)] = host.copy() if host is array else host

    def watch(self, array: Any) -> None:
        """Record an array's checksum, for when its changes are no longer reported."""
        if array is not None and id(array) not in self._sums:
            self._sums[id(array)] = checksum(array)

    def find(self, array: Any, label: str) -> Any:
        """Return an array from outside as it was in forward.

        Raises:
            RecomputeError: it was changed since, and there is no copy.
        """
        known = self._sums.get(id(array))
        if known is not None and known != checksum(array):
            raise RecomputeError(
                f"{label!r} must run again, but its inputs were changed after the block of "
                "Recompute: run backward before that, or within the block"
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
            device = chainer.backend.get_device_from_array(array)
            return device.send(self._copies[key])
        raise RecomputeError(
            f"{label!r} must run again, but an optimizer has changed its parameters since: the "
            "graph's backward runs again after an update. From the next pass on everything of it "
            "is kept; run all backward passes before the first update to have it planned"
        )
