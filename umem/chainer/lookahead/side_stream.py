"""A stream beside the one that operations run on, for moves that overlap with them.

On CUDA it is a non-blocking stream of its own. The host runs ahead of the GPU, so moves that
were merely queued there would run long before their time. Events hold them back: what is brought
in while an operation is issued waits for the operations before that one, and then runs beside
it; what is sent away waits for the operation itself, which may still use it. Nothing waits in
the other direction: an operation that comes before its arrays takes the faults that it would
have taken anyway. A prefetch never changes contents, so no order is wrong, only slow.
"""

from __future__ import annotations

from typing import Any

from umem.devices.base import Device


class VirtualSideStream:
    """Moves on a virtual GPU: any stream that is not None is beside the operations there."""

    def advance(self) -> bool:
        """An operation was issued; whether moves can be queued now."""
        return True

    def beside(self) -> Any:
        """The stream for moves beside the operation."""
        return self

    def behind(self) -> Any:
        """The stream for moves after the operation."""
        return self


class CudaSideStream:
    """A non-blocking stream of the current GPU. Never run on a GPU yet.

    Cost: an event recorded for each operation, and two waits.

    Args:
        xp: CuPy.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._before, self._after = (xp.cuda.Event(disable_timing=True) for _ in range(2))
        self._recorded = False

    def advance(self) -> bool:
        """An operation was issued on the current stream; whether moves can be queued now.

        They cannot during a stream's capture, which they would spoil.
        """
        current = self._xp.cuda.get_current_stream()
        if current.is_capturing():
            self._recorded = False
            return False
        ready, self._recorded = self._recorded, True
        self._before, self._after = self._after, self._before
        self._after.record(current)
        return ready

    def beside(self) -> Any:
        """The stream, which waits for what came before the operation."""
        self._stream.wait_event(self._before)
        return self._stream

    def behind(self) -> Any:
        """The stream, which waits for the operation."""
        self._stream.wait_event(self._after)
        return self._stream


SideStream = VirtualSideStream | CudaSideStream


def side_stream(device: Device) -> SideStream:
    """The kind of stream that goes with the device."""
    return VirtualSideStream() if device.backend == "numpy" else CudaSideStream(device.xp)
