"""Translates moves of a model's blocks into moves of the program's allocations in them."""

from __future__ import annotations

import bisect

from umem.devices.page_moves import MoveListener, PageMove
from umem.devices.software.gpu_model import GpuModel
from umem.devices.virtual.model import Model


class AllocationParts:
    """Reports moves of a model's blocks by allocation; the last one gets the rest of the blocks."""

    def __init__(self, gpus: GpuModel, model: Model, moved: MoveListener) -> None:
        self._addresses, self._model, self._moved = gpus.addresses, model, moved
        self._known: tuple[int, int] = (0, -1)
        self._placed: list[tuple[int, int, int]] = []  # address, end and number, in the model

    def tell(self, move: PageMove) -> None:
        """Report a move."""
        rest, address, stop = move.nbytes, 0, 0
        for start, end, number in self._between(move.address, move.stop):
            own = self._addresses.get(number)
            if own is None:
                continue
            if stop:
                self._moved(move._replace(address=address, stop=stop, nbytes=stop - address))
                rest, move = rest - (stop - address), move._replace(gpu_faults=0)
            low, high = max(move.address, start), min(move.stop, end)
            address, stop = own + low - start, own + high - start
        self._moved(move._replace(address=address, stop=stop, nbytes=rest))

    def _between(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return the allocations in a range of the model's addresses."""
        tensors = self._model.tensors
        known = len(tensors), next(reversed(tensors), -1)  # numbers only rise
        if known != self._known:
            self._known = known
            placed = (
                (one.span.address, one.nbytes, n) for n, one in tensors.items() if one.managed
            )
            self._placed = sorted((start, start + nbytes, n) for start, nbytes, n in placed)
        first = bisect.bisect_right(self._placed, (low, 0, 0))
        if first and self._placed[first - 1][1] > low:
            first -= 1
        return self._placed[first : bisect.bisect_left(self._placed, (high, 0, 0))]
