"""One of the simulated GPUs: VRAM, pages and time, a pool, limits, peers and counts of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from umem.devices.base import Policy
from umem.devices.software.copy_streams import CopyStreams
from umem.devices.software.streams import DriverCalls
from umem.devices.specs import COSTS, GpuSpec
from umem.devices.virtual.model import Model
from umem.errors import DeviceError
from umem_software_gpu import MOST_DEVICES

_LIMITS = {0: 1024, 1: 1 << 20, 2: 8 << 20}
"""cudaLimit, of driver_types.h: stack, buffer of printf, heap of malloc."""


def check_count(devices: object) -> None:
    """See that there can be so many devices.

    Raises:
        DeviceError: it is no whole number from 1 to `MOST_DEVICES`.
    """
    is_whole = isinstance(devices, int) and not isinstance(devices, bool)
    if not (is_whole and 1 <= devices <= MOST_DEVICES):  # type: ignore[operator]
        raise DeviceError(
            f"devices must be a whole number from 1 to {MOST_DEVICES}; got {devices!r}"
        )


class Current(threading.local):
    """The device that a thread of the program works on, and whether it has a context there."""

    ordinal = 0
    has_context = False


@dataclass
class StreamPool:
    """A device's pool of memory that is allocated in stream order; what was freed is not kept."""

    settings: dict[int, int] = field(default_factory=lambda: {1: 1, 2: 1, 3: 1, 4: 0})
    sizes: dict[int, int] = field(default_factory=dict)
    most_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are in use now."""
        return sum(self.sizes.values())

    def add(self, address: int, nbytes: int) -> None:
        """Count memory that was handed out."""
        self.sizes[address] = nbytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)


class DeviceState:
    """One device, by its number.

    Attributes:
        model: its VRAM, pages and time.
        beside: its streams that only copy.
        peers: the devices whose memory its kernels may use.
    """

    def __init__(self, ordinal: int, spec: GpuSpec, policy: Callable[[], Policy]) -> None:
        self.ordinal = ordinal
        self.model = Model(spec, COSTS, "plain", "numpy", policy)
        self.beside = CopyStreams(self.model)
        self.calls = DriverCalls()
        self.limits = dict(_LIMITS)
        self.pool = StreamPool()
        self.peers: set[int] = set()

    def restart(self) -> None:
        """Count from here: time and counts from zero, peaks from what is held now."""
        model, self.calls = self.model, DriverCalls()
        with model.lock:
            model.clocks.restart()
            model.counters.restart()
            model.copies.restart()
            model.counters.restart_peaks(model.driver.reserved_bytes, model.driver.resident_count)
