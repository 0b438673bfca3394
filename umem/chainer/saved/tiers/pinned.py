"""Pinned host memory below a GPU: CuPy's arrays go there and come back beside the operations.

Arrays are made on the stream that computes, and copied on a stream of their own each way. Events
order these: a copy down begins after what was computed before, an array goes only when the
computing stream has waited for its copy, a copy back begins after the memory for it is free in
that stream's order, and the computing stream waits for it before the array is used. The stream
that computes is the one that is current where nothing of this module has entered another, so that
a wait is never asked of the stream that copies. The host never waits.

Never run on a real GPU; on the software GPU under streams that run late (docs/offload.md).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from chainer.backends import cuda

from umem.chainer.saved.tiers.extents import PAGE, Extent, Extents
from umem.chainer.saved.tiers.recorder_events import KnownAs, hear_fetch, hear_send, unheard
from umem.chainer.saved.tiers.tier import Process
from umem.devices.host import HOST_SHARE, available_bytes
from umem.errors import OffloadWarning, StateError, warn_at_program
from umem.units import MIB, format_bytes


class PinnedTier:
    """The pinned host memory below CuPy's arrays, each GPU's with streams of its own.

    An array is taken to be made on the stream that is current when it is sent, as Chainer's are.
    While that stream is captured nothing is sent, nor in a process that was forked, where CUDA does
    not work. One thread at a time.

    Args:
        limit_bytes: the most that is pinned for a GPU; None: what the host has available, less a
            tenth.

    Attributes:
        process: which opened it.
        waited_seconds: 0: the GPU waits, and does not say how long.
    """

    name = "pinned host memory"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._lanes: dict[int, Lane] = {}
        self.sent_bytes = self.fetched_bytes = 0
        self.waited_seconds = 0.0
        self.process = Process()

    def send(self, array: Any) -> PinnedSent | None:
        """Begin to copy an array down; None where there is no room, or its stream is captured."""
        if not self.process.is_this():
            return None
        with array.device:
            if cuda.cupy.cuda.get_current_stream().is_capturing():
                return None
            lane = self._lanes.get(array.device.id)
            if lane is None:
                lane = self._lanes[array.device.id] = Lane(self._limit_bytes)
            lane.tidy()
            place = lane.slabs.take(array.nbytes)
            if place is None:
                return None
            self.sent_bytes += array.nbytes
            return PinnedSent(self, lane, place, array)

    def close(self) -> None:
        """Wait for all copies, and give up the memory; what was sent keeps its own until it goes.

        A second time does nothing, nor does a process that was forked.
        """
        for number, lane in self._lanes.items() if self.process.is_this() else ():
            with cuda.cupy.cuda.Device(number):
                lane.tidy()
                lane.down.synchronize()
                lane.up.synchronize()
                lane.slabs.clear()
        self._lanes.clear()


class Lane:
    """The way between one GPU and the host: a stream each way, and the memory there.

    Made, and used, while the GPU is the current device.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        xp = cuda.cupy.cuda
        refused = (xp.runtime.CUDARuntimeError, xp.memory.OutOfMemoryError)
        self.slabs = Slabs(self._pin, refused, limit_bytes)
        self.down, self.up = (xp.Stream(non_blocking=True) for _ in range(2))
        self._passed = xp.Event(disable_timing=True)
        self.forgotten: deque[PinnedSent] = deque()

    @staticmethod
    def _pin(nbytes: int) -> Any:
        return PinnedUntilCopied(cuda.cupy.cuda.PinnedMemory(nbytes))

    def let_pass(self, first: Any, then: Any) -> None:
        """Have what one stream does from now on come after all that another was given so far."""
        self._passed.record(first)
        then.wait_event(self._passed)

    def tidy(self) -> None:
        """Take back what was forgotten: whoever comes next waits for its copies."""
        while self.forgotten:
            self.forgotten.popleft().give_back()


