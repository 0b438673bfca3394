"""The order of a step's operations, and which arrays each of them uses.

Arrays are new objects in every iteration, so an order speaks of *slots*: a slot is an array by
where it is first used (which operation, which of its accesses). Two iterations have the same
order when name, phase, slots and the bytes of new slots agree at every call. That also says
which operation made each array, and which arrays are the same parameter, state or constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from umem.trace.events import Op

LASTING = ("parameter", "state", "input")
"""Kinds of tensors that are taken to be older than the first iteration of all."""


class Step(NamedTuple):
    """One operation: the slots that it uses, and the bytes of those that nobody used before."""

    name: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    new_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """The operations of an iteration, and the arrays that they use.

    Attributes:
        steps: the operations, the optimizer's updates last.
        sizes: bytes of each slot.
        ends: before which operation each slot's array died; missing where it lived on.
        kept: the slots whose arrays are older than the iteration and outlived it (parameters,
            optimizer state, constants of the model), and the tensors that they are.
        late_ends: of slots whose arrays outlive their iteration, before which operation of the
            next they die; missing where that is not known, or is later.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]
    ends: Mapping[int, int]
    kept: Mapping[int, int]
    late_ends: Mapping[int, int] = field(default_factory=dict)


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
    older_ends: dict[int, int] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)

    def add(self, op: Op, bytes_of: Mapping[int, int]) -> Step:
        """Append an operation, given the bytes of the tensors that live."""
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
        elif tensor < self.first:
            self.older_ends[tensor] = len(self.steps)

    def kept(self, kinds: Mapping[int, str] | None = None) -> dict[int, int]:
        """The slots of tensors that are older than the iteration and still there.

        ``kinds`` of the tensors are given in the first iteration of all, in which everything is
        new: `LASTING` says what is taken to be older.
        """
        known = {} if kinds is None else kinds
        return {
            slot: tensor
            for slot, tensor in enumerate(self.tensors)
            if slot not in self.ends and (tensor < self.first or known.get(tensor) in LASTING)
        }

    def order(self, kept: Mapping[int, int], before: Iteration | None = None) -> Order:
        """Return what was done, and what became of the arrays of the iteration before."""
        late_ends = {}
        if before is not None and before.steps == self.steps:
            late_ends = {
                slot: self.older_ends[tensor]
                for slot, tensor in enumerate(before.tensors)
                if tensor in self.older_ends
            }
        return Order(tuple(self.steps), tuple(self.sizes), dict(self.ends), kept, late_ends)

    def _slot(self, tensor: int, bytes_of: Mapping[int, int]) -> int:
        slot = self._slots.get(tensor)
        if slot is None:
            slot = self._slots[tensor] = len(self.tensors)
            self.tensors.append(tensor)
            self.sizes.append(bytes_of[tensor])
        return slot
