"""The number of CUDA devices, found without making ``fork`` unusable.

``cudaGetDeviceCount`` initialises CUDA, and forked children of such a process cannot use CUDA,
which Chainer's multi-process updater relies on. NVML does not have this effect, so it is tried
first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


def count(cupy: Any) -> int:
    """Return the number of devices that CUDA would show.

    Uses NVML; if that fails, the CUDA runtime, which initialises CUDA.

    Models: ``CUDA_VISIBLE_DEVICES``, as far as it hides every device.
    Does not model: which of several devices it hides; the result then is the number installed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden(visible, sys.maxsize):
        return 0
    found = nvml_count()
    if found is None:
        return runtime_count(cupy)
    return 0 if hidden(visible, found) else found


def hidden(visible: str | None, installed: int) -> bool:
    """Tell whether a value of ``CUDA_VISIBLE_DEVICES`` hides all installed devices.

    CUDA shows the listed devices up to the first that does not exist, so all are hidden if the
    first entry is empty, negative or too high. A name, such as a UUID, is assumed to exist. None
    means that the variable is not set, and hides none.
    """
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    missing = first.isdigit() and int(first) >= installed
    return missing or not first or first.startswith("-")


def nvml_count() -> int | None:
    """Return NVML's number of devices, or None if NVML fails."""
    try:
        nvml = ctypes.CDLL(_NVML)
        start, ask, stop = nvml.nvmlInit_v2, nvml.nvmlDeviceGetCount_v2, nvml.nvmlShutdown
    except (OSError, AttributeError):
        return None
    if start() != 0:
        return None
    number = ctypes.c_uint()
    failed = ask(ctypes.byref(number))
    stop()
    return None if failed else number.value


def runtime_count(cupy: Any) -> int:
    """Return the CUDA runtime's number of devices, 0 if it fails; this initialises CUDA."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
