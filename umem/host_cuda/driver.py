"""Modules and kernels: the functions of ``cupy_backends.cuda.api.driver``, under the same names."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from umem.host_cuda.boards import BLOCK_SHARED_BYTES, chip_of, resident_blocks
from umem.host_cuda.dialect import OWN
from umem.host_cuda.faults import KernelFault
from umem.host_cuda.kernel_limits import KernelLimits
from umem.host_cuda.kernels import Kernel, KernelCompiler
from umem.host_cuda.memory_ranges import MemoryRange
from umem.host_cuda.nvrtc import unpacked
from umem.host_cuda.observer import Launch
from umem.host_cuda.runtime import HostRuntime
from umem.host_cuda.strictness import refuse

NOT_FOUND, FILE_NOT_FOUND, INVALID_IMAGE, INVALID_CONTEXT = 500, 301, 200, 201
INVALID_VALUE, INVALID_HANDLE = 1, 400
"""Values of CUresult, from cuda.h."""
MOST_THREADS, MOST_LAYERS = 1024, 64
"""The most threads of a block, in total and in its third dimension."""
GRID_LIMITS = (2**31 - 1, 65535, 65535)
_MOST_THREADS, _STATIC_SHARED, _DYNAMIC_SHARED, _CARVEOUT = 0, 1, 8, 9
_ATTRIBUTES = {2: 0, 3: 0, 4: 32, 7: 0, _CARVEOUT: -1}
_VERSIONS = (5, 6)
"""Values of CUfunction_attribute from cuda.h: threads of a block, registers (a guess), versions of
PTX and binary.
"""
HAS_SHARED = re.compile(r"(?<!extern )\b__shared__\b")


Code = tuple[str, list[str], list[str]]
"""A source, compiler options, and the names of template instances."""


class LoadedModule(NamedTuple):
    """A module loaded on a device, with its kernels' parameters and their handles.

    It is not compiled yet if it has no library.
    """

    code: Code
    library: ctypes.CDLL | None
    path: Path | None
    kernels: dict[str, str]
    has_shared: bool
    limits: KernelLimits
    device: int
    handles: list[int]


class HostDriver:
    """Loads compiled modules and launches their kernels.

    Args:
        runtime: has the memory, and is notified of launches.
        compiler: compiles the output of the run-time compiler.
        fail: raises CuPy's error for a status.

    Attributes:
        run: runs a kernel over a grid.
    """

    def __init__(
        self, runtime: HostRuntime, compiler: KernelCompiler, fail: Callable[[int], None]
    ) -> None:
        self._runtime, self._compiler, self._fail = runtime, compiler, fail
        self._modules: dict[int, LoadedModule] = {}
        self._loaded: set[Path] = set()
        self._kernels: dict[int, Kernel] = {}
        self._devices: dict[int, int] = {}  # of kernels
        self._static: dict[int, int] = {}  # bytes of shared memory
        self._bounds: dict[int, int] = {}  # threads of a block
        self._limited: set[int] = set()  # kernels with bounds or static memory
        self._shared_limits: dict[int, int] = {}
        self._chip = chip_of(runtime.spec)
        major, minor = (runtime.deviceGetAttribute(which, 0) for which in (75, 76))
        self._version = 10 * major + minor
        self.run: Callable[[Kernel, Sequence[int], Sequence[int], int, int], None] = Kernel.run

    def moduleLoad(self, path: str) -> int:
        try:
            image = Path(path).read_bytes()
        except OSError:
            self._fail(FILE_NOT_FOUND)
            raise
        return self.moduleLoadData(image)

    def moduleLoadData(self, image: bytes) -> int:
        """Compile and load a module from `HostNvrtc`'s output; returns its handle.

        Raises:
            NotImplementedError: the output is PTX or a cubin.
        """
        found = unpacked(image, self._compiler.name)
        if found is None:
            if image.startswith(b"\x7fELF") or b".version" in image:
                raise NotImplementedError("the software GPU loads neither PTX nor cubin, only C++")
            self._fail(INVALID_IMAGE)
        assert found is not None
        loaded = self._loaded_module(found)
        handle = self._runtime.new_handle()
        self._modules[handle] = loaded
        return handle

    def _in_headers(self, module: int) -> LoadedModule:
        """Reload a module, with the kernels of the program's headers.

        Existing handles keep their code and their variables.
        """
        found = self._module(module)
        again = self._loaded_module(found.code, in_headers=True)
        if {*again.kernels} - {*found.kernels}:
            self._modules[module] = again._replace(handles=found.handles, device=found.device)
        return self._modules[module]

    def _loaded_module(self, code: Code, in_headers: bool = False) -> LoadedModule:
        """Compile a module and load it on the current device."""
        path, kernels = self._compiler.compile(*code, in_headers)
        has_shared = HAS_SHARED.search(code[0]) is not None
        limits, here = self._compiler.limits(path), self._runtime.device_here
        return LoadedModule(code, self._library(path), path, kernels, has_shared, limits, here, [])

    def _library(self, path: Path) -> ctypes.CDLL:
        """Load a shared object; the second time as a copy, so that it has its own variables."""
        if path not in self._loaded:
            self._loaded.add(path)
            return ctypes.CDLL(str(path))
        number, name = tempfile.mkstemp(".so", dir=path.parent)
        os.close(number)
        try:
            shutil.copyfile(path, name)
            return ctypes.CDLL(name)
        finally:
            Path(name).unlink()

    def moduleUnload(self, module: int) -> None:
        """Drop a module and its kernels; the code stays loaded for queued work."""
        found = self._modules.pop(module, None)
        for handle in () if found is None else found.handles:
            del self._kernels[handle], self._devices[handle]
            self._limited.discard(handle)
            self._static.pop(handle, None)
            self._bounds.pop(handle, None)
            self._shared_limits.pop(handle, None)

    def _module(self, module: int) -> LoadedModule:
        if module not in self._modules:
            self._fail(INVALID_HANDLE)
        return self._modules[module]

    def moduleGetFunction(self, module: int, name: str) -> int:
        """Return the handle of a module's kernel."""
        found = self._module(module)
        if name not in found.kernels:
            found = self._in_headers(module)
        if name not in found.kernels:
            self._fail(NOT_FOUND)
        handle = self._runtime.new_handle()
        self._kernels[handle] = self._kernel_of(module, name)
        self._devices[handle] = found.device
        found.handles.append(handle)
        # -1: not counted. CuPy asks where no error of Python's can be passed on.
        self._static[handle] = found.limits.static.shared.get(name, -1 if found.has_shared else 0)
        self._bounds[handle] = found.limits.bounds.get(name, MOST_THREADS)
        if self._static[handle] > 0 or self._bounds[handle] < MOST_THREADS:
            self._limited.add(handle)
        return handle

    def _kernel_of(self, module: int, name: str) -> Kernel:
        found = self._module(module)
        assert found.library is not None and found.path is not None
        return Kernel(found.library, name, found.kernels[name], found.path)

    def moduleGetGlobal(self, module: int, name: str) -> int:
        library = self._module(module).library
        assert library is not None
        name = OWN + name if hasattr(library, OWN + name) else name
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(library, name))
        except ValueError:
            self._fail(NOT_FOUND)
            raise

    def launchKernel(
        self,
        function: int,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block_x: int,
        block_y: int,
        block_z: int,
        shared_bytes: int,
        stream: int,
        given: int,
        extra: int = 0,
    ) -> None:
        """Check a launch as the driver does, then run or queue it unless it is captured."""
        sizes = (grid_x, grid_y, grid_z), (block_x, block_y, block_z)
        kernel = self._kernel(function)
        self._check(*sizes, shared_bytes, self._shared_limits.get(function, BLOCK_SHARED_BYTES))
        if function in self._limited and self._runtime.is_strict:
            self._check_strictly(function, kernel.name, block_x * block_y * block_z, shared_bytes)
        here = self._runtime.device_here
        if self._devices[function] != here or self._runtime.home_of(stream) != here:
            self._fail(INVALID_HANDLE)
        if not self._runtime.is_captured(stream):
            self.launch(kernel, sizes, shared_bytes, stream, given)

    def _kernel(self, function: int) -> Kernel:
        if function not in self._kernels:
            self._fail(INVALID_HANDLE)
        return self._kernels[function]

    def _check(
        self, grid: Sequence[int], block: Sequence[int], shared_bytes: int, limit: int
    ) -> None:
        """Raise for launch sizes that no GPU accepts."""
        (x, y, z), (a, b, c) = grid, block
        most_x, most_y, most_z = GRID_LIMITS
        is_grid = 0 < x <= most_x and 0 < y <= most_y and 0 < z <= most_z
        is_block = min(block) > 0 and c <= MOST_LAYERS and a * b * c <= MOST_THREADS
        if not (is_grid and is_block and 0 <= shared_bytes <= limit):
            self._fail(INVALID_VALUE)

    def _check_strictly(self, function: int, name: str, threads: int, dynamic: int) -> None:
        """Raise for a launch beyond the kernel's own bounds or memory."""
        most, static = self._bounds[function], max(0, self._static[function])
        if threads > most:
            why = f"{threads} threads of a block, but {name} has __launch_bounds__ of {most}"
            refuse(self._fail, INVALID_VALUE, why)
        is_raised = function in self._shared_limits
        room = self._chip.block_shared_bytes if is_raised else BLOCK_SHARED_BYTES
        if static + dynamic > room:
            why = f"{name} has {static:,} bytes of static shared memory, and {dynamic:,} more"
            refuse(self._fail, INVALID_VALUE, f"{why} exceed the {room:,} of a block")

    def launch(
        self,
        kernel: Kernel,
        sizes: tuple[Sequence[int], Sequence[int]],
        shared_bytes: int,
        stream: int,
        given: int,
    ) -> None:
        """Run a kernel over a grid; ``given`` points to the addresses of its arguments."""
        with self._runtime.lock:
            self.tell_launch(kernel, stream, given)
            self.run_or_end(kernel, *sizes, shared_bytes, given)

    def run_or_end(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, given: int
    ) -> None:
        """Run a kernel; a fault ends the context of the current device."""
        try:
            self.run(kernel, grid, block, shared, given)
        except KernelFault as fault:
            status, sentence, finding = fault.status, fault.sentence, fault.finding
        else:
            return
        self._runtime.end_context(status, sentence, finding=finding)

    def tell_launch(self, kernel: Kernel, stream: int, given: int) -> None:
        """Report the memory that a kernel uses, before it runs."""
        if not self._runtime.is_followed:
            return
        with self._runtime.lock:
            reads: list[MemoryRange] = []
            writes: list[MemoryRange] = []
            for low, high, use in kernel.ranges(given):
                accesses = self._runtime.access(low, (high or self._runtime.end_of(low)) - low)
                reads += accesses if "r" in use else []
                writes += accesses if "w" in use else []
            here = self._runtime.device_here
            self._runtime.operation(Launch(kernel.name, here, reads, writes, stream))

    def launchCooperativeKernel(self, *arguments: int) -> None:
        self.launchKernel(*arguments)

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        """Return an attribute of a kernel."""
        self._kernel(function)
        known = {
            **_ATTRIBUTES,
            **dict.fromkeys(_VERSIONS, self._version),
            _MOST_THREADS: min(MOST_THREADS, self._bounds[function]),
            _STATIC_SHARED: self._static[function],
            _DYNAMIC_SHARED: self._shared_limits.get(function, BLOCK_SHARED_BYTES),
        }
        if attribute not in known:
            self._fail(INVALID_VALUE)
        return known[attribute]

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self._kernel(function)
        if attribute == _DYNAMIC_SHARED and 0 <= value <= self._chip.block_shared_bytes:
            self._shared_limits[function] = value
        elif attribute != _CARVEOUT:  # which changes nothing here
            self._fail(INVALID_VALUE)

    def occupancyMaxActiveBlocksPerMultiprocessor(
        self, function: int, block_size: int, shared_bytes: int
    ) -> int:
        if block_size > self._bounds.get(function, MOST_THREADS):
            return 0
        shared_bytes += max(0, self._static.get(function, 0))
        return resident_blocks(self._runtime.spec, block_size, shared_bytes)

    def occupancyMaxPotentialBlockSize(
        self, function: int, shared_bytes: int, limit: int
    ) -> tuple[int, int]:
        """Return the number of blocks that fill the GPU, and the block size with most threads."""
        most = min(self._bounds.get(function, MOST_THREADS), limit or MOST_THREADS)
        shared_bytes += max(0, self._static.get(function, 0))
        sizes = range(most - most % 32 or most, 0, -32)
        spec = self._runtime.spec
        best = max(sizes, key=lambda size: size * resident_blocks(spec, size, shared_bytes))
        assert spec.chip is not None
        return spec.chip[2] * resident_blocks(spec, best, shared_bytes), best

    # Each device has one context, its primary one: its number and one.

    def ctxGetCurrent(self) -> int:
        current = self._runtime.current
        return current.ordinal + 1 if current.has_context else 0

    def ctxCreate(self, device: int) -> int:
        self._runtime.setDevice(device)
        return device + 1

    def ctxGetDevice(self) -> int:
        return self._runtime.device_here

    def streamGetCtx(self, stream: int) -> int:
        return self._runtime.home_of(stream) + 1

    def ctxSetCurrent(self, context: int) -> None:
        if not 0 <= context <= self._runtime.count:
            self._fail(INVALID_CONTEXT)
        self._runtime.current.has_context = context != 0
        self._runtime.current.ordinal = max(0, context - 1)

    def ctxDestroy(self, context: int) -> None:
        return None

    devicePrimaryCtxRelease = ctxDestroy
