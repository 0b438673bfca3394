"""The order of a step's operations, and which arrays each of them uses.

Arrays are new objects in every iteration, so an order speaks of *slots*: a slot is an array by
where it is first used (which operation, which of its accesses). Two iterations have the same
order when, at every call, name, phase, slots and the bytes of new slots agree; that holds which
operation made each array, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from umem.trace import Op


class Step(NamedTuple):
    """One operation: the slots that it uses, and the bytes of those that it uses first."""

    name: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    new_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """What an iteration did.

    Attributes:
        steps: the operations, the optimizer's updates last.
        sizes: bytes of each slot.
        ends: when each slot's array died: before which operation; missing where it lived on.
        kept: the slots whose arrays are older than the iteration (parameters, optimizer state,
            a graph's constants), and the tensors that they are.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]
    ends: Mapping[int, int]
    kept: Mapping[int, int]


@dataclass
class Iteration:
    """An iteration as far as it has come.

    Args:
        first: the number of the first tensor that is not older than the iteration.
    """

    first: int
    steps: list[Step] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)

    def add(self, op: Op, bytes_of: Mapping[int, int]) -> Step:
        """Append an operation."""
        known = len(self.tensors)
        reads = tuple([self._slot(access[0], bytes_of) for access in op.reads])
        writes = tuple([self._slot(access[0], bytes_of) for access in op.writes])
        step = Step(op.name, op.phase, reads, writes, tuple(self.sizes[known:]))
        self.steps.append(step)
        return step

    def free(self, tensor: int) -> None:
        """A tensor has died."""
        slot = self._slots.get(tensor)
        if slot is not None:
            self.ends[slot] = len(self.steps)

    def order(self, guess: Mapping[int, str] | None = None) -> Order:
        """What was done.

        ``guess`` has the kinds of tensors, for the first iteration of all, in which everything
        is new: what is a parameter, state or input is taken as older.
        """
        kept = {}
        for slot, tensor in enumerate(self.tensors):
            if slot in self.ends:
                continue
            lasting = guess is not None and guess.get(tensor) in ("parameter", "state", "input")
            if tensor < self.first or lasting:
                kept[slot] = tensor
        return Order(tuple(self.steps), tuple(self.sizes), dict(self.ends), kept)

    def _slot(self, tensor: int, bytes_of: Mapping[int, int]) -> int:
        slot = self._slots.get(tensor)
        if slot is None:
            slot = self._slots[tensor] = len(self.tensors)
            self.tensors.append(tensor)
            self.sizes.append(bytes_of[tensor])
        return slot
