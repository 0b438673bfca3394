"""How many CUDA devices there are, asked in a way that leaves ``fork`` usable.

``cudaGetDeviceCount`` initialises CUDA, and a process that has done so cannot hand CUDA on to
forked children, which Chainer's multi-process updater relies on. NVML does not have this effect,
so it is asked first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


def count(cupy: Any) -> int:
    """Return the number of devices that CUDA would show.

    Models: ``CUDA_VISIBLE_DEVICES``, as far as it hides every device.
    Does not model: which of several devices it hides; the answer then is the number installed.
    """
    if hidden(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return 0
    found = nvml_count()
    return runtime_count(cupy) if found is None else found


def hidden(visible: str | None) -> bool:
    """Tell whether a value of ``CUDA_VISIBLE_DEVICES`` hides every device."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return not first or first.startswith("-")


def nvml_count() -> int | None:
    """Return NVML's number of devices, or None where NVML cannot tell."""
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    number = ctypes.c_uint()
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    nvml.nvmlShutdown()
    return None if failed else number.value


def runtime_count(cupy: Any) -> int:
    """Return the CUDA runtime's number of devices, 0 where it fails; this initialises CUDA."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
