"""Parameters that change while a graph could still go backward.

An optimizer's update changes them, and so do loading a file and copying from another link.

A call that runs again has to find its parameters as they were. Where one forward serves two
updates, as in the usual training of two networks against each other, the second backward goes
through a graph whose parameters the first update has changed. While a graph is being learned,
those parameters are copied before an update, so that this comes out exact; such a graph is not
planned. Where it happens under a plan for the first time, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem.chainer.recompute.wiring import checksum, root_of
from umem.errors import RecomputeError


class Outside:
    """The parameters that one pass reads, as they were in its forward.

    Attributes:
        copies: whether parameters are copied before an update.
        reads: the identities of all arrays from outside that its calls have read.
        tell: called when a call has to run again after an update.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._copies: dict[int, Any] = {}
        self._changed: dict[int, Any] = {}
        self.copies = True
        self.reads: set[int] = set()
        self._sums: dict[int, int] = {}
        self.tell = tell

    @property
    def is_changed(self) -> bool:
        """Whether an optimizer has changed any parameter since."""
        return bool(self._changed)

    def before_update(self, array: Any) -> None:
        """An optimizer is about to change a parameter's array."""
        if id(array) not in self._changed:
            self._changed[id(array)] = array  # held, so that nothing else gets its identity
            if self.copies:
                self._copies[id(array)] = array.copy()

    def watch(self, array: Any) -> None:
        """Remember what an array holds, now that nobody says any more when it changes."""
        if array is not None and id(array) not in self._sums:
            self._sums[id(array)] = checksum(array)

    def find(self, array: Any, label: str) -> Any:
        """An array from outside as it was in forward.

        Raises:
            RecomputeError: it was changed since, and there is no copy.
        """
        known = self._sums.get(id(array))
        if known is not None and known != checksum(array):
            raise RecomputeError(
                f"{label!r} has to run again, and what it reads was changed since the block of "
                "Recompute was left: go backward before that, or within the block"
            )
        if array is None or not self._changed:
            return array
        key = id(array)
        if key not in self._changed:
            key = id(root_of(array))
        if key not in self._changed:
            return array
        self.tell()
        if key == id(array) and key in self._copies:
            return self._copies[key]
        raise RecomputeError(
            f"{label!r} has to run again, and an optimizer has changed its parameters since: the "
            "graph goes backward once more after an update. From the next pass on everything of "
            "it is kept; take all backward passes before the first update to have it planned"
        )
