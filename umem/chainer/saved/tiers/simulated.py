"""Pinned host memory below a virtual GPU: contents really go aside, the way is simulated."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.chainer.saved.tiers.recorder_events import KnownAs, hear_fetch, hear_send
from umem.devices.open import entered_device
from umem.errors import StateError


class SimulatedTier:
    """The pinned host memory of the virtual GPU that the calling code is in.

    Arrays are NumPy's there. Their contents are copied to host memory that the model does not
    count, at once; the model's copies take their time, beside the operations.

    Args:
        limit_bytes: the most that lies there at a time; None: no limit.

    Models: both ways, and who waits for them (docs/virtual-gpu.md). Does not model: what pinning
    costs, nor what the host has. ``waited_seconds`` is 0: the GPU waits, and its figures say so.

    Raises:
        StateError: there is no virtual GPU here.
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
        """Begin to send an array; None where the limit leaves no room."""
        if self.limit_bytes is not None and self.held_bytes + array.nbytes > self.limit_bytes:
            return None
        sent = SimulatedSent(self, self._device, array)
        self.held_bytes += sent.nbytes
        self.sent_bytes += sent.nbytes
        return sent

    def close(self) -> None:
        """Nothing is under way, and what was sent belongs to whoever holds it."""


class SimulatedSent:
    """An array that the model sends, or has sent; its contents lie aside. Not thread-safe."""

    def __init__(self, tier: SimulatedTier, device: Any, array: Any) -> None:
        self._tier, self._device = tier, device
        self.nbytes = int(array.nbytes)
        self._class, self._shape, self._dtype = type(array), array.shape, array.dtype
        self._strides = array.strides
        self._contents: Any = array.view(np.ndarray).copy("K")
        self._here: Any = array
        self._known: KnownAs = hear_send(array)

    def is_gone(self) -> bool:
        """Tell whether the host, where it has come to, would find the copy over."""
        return self._here is None or bool(self._device.is_sent(self._here))

    def let_go(self) -> None:
        """Hold the array no more; the model's GPU waits where its memory goes too early."""
        self._here = None

    def fetch(self) -> None:
        """Begin to bring the array back.

        Raises:
            OutOfMemoryError: the virtual GPU has no room; the contents still lie aside.
        """
        if self._here is None:
            flat = np.empty(self.nbytes, np.uint8)
            fetched: Any = np.ndarray(self._shape, self._dtype, flat, 0, self._strides)
            fetched[...] = self._contents
            fetched = fetched if self._class is np.ndarray else fetched.view(self._class)
            hear_fetch(fetched, self._known)
            self._here = fetched
            self._tier.fetched_bytes += self.nbytes

    def array(self) -> Any:
        """The array, which the caller alone holds from now on."""
        self.fetch()
        found, self._here = self._here, None
        return found

    def forget(self) -> None:
        """Give up the contents."""
        if self._contents is not None:
            self._contents = self._here = None
            self._tier.held_bytes -= self.nbytes
