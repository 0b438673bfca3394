"""Target processors of kernels: this machine's own, or a whole family."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from umem._common.printable import short
from umem.errors import DeviceError

TARGET_VARIABLE = "UMEM_KERNEL_TARGET"
_TELLING = r"vendor_id|cpu family|model\b|flags|Features|CPU (implementer|architecture|part)"
"""Lines of /proc/cpuinfo that affect -march=native."""
_PORTABLE = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
NEEDED = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
"""Flags of /proc/cpuinfo that x86-64-v3 needs, besides flags of all x86-64 processors."""


@dataclass(frozen=True)
class Processors:
    """Target processors, ``native`` or ``portable``, and the compiler's options for them."""

    name: str
    options: tuple[str, ...]

    @classmethod
    def wanted(cls) -> Processors:
        """Return the target of ``UMEM_KERNEL_TARGET``, by default native; raises as `named`."""
        return cls.named(os.environ.get(TARGET_VARIABLE) or "native")

    @classmethod
    def named(cls, name: str) -> Processors:
        """Return a target by name.

        Raises:
            DeviceError: the name is unknown, or kernels for this target do not run here.
        """
        if name == "native":
            return cls(name, ("-march=native",))
        if name != "portable":
            raise DeviceError(f"{TARGET_VARIABLE} must be native or portable, not {short(name)}")
        machine = platform.machine()
        kind = _PORTABLE.get(machine)
        if kind is None:
            raise DeviceError(f"{TARGET_VARIABLE}=portable does not support {machine}; use native")
        found = this_processor()
        missing = NEEDED - {*found.split()} if machine == "x86_64" and found else ()
        if missing:
            raise DeviceError(
                f"{TARGET_VARIABLE}=portable: {kind} needs {', '.join(sorted(missing))}, which "
                "this processor lacks; use native"
            )
        return cls(name, (f"-march={kind}",))

    def processors(self) -> str:
        """Return a text that differs between processors whose kernels must not be shared."""
        return this_processor() if self.name == "native" else platform.machine()


def this_processor() -> str:
    """Describe the processor, because different machines may share a folder."""
    try:
        found = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = found.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if re.match(_TELLING, line))
