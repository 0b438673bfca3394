"""The gradients that a backward holds: on their way, and those of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from umem.trace.recording.storage import root_of


class GradientsHeld:
    """Gradients by the memory that they are on; one that is handed on counts once.

    Attributes:
        nbytes: what they take.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._counts: dict[int, int] = {}

    def add(self, array: Any) -> None:
        """One more is on this memory, which lives until it is taken away."""
        root = array if array.base is None else root_of(array)
        count = self._counts.get(id(root), 0)
        if not count:
            self.nbytes += int(root.nbytes)
        self._counts[id(root)] = count + 1

    def remove(self, array: Any) -> None:
        """One of them is gone."""
        root = array if array.base is None else root_of(array)
        count = self._counts.pop(id(root), 0)
        if count > 1:
            self._counts[id(root)] = count - 1
        elif count:
            self.nbytes -= int(root.nbytes)

    def begin_step(self, sums: Mapping[Any, list[Any]]) -> None:
        """A step begins, which takes these gradients of its inputs and puts others there."""
        for found in sums.values():
            for g in found:
                if g.raw_array is not None:
                    self.remove(g.raw_array)

    def end_step(self, sums: Mapping[Any, list[Any]], taken: Iterable[Any]) -> None:
        """A step has put gradients there, and those of its outputs are gone."""
        for found in sums.values():
            for g in found:
                if g.raw_array is not None:
                    self.add(g.raw_array)
        for g in taken:
            if g is not None and g.raw_array is not None:
                self.remove(g.raw_array)
