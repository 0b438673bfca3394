"""Faults of kernels, and the contexts that they end.

On a card a fault ends the context of its device, and each later call returns its error, until the
process ends. So it is here: after a fault the functions under CuPy are replaced by ones that raise,
so that nothing is slower before. What frees something still does, and says nothing. Other devices
go on: an error is that of one context. The documentation of cudaErrorIllegalAddress advises to end
the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from umem.errors import DeviceError

ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT = 700, 702, 710
MISALIGNED_ADDRESS, LAUNCH_FAILURE = 716, 719
"""Values of cudaError, from driver_types.h. The last one is "unspecified": CUDA sees no races."""
GIVES_BACK = re.compile(r"free|destroy|unload|unregister|release", re.IGNORECASE)
"""Functions that only free something."""
_NEEDS_NO_CONTEXT = re.compile(
    r"getDevice(Count|Properties)?|setDevice|deviceGet(Attribute|PCIBusId)|deviceGetByPCIBusId"
    r"|ctx(Get|Set)Current|ctxGetDevice|\w*[gG]et(Build|Runtime|\w*Local\w*)?Version|_ensure_context"
    r"|_getCUDAMajorVersion|getLastError|peekAtLastError|get_build_version"
)
"""Functions that still work: CuPy calls them around what it frees, too."""
OPTION = (
    "To continue after a fault: umem.software_gpu(..., sticky=False), or UMEM_SOFTWARE_GPU=...,"
    "sticky=off"
)


class Finding(NamedTuple):
    """A finding as a tool of compute-sanitizer would have it, for `umem_software_gpu.faults`.

    Attributes:
        tool: its name.
        kernel: the name of the kernel; empty if unknown.
        argument: the kernel's argument, ``"1 (const float* x)"``; empty if unknown.
    """

    tool: str
    kernel: str = ""
    argument: str = ""


class KernelFault(DeviceError):
    """A kernel has ended by what a GPU calls a fault; it becomes CuPy's error, too.

    Args:
        status: of cudaError.
        sentence: names the kernel, and what it did.
        finding: None if no tool looks for such a fault.
    """

    def __init__(self, status: int, sentence: str, finding: Finding | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.finding = status, sentence, finding


class Fault(NamedTuple):
    """The fault that ended a device's context.

    Attributes:
        status: of cudaError.
        sentence: names the kernel, and what it did.
        finding: None if no tool looks for such a fault.
    """

    status: int
    sentence: str
    finding: Finding | None = None

    @property
    def reminder(self) -> str:
        """Return the sentence of later calls."""
        return f"{self.sentence}. It ended the context, as on a GPU, and no further call works. {OPTION}"


class RedirectedModule(NamedTuple):
    """A CuPy module's functions, redirected to the host's.

    Attributes:
        redirect: redirects them to what a function returns for their names.
        original: returns the host's function of a name.
        fail: raises this module's error for a fault; None if it needs no context.
    """

    redirect: Callable[[Callable[[str], Any]], None]
    original: Callable[[str], Any]
    fail: Callable[[Fault], None] | None


class Contexts:
    """Ends contexts, and revives them.

    Args:
        runtime: has the devices.
        redirected: CuPy's modules that need a context.
    """

    def __init__(self, runtime: Any, redirected: Iterable[RedirectedModule]) -> None:
        self._runtime, self._redirected, self._has_ended = runtime, redirected, False

    def end(self) -> None:
        """Have CuPy's functions raise where the current device has had a fault."""
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
            """Call the function unless the current device has had a fault; raise that then."""
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
        """Make all contexts usable again; returns the faults that had ended some.

        Memory stays as the fault left it. Work that was queued on such a device is dropped, and
        its captures are over.
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
    """Make devices usable again whose contexts a fault has ended; returns the faults.

    For test runners: on a GPU there is no such thing. Call it between tests, from a thread that
    has a test's work behind it. Does nothing without a software GPU or a fault.
    """
    return tuple(fault for each in contexts for fault in each.revive())
