"""One of the simulated GPUs: VRAM, pages and time, a pool, limits, peers and counts of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from umem._common.printable import quoted
from umem._common.specs import COSTS, GpuSpec
from umem.devices.base import Policy
from umem.devices.software.copy_streams import CopyStreams
from umem.devices.software.faults import Fault
from umem.devices.virtual.model import Model
from umem.errors import DeviceError, SizeError
from umem_software_gpu import MOST_DEVICES

_LIMITS = {0: 1024, 1: 1 << 20, 2: 8 << 20}
"""Values of cudaLimit, from driver_types.h: stack, printf buffer, malloc heap."""


def check_count(devices: object) -> None:
    """Check a number of devices.

    Raises:
        DeviceError: it is no whole number from 1 to `MOST_DEVICES`.
    """
    is_whole = isinstance(devices, int) and not isinstance(devices, bool)
    if not (is_whole and 1 <= devices <= MOST_DEVICES):  # type: ignore[operator]
        raise DeviceError(
            f"devices must be a whole number from 1 to {MOST_DEVICES}; got {devices!r}"
        )


def check_seed(seed: object) -> None:
    """Check a seed of streams; None is one, too.

    Raises:
        SizeError: it is no whole number of at least 0.
    """
    if seed is not None and not (type(seed) is int and seed >= 0):
        raise SizeError(f"stream_seed must be a whole number of at least 0; got {quoted(seed)}")


class Current(threading.local):
    """The device that a thread works on, and whether it has a context there.

    Args:
        begins: is called once in each thread that asks.
    """

    ordinal = 0
    has_context = False

    def __init__(self, begins: Callable[[], None]) -> None:
        begins()


@dataclass
class StreamPool:
    """Accounting of a device's stream-ordered pool; freed memory is not cached."""

    settings: dict[int, int] = field(default_factory=lambda: {1: 1, 2: 1, 3: 1, 4: 0})
    sizes: dict[int, int] = field(default_factory=dict)
    most_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use."""
        return sum(self.sizes.values())

    def add(self, address: int, nbytes: int) -> None:
        """Count an allocation."""
        self.sizes[address] = nbytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)


@dataclass
class DriverCalls:
    """Counts of driver calls: allocations, frees, and waits of the host."""

    allocation_count: int = 0
    free_count: int = 0
    wait_count: int = 0


class DeviceState:
    """The state of one device.

    Attributes:
        model: its VRAM, pages and time.
        beside: its streams that only copy.
        peers: the devices whose memory its kernels may use.
        fault: that of a kernel which has ended its context; None without one.
    """

    def __init__(self, ordinal: int, spec: GpuSpec, policy: Callable[[], Policy]) -> None:
        self.ordinal = ordinal
        self.model = Model(spec, COSTS, "plain", "numpy", policy)
        self.beside = CopyStreams(self.model)
        self.calls = DriverCalls()
        self.limits = dict(_LIMITS)
        self.pool = StreamPool()
        self.peers: set[int] = set()
        self.fault: Fault | None = None

    def restart(self) -> None:
        """Restart time and counts at zero, and peaks at what is held now."""
        model, self.calls = self.model, DriverCalls()
        with model.lock:
            model.clocks.restart()
            model.counters.restart()
            model.copies.restart()
            model.counters.restart_peaks(model.driver.reserved_bytes, model.driver.resident_count)
