"""The offload target of CuPy's arrays: pinned host memory, copied to and from during computation.

Arrays are made on the computing stream, and copied on two more streams, one each way. Events order
these. A copy to the host begins after the operations before it. The array is dropped only once the
computing stream waits for that copy. A fetch begins after its memory is free in the computing
stream's order, and the computing stream waits for the fetch before the array is used. The computing
stream is the current one outside of this module's own streams, so that a copying stream never waits
for itself. The host waits only if another thread frees an array of a per-thread default stream, to
which it cannot give work.

Never run on a real GPU; on the software GPU with streams that run late (docs/reference/offload.md).
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, NamedTuple

from chainer.backends import cuda

from umem._common.host import CONTEXT_FAULTS, available_bytes, pinned_room
from umem.chainer.saved.tiers.extents import PAGE, Extent, Extents
from umem.chainer.saved.tiers.recorder_events import KnownAs, record_fetch, record_send, unrecorded
from umem.chainer.saved.tiers.tier import Process
from umem.devices import cuda as gpu  # its names import CuPy, which may be missing
from umem.errors import OffloadWarning, StateError, warn_at_program
from umem.units import MIB, format_bytes


class PinnedTier:
    """Pinned host memory to which CuPy's arrays are offloaded, on streams of each GPU; see `Tier`.

    An array is assumed to be made on the stream that is current when it is sent, as Chainer's are.
    Nothing is sent while that stream is captured, nor in a forked child process, where CUDA does
    not work. Not thread-safe: one thread at a time.

    Args:
        limit_bytes: the most that is pinned for each GPU, and at most half of the host's available
            memory; None: no other limit.

    Attributes:
        process: the process that opened the target.
        waited_seconds: always 0: the GPU waits, and does not report for how long.
    """

    name = "pinned host memory"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._lanes: dict[int, Lane] = {}
        self.sent_bytes = self.fetched_bytes = 0
        self.waited_seconds = 0.0
        self.process = Process()

    def send(self, array: Any) -> PinnedSent | None:
        """Begin to copy an array to the host; None without room, or in a stream's capture."""
        if not self.process.is_this():
            return None
        with array.device:
            if gpu.is_captured():
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
        """Wait for all copies, and drop the pinned memory except slabs with live sent arrays.

        Does nothing a second time, nor in a forked child process.
        """
        for number, lane in self._lanes.items() if self.process.is_this() else ():
            with cuda.cupy.cuda.Device(number):
                lane.tidy()
                lane.down.synchronize()
                lane.up.synchronize()
                lane.slabs.clear()
        self._lanes.clear()


