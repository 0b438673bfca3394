"""The software GPU with streams whose work runs late, in an order that a seed gives.

In place of the runtime, the driver and the libraries that do everything at once. Arguments of a
kernel are captured at its launch, and so is pageable host memory that is copied to the GPU;
pinned memory is read when the copy runs. A copy to pageable memory has ended when it returns.
The model and recorders hear of kernels and copies when they are queued, and of what libraries do
when it runs; so that while somebody records, libraries work at once.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from umem.devices.software.allocations import HOST, INVALID_VALUE, MANAGED, NO_MEMORY
from umem.devices.software.driver import HostDriver
from umem.devices.software.kernels import Kernel
from umem.devices.software.runtime import HostRuntime
from umem.devices.software.stream_order import LEGACY, StreamOrder, Work
from umem.devices.software.streams import NON_BLOCKING
from umem.devices.specs import GpuSpec

NOT_READY = 600
"""cudaError, of driver_types.h."""
TO_DEVICE, ON_DEVICE = 1, 3
"""cudaMemcpyKind: where the target is no host memory, though no allocation has it."""
SCALARS = ("alpha", "beta")
"""Parameters of libraries that lead to a scalar, read at the call where it is host memory."""
SCALAR_BYTES = 16
ENDS = ("destroy", "spDestroy", "cufftDestroy")
"""How functions begin that give up what queued work may still use."""
WORK_WITH_STATUS = ("cufftExec", "cufftXtExec")
"""How functions begin that return a status only."""
HOST_ONLY = ("setStream", "setMathMode")
"""Functions of libraries that change nothing of what is queued."""
PAGE_BYTES = 4096


class LateRuntime(HostRuntime):
    """CuPy's runtime, whose streams run late.

    Args:
        spec, is_modelled: as for `HostMemory`.
        seed: of the order; None does everything at once.
    """

    def __init__(self, spec: GpuSpec, seed: int | None, is_modelled: bool = True) -> None:
        super().__init__(spec, is_modelled)
        self._order = StreamOrder(seed)
        self._queued: dict[int, Work] = {}
        self._is_over = False
        atexit.register(setattr, self, "_is_over", True)  # CuPy still gives handles back then

    def reseed(self, seed: int | None) -> None:
        """Do what is left, and go on by another seed; None does everything at once."""
        with self.lock:
            self._order.reseed(seed)

    def queue(self, stream: int, function: Callable[[], object]) -> None:
        """Give a stream something to do, unless a capture takes it; raises an earlier error."""
        with self.lock:
            if not self.is_captured(stream):
                self._order.issue(stream, function)
                self._order.raise_error()

    def in_order(self, stream: int, function: Callable[[], object]) -> None:
        """Do something in the order of a stream, late."""
        self.queue(stream, function)

    def queue_after_all(self, function: Callable[[], object]) -> None:
        """Do something when all that was queued before is done."""
        if not self._is_over:
            with self.lock:
                self._order.issue_after_all(function)

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
            self.deviceSynchronize()  # what is freed in a stream's order may be free by now
            return super().allocate(nbytes, kind)

    def free(self, ptr: int) -> None:
        """Free memory after all that was queued before; errors of that come up elsewhere."""
        self._refuse_unknown(ptr)
        self.unpooled(ptr)
        with self.lock:  # the collector may free while something runs: then it is free after that
            work = self._order.issue_after_all(lambda: HostRuntime.release(self, ptr))
            self._order.do(work)

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
        if self.is_captured(stream):
            return
        self.tell_copy(dst, src, size, stream)
        source, target = self._kind_of(src), self._kind_of(dst)
        if not target and kind not in (TO_DEVICE, ON_DEVICE):
            self.queue(stream, lambda: ctypes.memmove(dst, src, size))
            self._wait(stream)
        elif not source and kind != ON_DEVICE:
            staged = ctypes.create_string_buffer(ctypes.string_at(src, size), size)
            self.queue(stream, lambda: ctypes.memmove(dst, staged, size))
        else:
            self.queue(stream, lambda: ctypes.memmove(dst, src, size))

    def _wait(self, stream: int) -> None:
        with self.lock:
            if not self.is_captured(stream):
                self._order.finish_stream(stream)

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
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
        if not self.is_captured(stream):
            self.operation("memset", [], self.access(ptr, size))
            self.queue(stream, lambda: ctypes.memset(ptr, value, size))

    # -- streams and events ----------------------------------------------------------------

    def streamCreateWithFlags(self, flags: int) -> int:
        stream = super().streamCreateWithFlags(flags)
        if flags & NON_BLOCKING:
            self._order.add_non_blocking(stream)
        return stream

    def streamSynchronize(self, stream: int) -> None:
        super().streamSynchronize(stream)
        with self.lock:
            self._order.finish_stream(stream)

    def streamQuery(self, stream: int) -> int:
        super().streamQuery(stream)
        with self.lock:
            is_done = self._order.query(self._order.last_of(stream))
        return 0 if is_done else NOT_READY

    def deviceSynchronize(self) -> None:
        super().deviceSynchronize()
        with self.lock:
            self._order.finish_all()

    def launchHostFunc(self, stream: int, function: Any, argument: int) -> None:
        self.queue(stream, lambda: function(argument))

    def streamAddCallback(self, stream: int, function: Any, argument: int, flags: int = 0) -> None:
        self.queue(stream, lambda: function(stream, 0, argument))

    def eventRecord(self, event: int, stream: int) -> None:
        with self.lock:
            if not self.takes_record(event, stream):
                self._recorded[event] = self.seconds_of(stream)
                self._queued[event] = self._order.issue(stream, None)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        with self.lock:
            if not self.takes_wait(stream, event) and event in self._queued:
                self._order.issue(stream, None, [self._queued[event]])
                self.stream_waits(stream, self._recorded[event])

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
        events = [self._queued.get(event) for event in (start, end)]
        if any(event is not None and not event.is_done for event in events):
            self.fail(NOT_READY)
        return super().eventElapsedTime(start, end)

    def eventDestroy(self, event: int) -> None:
        self._queued.pop(event, None)
        super().eventDestroy(event)


class LateDriver(HostDriver):
    """CuPy's driver, whose kernels run late.

    Args:
        runtime: has the streams; the others are those of `HostDriver`.
    """

    def __init__(self, runtime: LateRuntime, *others: Any) -> None:
        super().__init__(runtime, *others)
        self._queue = runtime.queue

    def launch(
        self, kernel: Kernel, sizes: Any, shared_bytes: int, stream: int, given: int
    ) -> None:
        """Queue a launch with its arguments as they are now."""
        self.tell_launch(kernel, stream, given)
        captured, (grid, block) = kernel.captured(given), sizes
        self._queue(stream, lambda: self.run(kernel, grid, block, shared_bytes, captured.address))


class LateLibrary:
    """A library's functions, which work on the current stream of the calling thread.

    What returns nothing is queued. What returns something may have looked at memory for it, so
    that the stream's work is done before; so it is where a result goes to the host. A status that
    late work ends with is not seen.

    Args:
        functions: by the names of CuPy's module; each is told which by its annotations.
        current_stream: asks CuPy.
    """

    def __init__(
        self, functions: Any, runtime: LateRuntime, current_stream: Callable[[], int]
    ) -> None:
        self._functions, self._runtime = functions, runtime
        self._current_stream = current_stream

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if not callable(function) or name.startswith("get") or name in HOST_ONLY:
            return function
        if name.startswith(ENDS):
            return lambda *given: self._runtime.queue_after_all(lambda: function(*given))
        if not _is_work(name, function):
            return lambda *given: self._at_once(function, given)
        places = [p.name for p in inspect.signature(function).parameters.values()]

        def late(*given: Any) -> None:
            named = dict(zip(places, given, strict=False))
            to_host = "result" in named and not self._runtime.allocation_of(named["result"])
            if to_host or self._runtime.listener is not None:
                self._at_once(function, given)
                return
            kept = []
            for scalar in SCALARS:
                if scalar in named and not self._runtime.allocation_of(named[scalar]):
                    kept.append(_copied(named[scalar]))
                    named[scalar] = ctypes.addressof(kept[-1])
            rest = given[len(places) :]
            stream = self._current_stream()
            self._runtime.queue(stream, lambda: (function(*named.values(), *rest), kept))

        late.__name__ = name  # for CuPy's errors
        return late

    def _at_once(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        self._runtime.streamSynchronize(self._current_stream())
        return function(*given)


def _copied(address: int) -> ctypes.Array[ctypes.c_char]:
    """Copy a scalar; not beyond its page, since its size is not known."""
    nbytes = min(SCALAR_BYTES, PAGE_BYTES - address % PAGE_BYTES)
    return ctypes.create_string_buffer(ctypes.string_at(address, nbytes), SCALAR_BYTES)


class LibraryAtOnce:
    """A library's functions, whose work a capture of the current stream takes.

    Args:
        functions, current_stream: as for `LateLibrary`.
    """

    def __init__(
        self, functions: Any, runtime: HostRuntime, current_stream: Callable[[], int]
    ) -> None:
        self._functions, self._runtime = functions, runtime
        self._current_stream = current_stream

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if not callable(function) or not _is_work(name, function):
            return function
        runtime, current_stream = self._runtime, self._current_stream

        def work(*given: Any) -> Any:
            if runtime.captures and runtime.is_captured(current_stream()):
                return None
            return function(*given)

        work.__name__ = name
        return work


def _is_work(name: str, function: Callable[..., Any]) -> bool:
    """Whether a library's function does something on a stream, and returns nothing else."""
    if name.startswith(("set", *ENDS)) or name in HOST_ONLY:
        return False
    returns = inspect.signature(function).return_annotation
    return returns == "None" or name.startswith(WORK_WITH_STATUS)


def on_stream(runtime: HostRuntime, functions: Any) -> Any:
    """Have a library work on CuPy's current stream: late where streams are, never in a capture."""
    module: Any = importlib.import_module("cupy_backends.cuda.stream")
    stream = _current_stream(module.__pyx_capi__)
    if isinstance(runtime, LateRuntime):
        return LateLibrary(functions, runtime, stream)
    return LibraryAtOnce(functions, runtime, stream)


def _current_stream(capsules: Any) -> Callable[[], int]:
    """Find CuPy's C function that gives the current stream of the calling thread."""
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = capsules["get_current_stream_ptr"]
    found: Callable[[], int] = ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(pointer(capsule, name(capsule)))
    return found
