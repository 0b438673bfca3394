"""umem: CuPy and Chainer programs that use more memory than the GPU has.

The Chainer features are in ``umem.chainer``. docs/design.md describes the whole design.

``import umem`` loads NumPy, the memory blocks and `enable`. Traces, planners and the virtual GPU
load on first use. CuPy, 13 or newer, is imported only when a CUDA device is opened; importing umem
opens no device.

errors.py, units.py and dask.py belong to no room. dask.py enables umem in the workers of
dask.distributed; it builds on memory, and no other module imports it.

PYTEST_DONT_REWRITE: umem has a plugin for pytest, and may be imported before it.
"""

from typing import TYPE_CHECKING

from umem._common.faces import face
from umem.errors import DeviceNotFoundError, OutOfMemoryError, UmemError
from umem.memory import (
    Status,
    advise,
    as_numpy,
    disable,
    enable,
    hybrid,
    location,
    managed,
    prefetch,
    preset,
    status,
    unmanaged,
    virtual_gpu,
)

if TYPE_CHECKING:
    from umem.choosing import choose
    from umem.devices.software import software_gpu
    from umem.memory import (
        blocks,
        explain,
        lookahead,
        memory_resource,
        on_out_of_memory,
        statistics,
        track,
    )
    from umem.predict import Replay, replay
    from umem.reports import paging
    from umem.trace import Trace
    from umem.trace.recording import mark, record
else:
    # These take longer to load than everything else together: traces, planners, the virtual GPU.
    _, __getattr__ = face(
        __name__,
        choosing="choose",
        devices__software="software_gpu",
        memory="blocks explain lookahead memory_resource on_out_of_memory statistics track",
        predict="Replay replay",
        reports="paging",
        trace="Trace",
        trace__recording="mark record",
    )

__all__ = [
    "DeviceNotFoundError",
    "OutOfMemoryError",
    "Replay",
    "Status",
    "Trace",
    "UmemError",
    "__version__",
    "advise",
    "as_numpy",
    "blocks",
    "choose",
    "disable",
    "enable",
    "explain",
    "hybrid",
    "location",
    "lookahead",
    "managed",
    "mark",
    "memory_resource",
    "on_out_of_memory",
    "paging",
    "prefetch",
    "preset",
    "record",
    "replay",
    "software_gpu",
    "statistics",
    "status",
    "track",
    "unmanaged",
    "virtual_gpu",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