held_memory: dict[int, Any] = {}
"""Pinned memory by its address, also what was dropped while a stream was captured."""


class PinnedUntilCopied:
    """Pinned memory that is given back when no copy can use it any more.

    cudaFreeHost promises no wait. So whoever drops the last of what was sent, the collector too,
    waits for the GPU first; while its stream is captured, of which no wait can be part, the memory
    stays for good. Streams and events may be gone by then, and the collector finalises in any
    order: so the memory itself is held elsewhere.

    Args:
        memory: pinned, by CuPy.
    """

    def __init__(self, memory: Any) -> None:
        self._process, self._device = Process(), cuda.cupy.cuda.Device()
        self.ptr = int(memory.ptr)
        held_memory[self.ptr] = memory

    def __del__(self) -> None:
        if self._process.is_this() and not sys.is_finalizing():
            with self._device:
                if not cuda.cupy.cuda.get_current_stream().is_capturing():
                    self._device.synchronize()
                    del held_memory[self.ptr]


class PinnedSent:
    """An array on its way to pinned memory, there, or on its way back.

    Args:
        tier, lane, place: where it goes.
        array: which owns dense memory.
    """

    def __init__(self, tier: PinnedTier, lane: Lane, place: PinnedPlace, array: Any) -> None:
        self._is_forgotten = True  # until there is something to forget
        self._tier, self._lane, self._device = tier, lane, array.device
        self._place: PinnedPlace | None = place
        self.nbytes = int(array.nbytes)
        self._shape, self._dtype, self._strides = array.shape, array.dtype, array.strides
        self._here: Any = array
        self._stream = cuda.cupy.cuda.get_current_stream()
        self._gone, self._came = (cuda.cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._last = self._gone
        with unheard():
            lane.let_pass(self._stream, lane.down)
            array.data.copy_to_host_async(place.address, self.nbytes, lane.down)
            self._gone.record(lane.down)
        self._is_forgotten = False
        self._known: KnownAs = hear_send(array)

    def is_gone(self) -> bool:
        """Tell whether the copy below is whole, without waiting."""
        if not self._tier.process.is_this():
            return False
        return self._here is None or self._last is self._came or bool(self._gone.done)

    def let_go(self) -> None:
        """Hold the array no more; the stream that computes waits for its copy first."""
        if self._here is not None and self._tier.process.is_this():
            self._stream.wait_event(self._last)
            self._here = None

    def fetch(self) -> None:
        """Begin to bring the array back.

        Raises:
            StateError: the stream that computes is being captured, or it was forgotten, or the
                process was forked since it was sent.
            OutOfMemoryError: CuPy's, where there is no room; it still lies below.
        """
        self._tier.process.check()
        if self._here is not None:
            return
        if self._is_forgotten or self._place is None:
            raise StateError("the array was forgotten")
        with self._device, unheard():
            self._stream = _computing()
            self._lane.tidy()
            array = self._empty()
            self._lane.let_pass(self._stream, self._lane.up)
            self._lane.up.wait_event(self._gone)
            array.data.copy_from_host_async(self._place.address, self.nbytes, self._lane.up)
            self._came.record(self._lane.up)
            self._here, self._last = array, self._came
        self._tier.fetched_bytes += self.nbytes
        hear_fetch(array, self._known)

    def array(self) -> Any:
        """The array, for which the stream that computes waits; the caller's alone from now on.

        Raises:
            StateError, OutOfMemoryError: as `fetch`.
        """
        self.fetch()
        with self._device:
            current = _computing()
        if current != self._stream:
            current.wait_event(self._last)
        found = self._here
        self.let_go()
        return found

    def forget(self) -> None:
        """Give up the place, which is free before the next array is sent or fetched.

        Any thread may call it, at any moment, as the collector does: nothing is asked of CUDA.
        """
        if not self._is_forgotten:
            self._is_forgotten = True
            self._lane.forgotten.append(self)

    __del__ = forget  # an exception may drop it while its copies run

    def give_back(self) -> None:
        """Have what is sent to the place next come after all copies of this array."""
        self.let_go()
        self._lane.down.wait_event(self._last)
        self._place = None

    def _empty(self) -> Any:
        """An array of the same shape and strides, without contents, on the stream that computes."""
        memory = cuda.cupy.cuda.alloc(self.nbytes)
        return cuda.cupy.ndarray(self._shape, self._dtype, memory, self._strides)


def _computing() -> Any:
    """The stream that computes on the current device.

    Raises:
        StateError: it is being captured, and a copy from outside cannot be part of that.
    """
    stream = cuda.cupy.cuda.get_current_stream()
    if stream.is_capturing():
        raise StateError(
            "an array that was sent to the host cannot come back while the stream is captured: "
            "run backward before the capture, or leave Offload"
        )
    return stream


# -- slabs: pinning takes milliseconds each time, so memory is taken in few large pieces --------

FIRST_BYTES = 64 * MIB
"""The first slab has this, and each further one as much as all before it."""


class PinnedPlace(NamedTuple):
    """Bytes of a slab, free once nobody holds this."""

    memory: Any
    extent: Extent

    @property
    def address(self) -> int:
        """Where they begin."""
        return int(self.memory.ptr) + self.extent.start


class Slab(NamedTuple):
    """One piece of pinned memory, and the places in it."""

    memory: Any
    nbytes: int
    extents: Extents

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Return a place of at least this size; None where there is none."""
        extents, most = self.extents, self.nbytes
        extent = extents.take(nbytes, lambda more: extents.end_bytes + more <= most)
        return None if extent is None else PinnedPlace(self.memory, extent)


class Slabs:
    """Pinned memory by the place; grows while the limit, the host and the driver let it.

    Args:
        pin: pins so many bytes, and returns what has their address as ``ptr``.
        refused: what it raises where the driver does not pin so much.
        limit_bytes: the most; None: what the host has available, less a tenth.

    Not thread-safe. Where it may grow no more for another reason than the limit, an
    `OffloadWarning` says so, once.
    """

    def __init__(
        self,
        pin: Callable[[int], Any],
        refused: tuple[type[Exception], ...],
        limit_bytes: int | None = None,
    ) -> None:
        self._pin, self._refused, self._limit = pin, refused, limit_bytes
        self._slabs: list[Slab] = []
        self._may_grow = True

    @property
    def held_bytes(self) -> int:
        """What is pinned."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Return a place of at least this size; None where there is no room for it."""
        for slab in self._slabs:
            place = slab.take(nbytes)
            if place is not None:
                return place
        return self._slabs[-1].take(nbytes) if self._grow(nbytes) else None

    def clear(self) -> None:
        """Hold nothing more; a slab goes when the last place in it does."""
        self._slabs.clear()

    def _grow(self, nbytes: int) -> bool:
        """Add a slab that has room for so many bytes; tell whether there is one."""
        least = -(-nbytes // PAGE) * PAGE
        room = None if self._limit is None else self._limit - self.held_bytes
        if not self._may_grow or (room is not None and room < least):
            return False
        available = available_bytes()
        size = max(least, self.held_bytes, FIRST_BYTES)
        for most in (room, None if available is None else int(HOST_SHARE * available)):
            size = size if most is None else min(size, most)
        while size >= least:
            try:
                self._slabs.append(Slab(self._pin(size), size, Extents()))
                return True
            except self._refused:
                size //= 2
        self._may_grow = False
        has = "" if available is None else f", of {format_bytes(available)} that are available"
        warn_at_program(
            f"the host gives no {format_bytes(least)} more of pinned memory{has}; "
            f"{format_bytes(self.held_bytes)} are pinned: what has no room there stays on the GPU. "
            "Free host memory, or raise what the system lets a process lock",
            OffloadWarning,
        )
        return False
