"""Modules and kernels: the functions of ``cupy_backends.cuda.api.driver``, by their names there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from umem.devices.software.kernels import Kernel, KernelCompiler
from umem.devices.software.nvrtc import unpacked
from umem.devices.software.runtime import HostRuntime
from umem.trace.events import Access

NOT_FOUND, FILE_NOT_FOUND, INVALID_IMAGE = 500, 301, 200
"""CUresult, of cuda.h."""

_ATTRIBUTES = {0: 1024, 4: 32, 5: 75, 6: 75, 8: 49152, 9: -1}
"""CUfunction_attribute, of cuda.h: threads of a block, registers (a guess), versions, shared."""


class HostDriver:
    """Loads what was compiled, and launches it.

    Args:
        runtime: where memory is, and the model.
        compiler: compiles what the run-time compiler put together.
        fail: raises CuPy's error for a status.

    Attributes:
        run: runs a kernel over a grid.
    """

    def __init__(
        self, runtime: HostRuntime, compiler: KernelCompiler, fail: Callable[[int], None]
    ) -> None:
        self._runtime, self._compiler, self._fail = runtime, compiler, fail
        self._modules: dict[int, tuple[ctypes.CDLL, dict[str, str]]] = {}
        self._kernels: dict[int, Kernel] = {}
        self.run: Callable[[Kernel, Sequence[int], Sequence[int], int, int], None] = Kernel.run

    def moduleLoad(self, path: str) -> int:
        try:
            image = Path(path).read_bytes()
        except OSError:
            self._fail(FILE_NOT_FOUND)
            raise
        return self.moduleLoadData(image)

    def moduleLoadData(self, image: bytes) -> int:
        found = unpacked(image, self._compiler.name)
        if found is None:
            if image.startswith(b"\x7fELF") or b".version" in image:
                raise NotImplementedError("the software GPU reads neither PTX nor cubin")
            self._fail(INVALID_IMAGE)
        assert found is not None
        path, kernels = self._compiler.compile(*found)
        handle = self._runtime.new_handle()
        self._modules[handle] = ctypes.CDLL(str(path)), kernels
        return handle

    def moduleUnload(self, module: int) -> None:
        self._modules.pop(module, None)

    def moduleGetFunction(self, module: int, name: str) -> int:
        library, kernels = self._modules[module]
        if name not in kernels:
            self._fail(NOT_FOUND)
        handle = self._runtime.new_handle()
        self._kernels[handle] = Kernel(library, name, kernels[name])
        return handle

    def moduleGetGlobal(self, module: int, name: str) -> int:
        library, _ = self._modules[module]
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
        if not self._runtime.is_captured(stream):
            sizes = (grid_x, grid_y, grid_z), (block_x, block_y, block_z)
            self.launch(self._kernels[function], sizes, shared_bytes, stream, given)

    def launch(
        self,
        kernel: Kernel,
        sizes: tuple[Sequence[int], Sequence[int]],
        shared_bytes: int,
        stream: int,
        given: int,
    ) -> None:
        """Run a kernel over a grid of blocks; ``given`` is the address of arguments' addresses."""
        with self._runtime.lock:
            self.tell_launch(kernel, given)
            self.run(kernel, *sizes, shared_bytes, given)

    def tell_launch(self, kernel: Kernel, given: int) -> None:
        """Tell what memory a kernel will use."""
        with self._runtime.lock:
            reads: list[Access] = []
            writes: list[Access] = []
            for low, high, use in kernel.ranges(given):
                accesses = self._runtime.access(low, high - low if high else 1 << 62)
                reads += accesses if "r" in use else []
                writes += accesses if "w" in use else []
            self._runtime.operation(kernel.name, reads, writes)

    def launchCooperativeKernel(self, *arguments: int) -> None:
        self.launchKernel(*arguments)

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        return _ATTRIBUTES.get(attribute, 0)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        return None

    def occupancyMaxActiveBlocksPerMultiprocessor(
        self, function: int, block_size: int, shared_bytes: int
    ) -> int:
        return max(1, 2048 // max(1, block_size))

    def occupancyMaxPotentialBlockSize(
        self, function: int, shared_bytes: int, limit: int
    ) -> tuple[int, int]:
        return 40, min(1024, limit or 1024)

    def ctxGetCurrent(self) -> int:
        return 1

    def ctxCreate(self, device: int) -> int:
        return 1

    def ctxGetDevice(self) -> int:
        return 0

    def streamGetCtx(self, stream: int) -> int:
        return 1

    def ctxSetCurrent(self, context: Any) -> None:
        return None

    ctxDestroy = devicePrimaryCtxRelease = ctxSetCurrent
