"""Has the device move what a plan says, which speaks of blocks: finds the arrays in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from umem.chainer.lookahead.side_stream import side_stream
from umem.devices.base import Device, Place
from umem.planner.prefetch.moves import Moves, SomeBlocks
from umem.units import BLOCK_BYTES

FindArray = Callable[[int], Any]
"""Gives the array of a slot as it is now, None where there is none."""


class Pager:
    """Carries out the moves of a plan, on a stream beside the operations.

    Attributes:
        fetched_bytes, sent_bytes, discarded_bytes: what it has asked for.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = side_stream(device)
        self.fetched_bytes = self.sent_bytes = self.discarded_bytes = 0

    def advance(self) -> bool:
        """An operation was issued; whether moves can be queued now."""
        return self._stream.advance()

    def move(self, moves: Moves, addresses: Sequence[int | None], find: FindArray) -> None:
        """Do what a plan says; ``addresses`` are those of the slots that it was made for.

        What goes leaves before anything comes, so that the driver finds room. Blocks that an
        array has are never forgotten: the device looks.
        """
        if moves.discards:
            self.discarded_bytes += self._device.discard_free(_all_blocks(moves.discards))
        if moves.sends:
            stream = self._stream.behind()
            self.sent_bytes += self._each(moves.sends, addresses, find, "cpu", stream)
        if moves.fetches or moves.ready:
            stream = self._stream.beside()
            here = self._device.ordinal
            self.fetched_bytes += self._each(moves.fetches, addresses, find, here, stream)
            self._device.make_ready(_all_blocks(moves.ready), stream)

    def _each(
        self,
        parts: Iterable[SomeBlocks],
        addresses: Sequence[int | None],
        find: FindArray,
        place: Place,
        stream: Any,
    ) -> int:
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
    """The ranges of addresses that blocks in ascending order cover."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start] * BLOCK_BYTES, (blocks[index - 1] + 1) * BLOCK_BYTES
            start = index


def _piece(array: Any, low: int, high: int) -> Any:
    """The bytes ``low`` to ``high`` of an array, as far as it has them; all where it has gaps."""
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        return array
    flat = (array if flags.c_contiguous else array.T).reshape(-1)
    return flat[max(0, low) // array.itemsize : -(-high // array.itemsize)]
