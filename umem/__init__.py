"""umem: CuPy and Chainer programs that use more memory than the GPU has.

``import umem.chainer`` for what concerns Chainer. docs/design.md has the whole picture.
"""

from typing import TYPE_CHECKING, Any

from umem.blocks import hybrid, managed, unmanaged
from umem.counters import statistics
from umem.errors import DeviceNotFoundError, OutOfMemoryError, UmemError
from umem.hints import advise, location, prefetch, preset
from umem.inspecting import Status, status
from umem.memory import disable, enable, virtual_gpu
from umem.recorder import record
from umem.recording.sizes import record_at
from umem.replaying import Replay, replay
from umem.trace import Trace
from umem.tracking import track
from umem.views import as_numpy

if TYPE_CHECKING:
    from umem.choosing import choose

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
    "choose",
    "disable",
    "enable",
    "hybrid",
    "location",
    "managed",
    "prefetch",
    "preset",
    "record",
    "record_at",
    "replay",
    "statistics",
    "status",
    "track",
    "unmanaged",
    "virtual_gpu",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "choose":  # it brings the planners along, which few programs need
        from umem.choosing import choose

        return choose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
