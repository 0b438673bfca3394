"""Faults of kernels, which end contexts.

On a real GPU a fault ends the context of its device, and each later call returns its error, until
the process ends. Likewise here: a fault replaces the functions under CuPy by functions that raise,
so that calls before a fault cost nothing more. Functions that free something still work, silently.
Other devices are not affected, because an error belongs to one context. The documentation of
cudaErrorIllegalAddress advises to end the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from umem.errors import DeviceError

ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT = 700, 702, 710
MISALIGNED_ADDRESS, LAUNCH_FAILURE = 716, 719
"""Values of cudaError, from driver_types.h. The last one is "unspecified", because CUDA does not
detect races.
"""
GIVES_BACK = re.compile(r"free|destroy|unload|unregister|release", re.IGNORECASE)
"""Functions that only free something."""
_NEEDS_NO_CONTEXT = re.compile(
    r"getDevice(Count|Properties)?|setDevice|deviceGet(Attribute|PCIBusId)|deviceGetByPCIBusId"
    r"|ctx(Get|Set)Current|ctxGetDevice|\w*[gG]et(Build|Runtime|\w*Local\w*)?Version|_ensure_context"
    r"|_getCUDAMajorVersion|getLastError|peekAtLastError|get_build_version"
)
"""Functions that still work, because CuPy also calls them when it frees something."""
OPTION = (
    "To continue after a fault: umem.software_gpu(..., sticky=False), or UMEM_SOFTWARE_GPU=...,"
    "sticky=off"
)


class Finding(NamedTuple):
    """A finding of a tool of compute-sanitizer, for `umem_software_gpu.faults`.

    Attributes:
        tool: its name.
        kernel: the name of the kernel; empty if unknown.
        argument: the kernel's argument, ``"1 (const float* x)"``; empty if unknown.
    """

    tool: str
    kernel: str = ""
    argument: str = ""


class KernelFault(DeviceError):
    """A kernel has ended with a fault; also raised as CuPy's error.

    Args:
        status: of cudaError.
        sentence: names the kernel and its fault.
        finding: None if no tool looks for such a fault.
    """

    def __init__(self, status: int, sentence: str, finding: Finding | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.finding = status, sentence, finding


class Fault(NamedTuple):
    """The fault that ended a device's context.

    Attributes:
        status: of cudaError.
        sentence: names the kernel and its fault.
        finding: None if no tool looks for such a fault.
    """

    status: int
    sentence: str
    finding: Finding | None = None

    @property
    def reminder(self) -> str:
        """Return the message of later calls."""
        return f"{self.sentence}. It ended the context, as on a GPU: later calls fail. {OPTION}"


class RedirectedModule(NamedTuple):
    """A CuPy module's functions, redirected to the host's.

    Attributes:
        redirect: redirects the functions to a function's results for their names.
        original: returns the host's function with a name.
        fail: raises this module's error for a fault; None if the module needs no context.
    """

    redirect: Callable[[Callable[[str], Any]], None]
    original: Callable[[str], Any]
    fail: Callable[[Fault], None] | None


class Contexts:
    """Ends and revives contexts.

    Args:
        runtime: has the devices.
        redirected: CuPy's modules that need a context.
    """

    def __init__(self, runtime: Any, redirected: Iterable[RedirectedModule]) -> None:
        self._runtime, self._redirected, self._has_ended = runtime, redirected, False

    def end(self) -> None:
        """Make CuPy's functions raise if the current device has had a fault."""
        if not self._has_ended:
            self._has_ended = True
            for each in self._redirected:
                each.redirect(lambda name, each=each: self._refusing(name, each))  # type: ignore[misc]

    def _refusing(self, name: str, redirected: RedirectedModule) -> Any:
        """Return a function that raises after a fault."""
        function, runtime = redirected.original(name), self._runtime
        if not callable(function) or _NEEDS_NO_CONTEXT.fullmatch(name):
            return function
        is_quiet = GIVES_BACK.search(name) is not None

        def refusing(*given: Any, **more: Any) -> Any:
            """Call the function, or raise the current device's fault, if any."""
            fault = runtime.here.fault
            if fault is None:
                return function(*given, **more)
            if not is_quiet and redirected.fail is not None:
                runtime.drop_error()  # this one tells of it
                redirected.fail(fault)
            try:
                return function(*given, **more)
            except Exception:  # a GPU would return the fault's status, which nobody looks at
                return None

        refusing.__name__ = name  # for CuPy's errors
        return refusing

    def revive(self) -> tuple[Fault, ...]:
        """Make all contexts usable again; returns the faults that had ended contexts.

        Memory stays as the fault left it. Queued work and captures of such devices are dropped.
        """
        faults: tuple[Fault, ...] = self._runtime.forget_faults()
        if self._has_ended:
            self._has_ended = False
            for each in self._redirected:
                each.redirect(each.original)
        return faults


contexts: list[Contexts] = []
"""Contexts of the open software GPU; empty without one."""


def revive() -> tuple[Fault, ...]:
    """Make devices usable again after faults; returns the faults.

    For test runners; a real GPU cannot do this. Call it between tests, from a thread whose test
    work has finished. Does nothing without a software GPU or a fault.
    """
    return tuple(fault for each in contexts for fault in each.revive())
