"""The budget of one pass, and what there is beside its own arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from umem.trace.recording.storage import root_of


class Room:
    """A budget, and the arrays from outside that count in it.

    Args:
        budget: bytes in all; None where it is not known yet.
        parameters: arrays of parameters that optimizers have updated.
        other_bytes: what optimizers keep, and the gradients of the step before.
        is_wish: whether to do the least that can be done where the budget cannot be kept to.

    Attributes:
        fixed_bytes: what is there before anything is computed.
        parameter_bytes: of it, those parameters; so much their gradients will take.
    """

    def __init__(
        self,
        budget: int | None,
        parameters: Iterable[Any],
        other_bytes: int,
        *,
        is_wish: bool = False,
    ) -> None:
        self.budget, self.is_wish = budget, is_wish
        self._arrays: dict[int, Any] = {}
        self.fixed_bytes = 0
        self.read(parameters)
        self.parameter_bytes = self.fixed_bytes
        self.fixed_bytes += other_bytes

    def read(self, arrays: Iterable[Any]) -> None:
        """A call has read arrays from outside; None is passed over."""
        known = self._arrays
        for array in arrays:
            if array is not None and id(array) not in known:
                known[id(array)] = array
                root = root_of(array)
                if root is array or id(root) not in known:
                    known[id(root)] = root
                    self.fixed_bytes += int(root.nbytes)

    def has(self, array: Any) -> bool:
        """Tell whether a call has read it."""
        return id(array) in self._arrays

    @property
    def rest_bytes(self) -> int:
        """What is left of the budget for the pass's own arrays."""
        return 0 if self.budget is None else max(0, self.budget - self.fixed_bytes)
