"""Carries out a plan's moves on a side stream, beside the stream of the operations.

A plan lists blocks; the pager finds the arrays in them. On CUDA the side stream is non-blocking.
The host runs ahead of the GPU, so moves that were merely queued would run long before their time.
Events hold them back. Blocks that are fetched for an operation wait for the operations before it,
and then move while it runs. Blocks that are sent to the host wait for the operation itself, which
may still use them. Operations never wait for moves: one that runs before its arrays have arrived
takes page faults, as it would have without the pager. A prefetch never changes contents, so
no order of prefetches and operations is wrong, only slow. Discards change contents, so the device
runs nothing at the same time that uses or moves their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from umem.devices import Device, Place
from umem.planner.prefetch import Moves, SomeBlocks
from umem.units import BLOCK_BYTES

USABLE = 0.95
"""Usable share of a real GPU's VRAM; a virtual GPU states its own. A guess that no measurement
supports: the rest is for the CUDA context, modules and workspaces of libraries."""
FindArray = Callable[[int], Any]
"""Returns the current array of a slot, or None."""


def room(device: Device, own_bytes: int, in_blocks: int = 0) -> int | None:
    """Return the blocks of VRAM to plan with; None while all reserved memory fits.

    A plan moves ``own_bytes``; all other reserved memory counts as if it stayed in VRAM.
    ``in_blocks`` is the size of ``own_bytes`` in whole blocks, if that is known to be larger.
    """
    reserved = device.usage().reserved_bytes
    usable = round(device.vram_bytes * (1 if device.simulated else USABLE))
    if reserved + max(0, in_blocks - own_bytes) <= usable:
        return None
    return max(0, usable - max(0, reserved - own_bytes)) // BLOCK_BYTES


def is_on(device: Device, array: Any) -> bool:
    """Tell whether an array is on a device."""
    if device.backend == "numpy":
        return isinstance(array, np.ndarray)
    return getattr(getattr(array, "device", None), "id", None) == device.ordinal


class VirtualSideStream:
    """Side stream of a virtual GPU, where any stream but None runs beside the operations."""

    def advance(self) -> bool:
        """Record that an operation was issued; returns whether moves can be queued now."""
        return True

    def during_operation(self) -> Any:
        """Return a stream for moves that run during the operation."""
        return self

    def after_operation(self) -> Any:
        """Return a stream for moves that run after the operation."""
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
        """Record an event after the operation just issued; returns whether moves can be queued now.

        They cannot during a stream capture, which they would break.
        """
        from umem.devices.cuda import is_captured  # imports CuPy, which need not be there

        current = self._xp.cuda.get_current_stream()
        if is_captured(current.ptr):
            self._recorded = False
            return False
        ready, self._recorded = self._recorded, True
        self._before, self._after = self._after, self._before
        self._after.record(current)
        return ready

    def during_operation(self) -> Any:
        """Return the stream, which then waits for the work before the operation."""
        self._stream.wait_event(self._before)
        return self._stream

    def after_operation(self) -> Any:
        """Return the stream, which then waits for the operation."""
        self._stream.wait_event(self._after)
        return self._stream


SideStream = VirtualSideStream | CudaSideStream


def side_stream(device: Device) -> SideStream:
    """Make the side stream for a device."""
    return VirtualSideStream() if device.backend == "numpy" else CudaSideStream(device.xp)


class Pager:
    """Carries out a plan's moves on a side stream.

    Attributes:
        fetched_bytes, sent_bytes, discarded_bytes: total bytes of its requests.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = side_stream(device)
        self.fetched_bytes = self.sent_bytes = self.discarded_bytes = 0

    def advance(self) -> bool:
        """Record that an operation was issued; returns whether moves can be queued now."""
        return self._stream.advance()

    def move(self, moves: Moves, addresses: Sequence[int | None], find: FindArray) -> None:
        """Carry out the moves planned for an operation; ``addresses`` has the slots' addresses when
        the plan was made.

        Evicts blocks before it prefetches others, so that the driver finds room. The device never
        discards blocks that an array uses: it checks.
        """
        if moves.discards:
            self.discarded_bytes += self._device.discard_free(_all_blocks(moves.discards))
        if moves.sends:
            stream = self._stream.after_operation()
            self.sent_bytes += self._each(moves.sends, addresses, find, "cpu", stream)
        if moves.fetches:
            stream, here = self._stream.during_operation(), self._device.ordinal
            self.fetched_bytes += self._each(moves.fetches, addresses, find, here, stream)
        if moves.ready:
            self._device.make_ready(_all_blocks(moves.ready), self._stream.after_operation())

    def _each(
        self,
        parts: Iterable[SomeBlocks],
        addresses: Sequence[int | None],
        find: FindArray,
        place: Place,
        stream: Any,
    ) -> int:
        """Move the parts of arrays that still exist; returns the bytes."""
        moved = 0
        for part in parts:
            for slot in part.slots:
                array, address = find(slot), addresses[slot]
                if array is not None and address is not None:
                    for low, high in _runs(part.blocks):
                        piece = _piece(array, low - address, high - address)
                        moved += self._device.prefetch(piece, place, stream)
                    break
        return moved


def _all_blocks(parts: Iterable[SomeBlocks]) -> list[int]:
    return sorted({block for part in parts for block in part.blocks})


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of blocks, which are in ascending order."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start] * BLOCK_BYTES, (blocks[index - 1] + 1) * BLOCK_BYTES
            start = index


def _piece(array: Any, low: int, high: int) -> Any:
    """Return bytes ``low`` to ``high`` of an array, clipped; the whole array if it has gaps."""
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        return array
    flat = (array if flags.c_contiguous else array.T).reshape(-1)
    return flat[max(0, low) // array.itemsize : -(-high // array.itemsize)]
