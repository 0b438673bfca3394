"""One device, with its own pool, limits, peers and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from umem.host_cuda.faults import Fault

_LIMITS = {0: 1024, 1: 1 << 20, 2: 8 << 20}
"""Values of cudaLimit, from driver_types.h: stack, printf buffer, malloc heap."""


class Current(threading.local):
    """The device that a thread works on, and whether it has a context there.

    Args:
        begins: called once in each thread that uses it.
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
        peers: the devices whose memory its kernels may use.
        fault: the kernel fault that has ended its context; None without a fault.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.calls = DriverCalls()
        self.limits = dict(_LIMITS)
        self.pool = StreamPool()
        self.peers: set[int] = set()
        self.fault: Fault | None = None