class Lane:
    """The streams and the pinned memory for copies between one GPU and the host.

    Constructed and used while that GPU is the current device.

    Attributes:
        down, up: the streams of copies to the host, and to the GPU.
        slabs: the pinned memory.
        forgotten: arrays whose places `tidy` will free.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        xp = cuda.cupy.cuda
        gpu.follow_captures()
        self.slabs = Slabs(limit_bytes)
        self.down, self.up = (xp.Stream(non_blocking=True) for _ in range(2))
        self._passed = xp.Event(disable_timing=True)
        self.forgotten: deque[PinnedSent] = deque()

    def order(self, first: Any, then: Any) -> None:
        """Make stream ``then`` wait for the operations on stream ``first`` so far."""
        self._passed.record(first)
        then.wait_event(self._passed)

    def tidy(self) -> None:
        """Free the places of forgotten arrays; the next copies to them wait for the former ones."""
        for _ in range(len(self.forgotten)):
            sent = self.forgotten.popleft()
            if not sent.free_place():
                self.forgotten.append(sent)


held_memory: dict[int, Any] = {}
"""Pinned memory in use by its address; also memory dropped while a stream was captured."""


class PinnedUntilCopied:
    """Pinned memory that is freed when no copy can use it any more.

    cudaFreeHost does not promise to wait for copies. So the thread that drops the last reference,
    which may be the garbage collector's, first waits for the GPU. While any stream is captured,
    where waiting is not allowed, the memory is never freed. Streams and events may be freed before,
    because the collector finalises in any order: so the memory itself is in `held_memory`.

    Args:
        memory: pinned, from CuPy.
    """

    def __init__(self, memory: Any) -> None:
        self._process, self._device = Process(), cuda.cupy.cuda.Device()
        self.ptr = int(memory.ptr)
        held_memory[self.ptr] = memory

    def __del__(self) -> None:
        if self._process.is_this() and not sys.is_finalizing():
            with self._device:
                if not gpu.is_any_captured():
                    self._device.synchronize()
                    del held_memory[self.ptr]


class PinnedSent:
    """An array that is being copied to pinned memory, is there, or is being fetched; see `Sent`.

    Args:
        tier, lane, place: the target, and the streams and the place to copy with.
        array: an array that owns dense memory.
    """

    def __init__(self, tier: PinnedTier, lane: Lane, place: PinnedPlace, array: Any) -> None:
        self._is_forgotten = True  # until there is something to forget
        self._tier, self._lane, self._device = tier, lane, array.device
        self._place: PinnedPlace | None = place
        self.nbytes = int(array.nbytes)
        self._shape, self._dtype, self._strides = array.shape, array.dtype, array.strides
        self._here: Any = array
        self._computes_on(cuda.cupy.cuda.get_current_stream())
        self._gone, self._came = (cuda.cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._last = self._gone
        with unrecorded():
            lane.order(self._stream, lane.down)
            array.data.copy_to_host_async(place.address, self.nbytes, lane.down)
            self._gone.record(lane.down)
        self._is_forgotten = False
        self._known: KnownAs = record_send(array)

    def is_gone(self) -> bool:
        """Tell whether the host's copy is complete, without waiting.

        False in a forked child, and in a capture, where an outside event cannot be queried.
        """
        if not self._tier.process.is_this() or self._is_in_capture():
            return False
        return self._here is None or self._last is self._came or bool(self._gone.done)

    def release(self) -> None:
        """Drop the array; the computing stream waits for its copy before it reuses the memory.

        In a capture, which waiting for an outside event would end, the array is kept.
        """
        if self._here is None or not self._tier.process.is_this() or self._is_in_capture():
            return
        if gpu.stream_order(self._stream.ptr) == self._order:
            self._stream.wait_event(self._last)
        else:  # here the handle is this thread's own stream
            self._last.synchronize()
        self._here = None

    def _computes_on(self, stream: Any) -> None:
        self._stream, self._order = stream, gpu.stream_order(stream.ptr)

    def _is_in_capture(self) -> bool:
        return gpu.is_captured() or gpu.is_captured(self._stream.ptr)

    def fetch(self) -> None:
        """Begin to fetch the array.

        Raises:
            StateError: the computing stream is being captured, `forget` was called, or the process
                was forked since the array was sent.
            OutOfMemoryError: CuPy's, if the GPU has no room; the host still has the contents.
        """
        self._tier.process.check()
        if self._here is not None:
            return
        if self._is_forgotten or self._place is None:
            raise StateError("the array was forgotten")
        with self._device, unrecorded():
            self._computes_on(_computing())
            self._lane.tidy()
            array = self._empty()
            self._lane.order(self._stream, self._lane.up)
            self._lane.up.wait_event(self._gone)
            array.data.copy_from_host_async(self._place.address, self.nbytes, self._lane.up)
            self._came.record(self._lane.up)
            self._here, self._last = array, self._came
        self._tier.fetched_bytes += self.nbytes
        record_fetch(array, self._known)

    def array(self) -> Any:
        """Return the array, for the caller alone, after making the computing stream wait for it.

        Raises:
            StateError, OutOfMemoryError: as `fetch`.
        """
        self.fetch()
        with self._device:
            current = _computing()
        if gpu.stream_order(current.ptr) != self._order:
            current.wait_event(self._last)
        found = self._here
        self.release()
        return found

    def forget(self) -> None:
        """Queue the place to be freed before the next array is sent or fetched.

        Any thread may call it at any moment, as the garbage collector does: it does not call CUDA.
        """
        if not self._is_forgotten:
            self._is_forgotten = True
            self._lane.forgotten.append(self)

    __del__ = forget  # an exception may drop it while its copies run

    def free_place(self) -> bool:
        """Free the place; the next copy to the host waits for all copies of this array.

        Returns whether it succeeded: not while another thread captures the computing stream.
        """
        self.release()
        if self._here is not None:
            return False
        self._lane.down.wait_event(self._last)
        self._place = None
        return True

    def _empty(self) -> Any:
        """Allocate an array of the same shape and strides on the computing stream."""
        memory = cuda.cupy.cuda.alloc(self.nbytes)
        return cuda.cupy.ndarray(self._shape, self._dtype, memory, self._strides)


def _computing() -> Any:
    """Return the computing stream of the current device.

    Raises:
        StateError: the stream is being captured, and an outside copy cannot be part of that.
    """
    if gpu.is_captured():
        raise StateError(
            "an array that was sent to the host cannot be fetched while the stream is captured: "
            "run backward before the capture, or leave Offload"
        )
    return cuda.cupy.cuda.get_current_stream()


# -- slabs: pinning takes milliseconds each time, so memory is taken in few large pieces --------

FIRST_BYTES = 64 * MIB
"""The least size of the first slab; each further slab is as large as all before it together.
A guess, not measured."""


class PinnedPlace(NamedTuple):
    """A range of bytes of a slab, allocated while its extent is referenced."""

    memory: Any
    extent: Extent

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return int(self.memory.ptr) + self.extent.start


class Slab(NamedTuple):
    """One piece of pinned memory, and the allocator of places in it."""

    memory: Any
    nbytes: int
    extents: Extents

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Allocate a place of at least this size; None if the slab has no room for it."""
        extents, most = self.extents, self.nbytes
        extent = extents.take(nbytes, lambda more: extents.end_bytes + more <= most)
        return None if extent is None else PinnedPlace(self.memory, extent)


