"""Runs a kernel so that the process goes on where it faults, or takes too long.

A kernel that never ends would hang a test suite. A GPU that also draws a screen ends such kernels
by cudaErrorLaunchTimeout, and so does this one where a limit is asked for. The limit is of the
processor's time, so that a busy machine ends no kernel early.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from umem.errors import DeviceError
from umem.host_cuda.faults import LAUNCH_TIMEOUT, KernelFault
from umem.host_cuda.kernels import Kernel
from umem.host_cuda.toolchain import Toolchain

_SOURCE = Path(__file__).parent / "include" / "guarded.c"
_TOO_LONG, _NO_TIMER = 2, 3
"""Other returns of `umem_guarded`: 0 where the kernel has ended, 1 after a fault."""


class ProcessorFault(ctypes.Structure):
    """An access that the processor refused: its address, and its kind."""

    _fields_ = (("address", ctypes.c_uint64), ("signal", ctypes.c_int), ("access", ctypes.c_int))


class KernelGuard:
    """Runs kernels, and comes back from those that fault or take too long.

    Args:
        tools: compiles the handler of signals.
        seconds: of processor time that a kernel may take; None for no limit.
        is_catching: whether faults come back; otherwise they end the process.
    """

    def __init__(self, tools: Toolchain, seconds: float | None, is_catching: bool = False) -> None:
        self._seconds, self._is_catching = seconds, is_catching
        library = ctypes.CDLL(str(tools.shared_object(_SOURCE.read_text(encoding="utf-8"), "c")))
        self._run = library.umem_guarded
        self._run.argtypes = [
            *[ctypes.c_void_p] * 4, ctypes.c_uint, ctypes.c_int, ctypes.c_double, ctypes.c_void_p
        ]  # fmt: skip

    def fault_of(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, given: int
    ) -> ProcessorFault | None:
        """Run a kernel and return its fault, if any; `Kernel.check` raises its own errors.

        Raises:
            KernelFault: it took too long. What it wrote before stays.
            DeviceError: the system has no timer left. The kernel has not run.
        """
        fault = ProcessorFault()
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)
        places = [ctypes.addressof(size) for size in sizes]
        how = self._is_catching, self._seconds or 0
        end = self._run(kernel.address, given, *places, shared, *how, ctypes.byref(fault))
        if end == _TOO_LONG:
            raise KernelFault(
                LAUNCH_TIMEOUT,
                f"the kernel {kernel.name} has taken more than {self._seconds:g} s of the "
                "processor: it may never end; if it does, raise kernel_seconds=",
            )
        if end == _NO_TIMER:
            raise DeviceError("the system has no timer for kernel_seconds=: leave it out")
        return fault if end else None

    def run(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, given: int
    ) -> None:
        """Run a kernel as `Kernel.run` does.

        Raises:
            KernelFault, DeviceError: as `fault_of` and `Kernel.check` do.
        """
        self.fault_of(kernel, grid, block, shared, given)
        kernel.check()
