"""What a CUDA runtime says of memory pools, limits and other devices; one of each is there.

Models: one pool of memory that is allocated in the order of a stream, which keeps nothing that was
freed. Does not model: pools of one's own, whose memory is that of the first.
"""

from __future__ import annotations

from typing import Any

from umem.devices.software.allocations import HostMemory
from umem.devices.software.streams import HostStreams

PCI_BUS = "0000:00:00.0"
INVALID_VALUE, INVALID_DEVICE, NO_PEER = 1, 101, 705
"""cudaError, of driver_types.h."""
_POOL = 1
_RESERVED, _MOST_RESERVED, _USED, _MOST_USED = 5, 6, 7, 8
"""cudaMemPoolAttr, of driver_types.h."""
_LIMITS = {0: 1024, 1: 1 << 20, 2: 8 << 20}
"""cudaLimit: stack, buffer of printf, heap of malloc."""


class HostPools(HostMemory, HostStreams):
    """Functions of ``cupy_backends.cuda.api.runtime``, by their names there."""

    def __init__(self) -> None:
        self._limits = dict(_LIMITS)
        self._pool_settings: dict[int, int] = {1: 1, 2: 1, 3: 1, 4: 0}
        self._in_pool: dict[int, int] = {}
        self._most_in_pool = 0
        self.count = 1

    def pooled(self, address: int, nbytes: int) -> int:
        """Count memory of the pool; returns its address."""
        self._in_pool[address] = nbytes
        self._most_in_pool = max(self._most_in_pool, sum(self._in_pool.values()))
        return address

    def unpooled(self, address: int) -> None:
        """Count memory that is freed no more, if it was the pool's."""
        self._in_pool.pop(address, None)

    def deviceGetDefaultMemPool(self, device: int) -> int:
        self.refuse_other(device)
        return _POOL

    def deviceGetMemPool(self, device: int) -> int:
        return self.deviceGetDefaultMemPool(device)

    def deviceSetMemPool(self, device: int, pool: int) -> None:
        self.refuse_other(device)

    def memPoolCreate(self, props: Any) -> int:
        return self.new_handle()

    def memPoolDestroy(self, pool: int) -> None:
        """Keep its memory, as CUDA does until it is freed."""

    def memPoolTrimTo(self, pool: int, keep: int) -> None:
        """Give nothing back: nothing is kept."""

    def memPoolGetAttribute(self, pool: int, attribute: int) -> int:
        used = sum(self._in_pool.values())
        counts = {_RESERVED: used, _USED: used}
        counts |= {_MOST_RESERVED: self._most_in_pool, _MOST_USED: self._most_in_pool}
        known = {**self._pool_settings, **counts}
        if attribute not in known:
            self.fail(INVALID_VALUE)
        return known[attribute]

    def memPoolSetAttribute(self, pool: int, attribute: int, value: int) -> None:
        if attribute in (_MOST_RESERVED, _MOST_USED) and not value:
            self._most_in_pool = sum(self._in_pool.values())
        elif attribute in self._pool_settings:
            self._pool_settings[attribute] = int(value)
        else:
            self.fail(INVALID_VALUE)

    def deviceGetLimit(self, limit: int) -> int:
        if limit not in self._limits:
            self.fail(INVALID_VALUE)
        return self._limits[limit]

    def deviceSetLimit(self, limit: int, value: int) -> None:
        self.deviceGetLimit(limit)
        self._limits[limit] = value

    def deviceGetPCIBusId(self, device: int) -> str:
        self.refuse_other(device)
        return PCI_BUS

    def deviceGetByPCIBusId(self, bus: str) -> int:
        if bus != PCI_BUS:
            self.fail(INVALID_DEVICE)
        return 0

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        self.refuse_other(device)
        self.refuse_other(peer)
        return 0

    def deviceDisablePeerAccess(self, peer: int) -> None:
        self.fail(NO_PEER)

    def refuse_other(self, device: int) -> None:
        """Fail for a device that is not there."""
        if not 0 <= device < self.count:
            self.fail(INVALID_DEVICE)