class Slabs:
    """An allocator of pinned memory; grows by slabs within the limit of the user, host and driver.

    Args:
        limit_bytes: the most to pin, and at most half of the host's available memory; None: no
            other limit.

    Not thread-safe. If the host or the driver refuses to pin more, one `OffloadWarning` is
    given.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._slabs: list[Slab] = []
        self._may_grow = True

    @property
    def held_bytes(self) -> int:
        """Return the bytes pinned."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Allocate a place of at least this size, in a new slab if needed; None without room."""
        for slab in self._slabs:
            place = slab.take(nbytes)
            if place is not None:
                return place
        return self._slabs[-1].take(nbytes) if self._grow(nbytes) else None

    def clear(self) -> None:
        """Drop the slabs; each is freed with the last place in it."""
        self._slabs.clear()

    def _grow(self, nbytes: int) -> bool:
        """Pin a slab that has room for some bytes; tell whether that succeeded.

        If the driver refuses, half the size is tried, down to those bytes.
        """
        least = -(-nbytes // PAGE) * PAGE
        room = None if self._limit is None else self._limit - self.held_bytes
        if not self._may_grow or (room is not None and room < least):
            return False
        size = max(least, self.held_bytes, FIRST_BYTES)
        for most in (room, pinned_room(self.held_bytes)):
            size = size if most is None else min(size, most)
        xp = cuda.cupy.cuda
        while size >= least:
            try:
                pinned = PinnedUntilCopied(xp.PinnedMemory(size))
                self._slabs.append(Slab(pinned, size, Extents()))
                return True
            except (xp.runtime.CUDARuntimeError, xp.memory.OutOfMemoryError) as error:
                if getattr(error, "status", None) in CONTEXT_FAULTS:
                    raise
                size //= 2
        self._may_grow, available = False, available_bytes()
        has = "" if available is None else f", of {format_bytes(available)} that are available"
        warn_at_program(
            f"the host gives no {format_bytes(least)} more of pinned memory{has}; "
            f"{format_bytes(self.held_bytes)} are pinned: arrays beyond that stay on the GPU. "
            "Free host memory, or raise the limit of memory that a process may lock",
            OffloadWarning,
        )
        return False
