"""The software GPU with streams whose work runs late, in an order drawn from a seed.

Replaces the runtime, the driver and the libraries that run everything at once. A launch copies the
kernel's arguments, and a copy to the GPU saves its pageable host memory; pinned memory is read when
the copy runs. A copy to pageable memory has finished when it returns. The observer is notified of
kernels and copies when they are queued, and of library operations when they run. So libraries run
at once if the observer needs the program's order.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from umem._common.specs import GpuSpec
from umem.host_cuda.allocations import INVALID_VALUE, NO_MEMORY
from umem.host_cuda.driver import HostDriver
from umem.host_cuda.faults import Fault
from umem.host_cuda.kernels import Kernel
from umem.host_cuda.memory_ranges import DEVICE, HOST, MANAGED
from umem.host_cuda.observer import Observer
from umem.host_cuda.runtime import HostRuntime, overwrite
from umem.host_cuda.stream_order import LEGACY, StreamOrder, Work
from umem.host_cuda.streams import NON_BLOCKING

NOT_READY = 600
"""cudaError, of driver_types.h."""
TO_DEVICE, ON_DEVICE = 1, 3
"""Values of cudaMemcpyKind with a device target, even if that is not an allocation."""


Action = Literal["discard", "prefetch"]
Range = tuple[int, int]
"""An address and a number of bytes."""


class _Moved(NamedTuple):
    action: Action
    low: int
    high: int
    work: Work


class Overlaps:
    """Finds unordered discards and prefetches of the same memory, which CUDA leaves undefined.

    Running a prefetch late cannot change contents, so the caller overwrites such memory instead, as
    a driver might. Does not model other undefined effects.

    Args:
        order: the order of the streams.
    """

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._moved: list[_Moved] = []

    def found(
        self, action: Action, ranges: Sequence[Range], work: Work
    ) -> list[tuple[Range, Work]]:
        """Record a work's effect on ranges; returns earlier works that it makes undefined."""
        self._moved = [each for each in self._moved if not self._order.is_known_over(each.work)]
        found = [pair for each in ranges for pair in self._undefined(action, each, work)]
        for address, nbytes in ranges:
            new = _Moved(action, address, address + nbytes, work)
            # Whatever comes after the new one comes after an earlier one of the same stream.
            self._moved = [each for each in self._moved if not _is_covered(each, new)]
            self._moved.append(new)
        return found

    def _undefined(self, action: Action, given: Range, work: Work) -> Iterator[tuple[Range, Work]]:
        for each in self._moved:
            low, high = max(each.low, given[0]), min(each.high, sum(given))
            if low < high and each.action != action and not work.comes_after(each.work):
                yield (low, high - low), each.work


def _is_covered(old: _Moved, new: _Moved) -> bool:
    is_same = old.action == new.action and old.work.key == new.work.key
    return is_same and new.low <= old.low and old.high <= new.high


