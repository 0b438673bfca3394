"""CUDA runtime functions for memory pools, limits and peers, which each device has separately.

Models: one pool of stream-ordered memory for each device, without a cache; any two devices may be
peers. Does not model: pools made by the program, which use the device's pool.
"""

from __future__ import annotations

import re
from typing import Any

from umem.host_cuda.device_state import StreamPool
from umem.host_cuda.streams import HostStreams

INVALID_VALUE, INVALID_DEVICE, IS_PEER, NO_PEER = 1, 101, 704, 705
"""Values of cudaError, from driver_types.h."""
_FIRST_POOL = 1
"""Handle of the first device's pool; other devices' handles follow."""
_RESERVED, _MOST_RESERVED, _USED, _MOST_USED = 5, 6, 7, 8
"""Values of cudaMemPoolAttr, from driver_types.h."""


_BUS = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]"


class HostPools(HostStreams):
    """Functions of ``cupy_backends.cuda.api.runtime`` on pools, limits and peers."""

    @property
    def count(self) -> int:
        """Return the number of devices."""
        return len(self.devices)

    def _pool(self, handle: int) -> StreamPool:
        number = handle - _FIRST_POOL
        return self.devices[number].pool if 0 <= number < self.count else self.here.pool

    def unpooled(self, address: int) -> None:
        """Remove memory from its pool's count, if it belongs to a pool."""
        for device in self.devices:
            device.pool.sizes.pop(address, None)

    def deviceGetDefaultMemPool(self, device: int) -> int:
        self.refuse_other(device)
        return _FIRST_POOL + device

    def deviceGetMemPool(self, device: int) -> int:
        return self.deviceGetDefaultMemPool(device)

    def deviceSetMemPool(self, device: int, pool: int) -> None:
        self.refuse_other(device)

    def memPoolCreate(self, props: Any) -> int:
        return self.new_handle()

    def memPoolDestroy(self, pool: int) -> None:
        """Keep the pool's memory until it is freed, as CUDA does."""

    def memPoolTrimTo(self, pool: int, keep: int) -> None:
        """Do nothing, because there is no cache."""

    def memPoolGetAttribute(self, pool: int, attribute: int) -> int:
        found = self._pool(pool)
        counts = {_RESERVED: found.used_bytes, _USED: found.used_bytes}
        counts |= {_MOST_RESERVED: found.most_bytes, _MOST_USED: found.most_bytes}
        known = {**found.settings, **counts}
        if attribute not in known:
            self.fail(INVALID_VALUE)
        return known[attribute]

    def memPoolSetAttribute(self, pool: int, attribute: int, value: int) -> None:
        found = self._pool(pool)
        if attribute in (_MOST_RESERVED, _MOST_USED) and not value:
            found.most_bytes = found.used_bytes
        elif attribute in found.settings:
            found.settings[attribute] = int(value)
        else:
            self.fail(INVALID_VALUE)

    def deviceGetLimit(self, limit: int) -> int:
        if limit not in self.here.limits:
            self.fail(INVALID_VALUE)
        return self.here.limits[limit]

    def deviceSetLimit(self, limit: int, value: int) -> None:
        self.deviceGetLimit(limit)
        self.here.limits[limit] = value

    def deviceGetPCIBusId(self, device: int) -> str:
        self.refuse_other(device)
        return f"0000:{device:02x}:00.0"

    def deviceGetByPCIBusId(self, bus: str) -> int:
        if re.fullmatch(_BUS, bus) is None:
            self.fail(INVALID_VALUE)
        known = [self.deviceGetPCIBusId(device) for device in range(self.count)]
        if bus.lower() not in known:
            self.fail(INVALID_DEVICE)
        return known.index(bus.lower())

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        self.refuse_other(device)
        self.refuse_other(peer)
        return int(device != peer)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        if peer in self.here.peers:
            self.fail(IS_PEER)
        self._deviceEnsurePeerAccess(peer)

    def _deviceEnsurePeerAccess(self, peer: int) -> None:
        self.refuse_other(peer)
        if peer == self.here.ordinal:
            self.fail(INVALID_DEVICE)
        self.here.peers.add(peer)

    def deviceDisablePeerAccess(self, peer: int) -> None:
        self.refuse_other(peer)
        if peer not in self.here.peers:
            self.fail(NO_PEER)
        self.here.peers.remove(peer)

    def refuse_other(self, device: int) -> None:
        """Raise for a device that does not exist."""
        if not 0 <= device < self.count:
            self.fail(INVALID_DEVICE)
