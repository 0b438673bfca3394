"""Page moves from CUPTI's counters of unified memory, through cupti-python.

Sources: NVIDIA's documentation of CUPTI 12.9 (CUpti_ActivityUnifiedMemoryCounter2, its kinds and
causes of migration) and of cupti-python; versions 12.8 and 13.4 accept these calls as far as
possible without a GPU. Never run on a GPU.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any

from umem._common.scopes import Scope
from umem.devices.page_moves import ALREADY_WATCHED, Cause, MoveListener, Now, PageMove, Way
from umem.errors import DeviceError, MissingDependencyError, StateError

_BUFFER_BYTES = 8 << 20
_COUNTERS = (
    "BYTES_TRANSFER_HTOD", "BYTES_TRANSFER_DTOH", "CPU_PAGE_FAULT_COUNT", "GPU_PAGE_FAULT",
)  # fmt: skip
_CAUSES: dict[int, Cause] = {1: "prefetch", 2: "fault", 3: "driver", 4: "eviction", 5: "driver"}
"""Values of CUpti_ActivityUnifiedMemoryMigrationCause: the user, coherence, the driver's
prefetching, eviction, access counters.
"""
_FORCED = 1
"""CUPTI_ACTIVITY_FLAG_FLUSH_FORCED: records of buffers that are not full are delivered too."""
_WHEELS = {
    12: "cupti-python==12.8.0 nvidia-cuda-cupti-cu12",
    13: "'cupti-python==13.*' 'nvidia-cuda-cupti==13.*' pyelftools",
}
"""Packages by CUDA's major version, to install without dependencies: cupti-python 12.8.0 requires
cuda-bindings 12.8.0, with which cuda.core cannot be imported, but it works with 12.9. Imported
beside cuda-core 1.2.2 with cuda-bindings 12.9.0, 12.9.10, 13.0.2 and 13.5.0, without a GPU.
"""
_listeners: list[MoveListener] = []
_starting = threading.Lock()


def watch_pages(ordinal: int, cuda_major: int, listener: MoveListener, scope: Scope) -> Now:
    """Report page moves of all GPUs of the process; see `Device.watch_pages`.

    Args:
        ordinal: the GPU that CUPTI is asked for.
        cuda_major: the major version of CuPy's CUDA.
    """
    cupti = _library(cuda_major)
    counters = [getattr(cupti.ActivityUnifiedMemoryCounterKind, name) for name in _COUNTERS]
    kind = cupti.ActivityKind.UNIFIED_MEMORY_COUNTER

    def completed(records: Sequence[Any]) -> None:
        for record in records:
            for tell in _listeners:
                tell(_move(record, counters.index(record.counter_kind)))

    def stop() -> None:
        if _listeners != [listener]:
            return
        try:
            cupti.activity_flush_all(_FORCED)
            cupti.activity_disable(kind)
        finally:
            _listeners.clear()

    with _starting:
        if _listeners:
            raise StateError(ALREADY_WATCHED)
        scope.at_close(stop)
        _listeners.append(listener)
        try:
            cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), completed)
            configs = cupti.ActivityUnifiedMemoryCounterConfig(len(counters))
            configs.scope = cupti.ActivityUnifiedMemoryCounterScope.PROCESS_SINGLE_DEVICE
            configs.device_id, configs.enable = ordinal, 1
            for number, counter in enumerate(counters):
                configs[number].kind = counter
            cupti.activity_configure_unified_memory_counter(configs.ptr, len(counters))
            cupti.activity_enable(kind)
        except Exception as error:  # cupti's own, and those of a library or driver it cannot load
            _listeners.clear()
            raise DeviceError(
                f"CUPTI does not count pages here: {error}. It serves one profiler at a time, and "
                "may be for administrators alone (NVIDIA's ERR_NVGPUCTRPERM)"
            ) from error
    return lambda: 1e-9 * float(cupti.get_timestamp())


def _library(cuda_major: int) -> Any:
    try:
        return importlib.import_module("cupti.cupti")
    except Exception as error:  # modules of Cython that do not fit raise TypeError and ValueError
        wheels = _WHEELS.get(cuda_major, _WHEELS[13])
        raise MissingDependencyError(
            "pages are counted by NVIDIA's CUPTI, which cannot be imported "
            f"({str(error).strip().partition(chr(10))[0]}): pip install --no-deps {wheels}"
        ) from None


def _move(record: Any, counter: int) -> PageMove:
    """Translate a record of the counter at that index of `_COUNTERS`."""
    seconds, low, value = 1e-9 * record.start, int(record.address), int(record.value)
    if counter == 2:  # one fault; the value is the instruction's address
        return PageMove(seconds, low, low + 1, 0, "", "fault", host_faults=1)
    if counter == 3:
        return PageMove(seconds, low, low + 1, 0, "", "fault", gpu_faults=value)
    way: Way = "out" if counter else "in"
    cause = _CAUSES.get(int(record.flags_), "unknown")
    return PageMove(seconds, low, low + value, value, way, cause)
