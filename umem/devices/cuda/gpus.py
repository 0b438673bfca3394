"""The GPUs of this machine, each opened once, or the reason why there is none.

Importing this module imports neither CuPy nor cuda.core; opening a device imports CuPy, and the
first hint cuda.core.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

from umem._common import extras, host
from umem.devices.cuda import fork
from umem.devices.cuda.device import CudaDevice
from umem.errors import DeviceNotFoundError

OLDEST_CUPY = 13
NUMA_CONFIG, NUMA_ID = 130, 131
"""Values of cudaDeviceAttr from driver_types.h, which CuPy does not export."""

opened: dict[int, CudaDevice] = {}
_lock = threading.Lock()


def open_cuda(ordinal: int | None = None) -> CudaDevice:
    """Open a GPU by ordinal, by default CuPy's current one.

    Returns the same object every time, because its pools live as long as the process. The first
    call imports CuPy and asks the driver for the GPUs, without creating a context. Thread-safe.

    Raises:
        DeviceNotFoundError: CuPy can use no such GPU; the message gives the reason and
            alternatives. Nothing was opened.
        StateError: this process was forked from one that had used CUDA.
    """
    fork.refuse_child()
    known = _already_open(ordinal)
    if known is not None:
        return known
    reason = cuda_reason(ordinal)
    if reason is not None:
        raise DeviceNotFoundError(_fixes(reason))
    driver = importlib.import_module("umem.devices.cuda.driver")
    number = driver.current_ordinal() if ordinal is None else ordinal
    with _lock:
        if number not in opened:
            host.GPU_NODES.update(nodes_of_gpus(driver.runtime))
            opened[number] = CudaDevice(driver.Driver(number), open_cuda)
        return opened[number]


def _already_open(ordinal: int | None) -> CudaDevice | None:
    # Every hint asks for the current device, so the checks are not repeated.
    if ordinal is None and opened:
        ordinal = importlib.import_module("umem.devices.cuda.driver").current_ordinal()
    return None if ordinal is None else opened.get(ordinal)


def nodes_of_gpus(runtime: Any) -> set[int]:
    """Return the NUMA nodes of visible GPUs' memory; creates no context."""
    found = set()
    for ordinal in range(runtime.getDeviceCount()):
        with contextlib.suppress(runtime.CUDARuntimeError):  # a driver that knows of none
            if runtime.deviceGetAttribute(NUMA_CONFIG, ordinal) == 1:
                found.add(int(runtime.deviceGetAttribute(NUMA_ID, ordinal)))
    return found


def cuda_reason(ordinal: int | None = None) -> str | None:
    """Return why there is no CUDA device; None if there is one.

    Imports CuPy if it is installed. Raises nothing.
    """
    reason = _cupy_reason()
    if reason is not None:
        return reason
    driver = importlib.import_module("umem.devices.cuda.driver")
    gpus: int | str = driver.visible_gpus()
    if isinstance(gpus, str):
        return gpus
    if ordinal is not None and not 0 <= ordinal < gpus:
        return f"GPU {ordinal} was requested, but {gpus} can be seen"
    problem: str | None = driver.libraries_problem()
    return problem


def _cupy_reason() -> str | None:
    """Return why CuPy cannot be used; None if it can."""
    try:
        version = str(importlib.import_module("cupy").__version__)
    except ImportError as error:
        if getattr(error, "name", None) == "cupy":
            return "CuPy is not installed"
        return "CuPy cannot be imported: " + str(error).strip().split("\n")[0]
    major = version.split(".")[0]
    if major.isdigit() and int(major) < OLDEST_CUPY:
        return f"CuPy {version} is too old; {OLDEST_CUPY} or newer is needed"
    return None


def _fixes(reason: str) -> str:
    return (
        f"no CUDA device: {reason}. On a machine with an NVIDIA GPU install for its CUDA: "
        f"{extras.command('cuda12')}, or {extras.command('cuda13')}; without one, model it: "
        'with umem.virtual_gpu("v100-16gb"): ..., or run a CuPy script on host memory: '
        "umem run --software t4 SCRIPT"
    )


def _after_fork() -> None:
    if any(device.policy is not None for device in opened.values()):
        fork.refuse_allocations()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