class DeferredRuntime(HostRuntime):
    """CuPy's runtime with streams whose work is deferred.

    Args:
        spec, count, observer: see `HostMemory`.
        seed: the seed of the order; None runs everything at once.
    """

    def __init__(
        self, spec: GpuSpec, seed: int | None, count: int = 1, observer: Observer | None = None
    ) -> None:
        super().__init__(spec, count, observer)
        self._order = StreamOrder(seed, self.home_of)
        self._overlaps = Overlaps(self._order)
        self._queued: dict[int, Work] = {}
        self._is_over = False
        atexit.register(setattr, self, "_is_over", True)  # CuPy still gives handles back then

    def reseed(self, seed: int | None) -> None:
        """Run all queued work, and continue with another seed; None runs everything at once."""
        with self.lock:
            self._order.reseed(seed)

    def finish(self) -> None:
        """Run all queued work of all devices, and raise its first error.

        Does not count as a wait of the program: captures continue, and counts and simulated time
        stay.
        """
        with self.lock:
            self._order.finish_all(None)

    @property
    def is_late(self) -> bool:
        """Tell whether work runs late, by a seed."""
        return self._order.is_late

    def queue(self, stream: int, function: Callable[[], object]) -> None:
        """Queue work on a stream unless it is captured; raises an error of earlier work."""
        with self.lock:
            self.refuse_ended(self.device_of(stream))
            if not self.is_captured(stream):
                self._order.issue(stream, partial(self._on_device, self.home_of(stream), function))
                self._order.raise_error()

    def _on_device(self, ordinal: int, function: Callable[[], object]) -> None:
        """Run work with its device current, unless the device's context has ended."""
        if self.devices[ordinal].fault is not None:
            return
        before, self.current.ordinal = self.current.ordinal, ordinal
        try:
            function()
        finally:
            self.current.ordinal = before

    def queue_after_all(self, function: Callable[[], object]) -> None:
        """Queue work after everything queued so far."""
        if not self._is_over:
            with self.lock:
                self._order.issue_after_all(function)

    def drop_error(self) -> None:
        with self.lock:
            self._order.drop_error()

    def forget_faults(self) -> tuple[Fault, ...]:
        with self.lock:
            self._order.run_all()  # what is queued where a context has ended does nothing
            self._order.drop_error()
            return super().forget_faults()

    # -- memory ----------------------------------------------------------------------------

    def _kind_of(self, address: int) -> int:
        found = self.allocation_of(address)
        return 0 if found is None else found.kind

    def allocate(self, nbytes: int, kind: int) -> int:
        try:
            return super().allocate(nbytes, kind)
        except self.error_type as error:
            if error.status != NO_MEMORY:
                raise
            self.wait_for_all()  # what is freed in a stream's order may be free by now
            return super().allocate(nbytes, kind)

    def hostAlloc(self, size: int, flags: int) -> int:
        """Allocate pinned memory, where zeros would hide a missed wait for zeros."""
        address = super().hostAlloc(size, flags)
        if self.is_late:
            self.fill_fresh(address, size)
        return address

    def free(self, ptr: int) -> None:
        """Free memory after all queued work; later calls raise its errors.

        A free may or may not wait for that work: CUDA promises neither. Queued work that reads
        memory freed without a wait finds other bytes. A free of cudaMalloc's memory always waits,
        as in every driver; CuPy's own pool relies on that.
        """
        self._refuse_unknown(ptr)
        self.unpooled(ptr)
        self.calls.free_count += bool(ptr)
        found = self.allocation_of(ptr) if ptr else None
        with self.lock:  # the collector may free while something runs: then it is free after that
            work = self._order.issue_after_all(lambda: HostRuntime.release(self, ptr))
            if found is None or found.kind == DEVICE or self._order.frees_wait:
                self._order.do(work)
            elif not work.is_done:
                overwrite([(found.address, found.nbytes)])

    freeHost = free

    def freeAsync(self, ptr: int, stream: int) -> None:
        self._refuse_unknown(ptr)
        self.unpooled(ptr)
        with self.lock:
            if not self.is_captured(stream):
                self._order.issue(stream, lambda: HostRuntime.release(self, ptr))

    def _refuse_unknown(self, ptr: int) -> None:
        if ptr and self._kind_of(ptr) == 0:
            self.fail(INVALID_VALUE)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        """Queue a copy; pageable host memory is read at the call, or written before it returns."""
        self.refuse_copy(dst, src, size, kind)
        if self.is_captured(stream):
            return
        if stream == LEGACY:
            self._finish_both(dst, src)
        self.tell_copy(dst, src, size, self.home_of(stream), stream)
        source, target = self._kind_of(src), self._kind_of(dst)
        if not target and kind not in (TO_DEVICE, ON_DEVICE):
            self.queue(stream, lambda: ctypes.memmove(dst, src, size))
            self._wait(stream)
        elif not source and kind != ON_DEVICE:
            staged = ctypes.create_string_buffer(ctypes.string_at(src, size), size)
            self.queue(stream, lambda: ctypes.memmove(dst, staged, size))
        else:
            self.queue(stream, lambda: ctypes.memmove(dst, src, size))

    def _finish_both(self, dst: int, src: int) -> None:
        """Run all work of two devices, for a copy between them on the default stream."""
        found = [self.allocation_of(address) for address in (dst, src)]
        devices = {each.device for each in found if each is not None and each.kind == DEVICE}
        for device in devices if len(devices) > 1 else ():
            with self.lock:
                self._order.finish_all(device)

    def _wait(self, stream: int) -> None:
        with self.lock:
            if not self.is_captured(stream):
                self._order.finish_stream(stream)

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        self.refuse_copy(dst, src, size, kind)
        places = self._kind_of(src), self._kind_of(dst)
        if not places[0] and kind != ON_DEVICE:
            self._wait(LEGACY)
        self.memcpyAsync(dst, src, size, kind, LEGACY)
        if HOST in places:
            self._wait(LEGACY)

    def memset(self, ptr: int, value: int, size: int) -> None:
        self.memsetAsync(ptr, value, size, LEGACY)
        if self._kind_of(ptr) in (HOST, MANAGED):
            self._wait(LEGACY)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self.refuse_range("fill", ptr, size)
        if not self.is_captured(stream):
            self.tell_fill(ptr, size)
            self.queue(stream, lambda: ctypes.memset(ptr, value, size))

    def put_bytes(self, address: int, value: int, nbytes: int, stream: int) -> None:
        with self.lock:  # no error of earlier work is raised, as no call of CUDA's is made
            fill = partial(ctypes.memset, address, value, nbytes)
            self._order.issue(stream, partial(self._on_device, self.home_of(stream), fill))

    def prefetch(self, address: int, nbytes: int, device: int, stream: int) -> None:
        super().prefetch(address, nbytes, device, stream)
        with self.lock:
            work = self._order.issue(stream, None)
            self._undefine("prefetch", [(address, nbytes)], work)

    def put_other_bytes(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        with self.lock:
            work = self._order.issue(stream, lambda: overwrite(ranges))
            self._undefine("discard", ranges, work)

    def _undefine(self, action: Action, ranges: Sequence[tuple[int, int]], work: Work) -> None:
        """Overwrite memory with unordered moves, at some moment."""
        for each, other in self._overlaps.found(action, ranges, work):
            self._order.issue_some_day(partial(overwrite, [each]), [work, other])

    # -- streams and events ----------------------------------------------------------------

    def streamCreateWithFlags(self, flags: int) -> int:
        stream = super().streamCreateWithFlags(flags)
        if flags & NON_BLOCKING:
            self._order.add_non_blocking(stream)
        return stream

    def wait_for_stream(self, stream: int) -> None:
        super().wait_for_stream(stream)
        with self.lock:
            self._order.finish_stream(stream)

    def streamQuery(self, stream: int) -> int:
        super().streamQuery(stream)
        with self.lock:
            is_done = self._order.query(self._order.last_of(stream))
        return 0 if is_done else NOT_READY

    def wait_for_all(self) -> None:
        super().wait_for_all()
        with self.lock:
            self._order.finish_all(self.device_here)

    def launchHostFunc(self, stream: int, function: Any, argument: int) -> None:
        self.queue(stream, lambda: function(argument))

    def streamAddCallback(self, stream: int, function: Any, argument: int, flags: int = 0) -> None:
        self.queue(stream, lambda: function(stream, 0, argument))

    def eventRecord(self, event: int, stream: int) -> None:
        with self.lock:
            if not self.takes_record(event, stream):
                self._recorded[event] = self.observer.seconds_of(stream, self.home_of(stream))
                self._queued[event] = self._order.issue(stream, None)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        with self.lock:
            if not self.takes_wait(stream, event) and event in self._queued:
                self._order.issue(stream, None, [self._queued[event]])
                self._tell_wait(stream, event)

    def eventQuery(self, event: int) -> int:
        super().eventQuery(event)
        with self.lock:
            is_done = self._order.query(self._queued.get(event))
        return 0 if is_done else NOT_READY

    def eventSynchronize(self, event: int) -> None:
        super().eventSynchronize(event)
        with self.lock:
            if event in self._queued:
                self._order.finish(self._queued[event])

    def eventElapsedTime(self, start: int, end: int) -> float:
        self.refuse_untimed(start, end)
        events = [self._queued.get(event) for event in (start, end)]
        if any(event is not None and not event.is_done for event in events):
            self.fail(NOT_READY)
        return super().eventElapsedTime(start, end)

    def eventDestroy(self, event: int) -> None:
        self._queued.pop(event, None)
        super().eventDestroy(event)


class DeferredDriver(HostDriver):
    """CuPy's driver with deferred kernels.

    Args:
        runtime: has the streams; see `HostDriver` for the other arguments.
    """

    def __init__(self, runtime: DeferredRuntime, *others: Any) -> None:
        super().__init__(runtime, *others)
        self._queue = runtime.queue

    def launch(
        self, kernel: Kernel, sizes: Any, shared_bytes: int, stream: int, given: int
    ) -> None:
        """Queue a launch with copies of its arguments."""
        self.tell_launch(kernel, stream, given)
        captured, (grid, block) = kernel.captured(given), sizes

        def late() -> None:
            self.run_or_end(kernel, grid, block, shared_bytes, captured.address)

        self._queue(stream, late)
