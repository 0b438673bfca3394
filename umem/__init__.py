"""umem: CuPy and Chainer programs that use more memory than the GPU has.

``import umem.chainer`` for what concerns Chainer. docs/design.md has the whole picture.

PYTEST_DONT_REWRITE: it has a plugin for pytest, and may be imported before that.
"""

from typing import TYPE_CHECKING, Any

from umem.errors import DeviceNotFoundError, OutOfMemoryError, UmemError
from umem.memory.blocks import hybrid, managed, unmanaged
from umem.memory.hints import advise, as_numpy, location, prefetch, preset
from umem.memory.process import disable, enable, virtual_gpu
from umem.memory.statistics import statistics
from umem.memory.status import Status, status
from umem.memory.tracking import track

if TYPE_CHECKING:
    from umem.devices.software.opening import software_gpu
    from umem.memory.explaining import explain
    from umem.memory.host_blocks import blocks
    from umem.memory.rmm_resource import memory_resource
    from umem.memory.running_out import on_out_of_memory
    from umem.memory.told_order import lookahead
    from umem.predict.replaying import Replay, replay
    from umem.reports.paging import paging
    from umem.trace.recording.recordings import mark, record
    from umem.trace.trace import Trace

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


_LATER = {
    "blocks": "umem.memory.host_blocks",
    "explain": "umem.memory.explaining",
    "lookahead": "umem.memory.told_order",
    "mark": "umem.trace.recording.recordings",
    "memory_resource": "umem.memory.rmm_resource",
    "on_out_of_memory": "umem.memory.running_out",
    "paging": "umem.reports.paging",
    "record": "umem.trace.recording.recordings",
    "software_gpu": "umem.devices.software.opening",
    "Replay": "umem.predict.replaying",
    "replay": "umem.predict.replaying",
    "Trace": "umem.trace",
}
"""Names whose modules are loaded when they are first used: traces, planners and the virtual GPU
take longer to load than everything else together, and a program that trains needs none of them."""


def __getattr__(name: str) -> Any:
    """Load a public name's module when the name is first used.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
