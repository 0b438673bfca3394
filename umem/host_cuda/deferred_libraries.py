"""Runs libraries on CuPy's current stream, late if streams are, but never in a capture."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from umem.host_cuda.deferred_streams import DeferredRuntime
from umem.host_cuda.dry.dry_libraries import DryLibrary
from umem.host_cuda.dry.dry_runtime import DryRuntime
from umem.host_cuda.linking import capsule_pointer
from umem.host_cuda.runtime import HostRuntime

SCALARS = ("alpha", "beta")
"""Parameters that point to a scalar, copied at the call if in host memory."""
SCALAR_BYTES = 16
ENDS = ("destroy", "spDestroy", "cufftDestroy")
"""Prefixes of functions that free memory which queued work may still use."""
WORK_WITH_STATUS = re.compile("cufftExec|cufftXtExec(?!Descriptor)")
"""Functions that only return a status, and work on one stream."""
HOST_ONLY = ("setStream", "setMathMode")
"""Functions that do not affect queued work."""
PAGE_BYTES = 4096


class DeferredLibrary:
    """A library whose functions are queued on CuPy's current stream.

    Functions without a result are queued. A function with a result, or one that writes a result to
    the host, may have to read memory, so the stream's work runs first. The status of late work is
    lost.

    Args:
        functions: has the functions of CuPy's module, whose annotations determine their kind.
        current_stream: returns CuPy's current stream.
    """

    def __init__(
        self, functions: Any, runtime: DeferredRuntime, current_stream: Callable[[], int]
    ) -> None:
        self._functions, self._runtime = functions, runtime
        self._current_stream = current_stream

    def __getattr__(self, name: str) -> Any:
        """Return a library's function, wrapped so that its work is queued or waited for."""
        function = getattr(self._functions, name)
        if not callable(function) or name.startswith("get") or name in HOST_ONLY:
            return function
        if name.startswith(ENDS):
            return lambda *given: self._runtime.queue_after_all(lambda: function(*given))
        if not _is_work(name, function):
            return lambda *given: self._at_once(function, given)
        places = [p.name for p in inspect.signature(function).parameters.values()]

        def late(*given: Any) -> None:
            """Queue the call with copies of host scalars; run it now if it writes to the host."""
            named = dict(zip(places, given, strict=False))
            to_host = "result" in named and not self._runtime.allocation_of(named["result"])
            if to_host or self._runtime.observer.wants_order:
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
        self._runtime.wait_for_stream(self._current_stream())
        return function(*given)


def _copied(address: int) -> ctypes.Array[ctypes.c_char]:
    """Copy a scalar, at most to the end of its page, because its size is unknown."""
    nbytes = min(SCALAR_BYTES, PAGE_BYTES - address % PAGE_BYTES)
    return ctypes.create_string_buffer(ctypes.string_at(address, nbytes), SCALAR_BYTES)


class ImmediateLibrary:
    """A library whose functions run at once, except on a captured stream.

    Args:
        functions, current_stream: see `DeferredLibrary`.
    """

    def __init__(
        self, functions: Any, runtime: HostRuntime, current_stream: Callable[[], int]
    ) -> None:
        self._functions, self._runtime = functions, runtime
        self._current_stream = current_stream

    def __getattr__(self, name: str) -> Any:
        """Return a library's function; functions that work are skipped during a capture."""
        function = getattr(self._functions, name)
        if not callable(function) or not _is_work(name, function):
            return function
        runtime, current_stream = self._runtime, self._current_stream

        def work(*given: Any) -> Any:
            runtime.refuse_ended(runtime.here)
            if runtime.captures and runtime.is_captured(current_stream()):
                return None
            return function(*given)

        work.__name__ = name
        return work


def _is_work(name: str, function: Callable[..., Any]) -> bool:
    """Tell whether a library's function works on a stream and returns no result."""
    if name.startswith(("set", *ENDS)) or name in HOST_ONLY:
        return False
    while isinstance(function, partial):
        function = function.func
    returns = getattr(function, "__annotations__", {}).get("return")
    return returns == "None" or bool(WORK_WITH_STATUS.match(name))


def on_stream(runtime: HostRuntime, functions: Any) -> Any:
    """Wrap a library: queue its work if streams are deferred, and skip it in a capture."""
    stream = current_stream()
    if isinstance(runtime, DryRuntime):
        functions = DryLibrary(functions, runtime)
    if isinstance(runtime, DeferredRuntime):
        return DeferredLibrary(functions, runtime, stream)
    return ImmediateLibrary(functions, runtime, stream)


def current_stream() -> Callable[[], int]:
    """Return CuPy's C function for the calling thread's current stream."""
    module: Any = importlib.import_module("cupy_backends.cuda.stream")
    pointer = capsule_pointer(module.__pyx_capi__["get_current_stream_ptr"])
    found: Callable[[], int] = ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(pointer)
    return found
