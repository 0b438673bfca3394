"""Kernels of a dry run: their parameters determine their accesses, and most are skipped.

Skipped kernels, and kernels that NumPy computes, need no compiler; others are compiled at their
first run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from umem.host_cuda.driver import HAS_SHARED, Code, HostDriver, LoadedModule
from umem.host_cuda.dry.dry_runtime import (
    BY_ADDRESS,
    COUNTS,
    COUNTS_BESIDE,
    DryRuntime,
    Range,
    Written,
)
from umem.host_cuda.dry.numpy_kernels import Parameter, carray, numpy_kernel, parameters_in
from umem.host_cuda.kernel_limits import KernelLimits, StaticMemory, launch_bounds
from umem.host_cuda.kernels import Kernel, parameters_of
from umem.host_cuda.memory_ranges import MemoryRange
from umem.host_cuda.nvrtc import HostNvrtc
from umem.host_cuda.observer import Launch

_WORD = ctypes.c_uint64
UNKNOWN_ITEMSIZE = 16
"""Item size of an unknown type without a stride: CuPy's largest."""


class Argument(NamedTuple):
    """The memory of an argument: ``high`` is None for a plain pointer."""

    low: int
    high: int | None
    item_count: int
    parameter: Parameter


class DryKernel:
    """A kernel that is compiled at its first run.

    Args:
        name: its name.
        parameters: the text of its parameters.
        compile: compiles it.
    """

    def __init__(self, name: str, parameters: str, compile: Callable[[], Kernel]) -> None:
        self.name, self._compile = name, compile
        found = parameters_in(parameters)
        self._arrays = [each for each in found if each.use]
        self.by_numpy = numpy_kernel(name, found)
        self._kernel: Kernel | None = None

    def compiled(self) -> Kernel:
        """Return the compiled kernel."""
        if self._kernel is None:
            self._kernel = self._compile()
        return self._kernel

    def arguments(self, given: int) -> list[Argument]:
        """Return the memory of each non-empty array and each non-null pointer."""
        places = ctypes.cast(given, ctypes.POINTER(_WORD))
        found = []
        for parameter in self._arrays:
            place = places[parameter.number]
            if parameter.ndim < 0:
                low = _WORD.from_address(place).value
                if low:
                    found.append(Argument(low, None, 0, parameter))
                continue
            low, size, shape, strides = carray(place, parameter.ndim)
            if not size:
                continue
            steps = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
            high = low + sum(step for step in steps if step > 0)
            low += sum(step for step in steps if step < 0)
            itemsize = parameter.itemsize
            if not itemsize:
                is_telling = parameter.ndim and shape[-1] > 1
                itemsize = abs(strides[-1]) if is_telling else UNKNOWN_ITEMSIZE
            found.append(Argument(low, high + itemsize, size, parameter))
        return found


class DryDriver(HostDriver):
    """CuPy's driver in a dry run."""

    _runtime: DryRuntime

    def _loaded_module(self, code: Code, in_headers: bool = False) -> LoadedModule:
        """Read the kernels' parameters; nothing is compiled yet."""
        source, options, expressions = code
        text = self._compiler.expanded(source, options, expressions, in_headers)
        kernels = parameters_of(text, expressions)
        limits = KernelLimits(launch_bounds(text, options, expressions), StaticMemory({}, 0))
        has_shared = HAS_SHARED.search(source) is not None
        here = self._runtime.device_here
        return LoadedModule(code, None, None, kernels, has_shared, limits, here, [])

    def _compiled(self, module: int) -> None:
        """Compile a module, unless already compiled."""
        found = self._module(module)
        if found.library is None:
            path, kernels = self._compiler.compile(*found.code)
            if {*found.kernels} - {*kernels}:
                path, kernels = self._compiler.compile(*found.code, in_headers=True)
            self._runtime.counts["compiled"] += 1
            self._modules[module] = found._replace(
                library=self._library(path), path=path, kernels=kernels
            )

    def _kernel_of(self, module: int, name: str) -> Any:
        def compile() -> Kernel:
            self._compiled(module)
            return HostDriver._kernel_of(self, module, name)

        return DryKernel(name, self._module(module).kernels[name], compile)

    def moduleGetGlobal(self, module: int, name: str) -> int:
        self._compiled(module)
        return super().moduleGetGlobal(module, name)

    def launch(
        self,
        kernel: Any,
        sizes: tuple[Sequence[int], Sequence[int]],
        shared_bytes: int,
        stream: int,
        given: int,
    ) -> None:
        """Report a launch, and compute it if it is small and its input is known."""
        with self._runtime.lock:
            if not self._is_run(kernel, stream, given):
                return
            if kernel.by_numpy is None:
                kernel.compiled().run(*sizes, shared_bytes, given)
            else:
                kernel.by_numpy.run(self._runtime, given)

    def _is_run(self, kernel: DryKernel, stream: int, given: int) -> bool:
        """Report the memory that a kernel uses; return whether it runs."""
        runtime = self._runtime
        reads: list[MemoryRange] = []
        writes: list[MemoryRange] = []
        read: list[Range] = []
        written: list[Written] = []
        counts, flags, is_whole = COUNTS.search(kernel.name) is not None, 0.0, True
        by_address, name = BY_ADDRESS.search(kernel.name) is not None, kernel.name
        for low, high, item_count, parameter in kernel.arguments(given):
            end = runtime.end_of(low) if high is None else high
            accesses = runtime.access(low, end - low)
            if "r" in parameter.use:
                reads += accesses
                read.append((low, end))
                if by_address and parameter.itemsize in (0, 8):
                    read += runtime.pointed_at(low, end)
                if counts:
                    flags = max(flags, runtime.flags_in(low, end, item_count))
                elif kernel.name.startswith("cupy_copy__"):
                    name, flags = runtime.counts_copied(name, low, end, item_count)
            if "w" in parameter.use:
                writes += accesses
                written.append((low, end, parameter.itemsize))
                is_whole = is_whole and parameter.is_whole
        runtime.operation(Launch(kernel.name, runtime.device_here, reads, writes, stream))
        flags = flags if is_whole or COUNTS_BESIDE.search(name) else 0
        return runtime.decide(name, read, written, is_whole=is_whole, flags=flags)


class DryNvrtc(HostNvrtc):
    """The run-time compiler of a dry run, which defers compilation."""

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        self._programs[program].options = tuple(options)

    def getProgramLog(self, program: int) -> str:
        return ""
