"""Runs a kernel so that the process survives a fault or a timeout.

A kernel that never ends would hang a test suite. A GPU that also drives a display ends such kernels
with cudaErrorLaunchTimeout, and so does this one if a limit is set. The limit is processor time, so
that a busy machine does not end kernels early.
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
"""Other results of `umem_guarded` are 0 if the kernel has ended, and 1 after a fault."""


class ProcessorFault(ctypes.Structure):
    """An access that the processor refused, with its address and kind."""

    _fields_ = (("address", ctypes.c_uint64), ("signal", ctypes.c_int), ("access", ctypes.c_int))


class KernelGuard:
    """Runs kernels, and survives those that fault or take too long.

    Args:
        tools: compiles the signal handler.
        seconds: the limit of a kernel's processor time; None for no limit.
        is_catching: whether faults are returned; otherwise they end the process.
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
            KernelFault: it took too long. Its earlier writes stay.
            DeviceError: the system has no free timer. The kernel did not run.
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
            KernelFault, DeviceError: see `fault_of` and `Kernel.check`.
        """
        self.fault_of(kernel, grid, block, shared, given)
        kernel.check()
