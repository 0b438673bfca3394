"""The offload target on a virtual GPU: contents are really copied, the transfer is simulated."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.chainer.saved.tiers.recorder_events import KnownAs, record_fetch, record_send
from umem.devices import entered_device
from umem.errors import StateError


class SimulatedTier:
    """Pinned host memory of the virtual GPU that the calling code has entered; see `Tier`.

    Arrays are NumPy's there. Their contents are copied at once, to host memory that the model does
    not count; the model's transfers take simulated time, concurrently with the operations.

    Args:
        limit_bytes: the most that is offloaded at a time; None: no limit.

    Models: transfers both ways, and the streams that wait for them (docs/reference/virtual-gpu.md).
    Does not model: the cost of pinning, nor the host's memory. ``waited_seconds`` is always 0: the
    GPU waits, and its own figures include that.

    Raises:
        StateError: no virtual GPU is entered.
    """

    name = "pinned host memory (simulated)"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._device: Any = entered_device()
        if self._device is None:
            raise StateError("this tier is below a virtual GPU: use it inside umem.virtual_gpu")
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.sent_bytes = self.fetched_bytes = 0
        self.waited_seconds = 0.0

    def send(self, array: Any) -> SimulatedSent | None:
        """Copy an array aside, and begin its simulated transfer; None beyond the limit."""
        if self.limit_bytes is not None and self.held_bytes + array.nbytes > self.limit_bytes:
            return None
        sent = SimulatedSent(self, self._device, array)
        self.held_bytes += sent.nbytes
        self.sent_bytes += sent.nbytes
        return sent

    def close(self) -> None:
        """Do nothing: no transfer is under way, and each `SimulatedSent` owns its contents."""


class SimulatedSent:
    """An offloaded array, whose contents are copied aside; see `Sent`. Not thread-safe."""

    def __init__(self, tier: SimulatedTier, device: Any, array: Any) -> None:
        self._tier, self._device = tier, device
        self.nbytes = int(array.nbytes)
        self._class, self._shape, self._dtype = type(array), array.shape, array.dtype
        self._strides = array.strides
        self._contents: Any = array.view(np.ndarray).copy("K")
        self._here: Any = array
        self._known: KnownAs = record_send(array)

    def is_gone(self) -> bool:
        """Tell whether the simulated transfer is over at the host's simulated time."""
        return self._here is None or bool(self._device.is_sent(self._here))

    def release(self) -> None:
        """Drop the array; the virtual GPU waits if its transfer is not over."""
        self._here = None

    def fetch(self) -> None:
        """Allocate the array again, and begin its simulated transfer; no effect a second time.

        Raises:
            OutOfMemoryError: the virtual GPU has no room; the contents are kept.
        """
        if self._here is None:
            flat = np.empty(self.nbytes, np.uint8)
            fetched: Any = np.ndarray(self._shape, self._dtype, flat, 0, self._strides)
            fetched[...] = self._contents
            fetched = fetched if self._class is np.ndarray else fetched.view(self._class)
            record_fetch(fetched, self._known)
            self._here = fetched
            self._tier.fetched_bytes += self.nbytes

    def array(self) -> Any:
        """Return the array, for the caller alone; fetches it first if `fetch` was not called.

        Raises:
            OutOfMemoryError: as `fetch`.
        """
        self.fetch()
        found, self._here = self._here, None
        return found

    def forget(self) -> None:
        """Drop the contents; a second time does nothing."""
        if self._contents is not None:
            self._contents = self._here = None
            self._tier.held_bytes -= self.nbytes
