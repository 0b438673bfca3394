"""The order of a step's operations, and the arrays that each of them uses.

Arrays are new objects in every iteration, so an order numbers *slots*: a slot identifies an array
by its first use (the operation, and which of its accesses). Two iterations have the same order if
name, phase, slots and the bytes of new slots agree at every call. Then the same operations made the
arrays, and the same parameters, states and constants were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from umem.trace import Op

LASTING = ("parameter", "state", "input")
"""Kinds of tensors that count as older than the very first iteration."""


class Step(NamedTuple):
    """One operation: the slots that it uses, and the bytes of the slots that it uses first."""

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
        ends: by slot, the operation before which its array died; missing if it outlived the
            iteration.
        kept: the slots whose arrays are older than the iteration and outlived it (parameters,
            optimizer state, constants of the model), with their tensors.
        late_ends: by slot whose array outlives its iteration, the operation of the next iteration
            before which the array dies; missing if that is unknown or later.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]
    ends: Mapping[int, int]
    kept: Mapping[int, int]
    late_ends: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Iteration:
    """The operations of an iteration that is still running, so far.

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
        """Append an operation; ``bytes_of`` has the bytes of the live tensors."""
        known = len(self.tensors)
        reads = tuple([self._slot(access[0], bytes_of) for access in op.reads])
        writes = tuple([self._slot(access[0], bytes_of) for access in op.writes])
        step = Step(op.name, op.phase, reads, writes, tuple(self.sizes[known:]))
        self.steps.append(step)
        return step

    def free(self, tensor: int) -> None:
        """Record that a tensor has died."""
        slot = self._slots.get(tensor)
        if slot is not None:
            self.ends[slot] = len(self.steps)
        elif tensor < self.first:
            self.older_ends[tensor] = len(self.steps)

    def kept(self, kinds: Mapping[int, str] | None = None) -> dict[int, int]:
        """Return the slots of live tensors that are older than the iteration, with the tensors.

        ``kinds``: the kinds of the tensors, passed for the very first iteration, in which every
        tensor is new: tensors of the kinds `LASTING` count as older.
        """
        known = {} if kinds is None else kinds
        return {
            slot: tensor
            for slot, tensor in enumerate(self.tensors)
            if slot not in self.ends and (tensor < self.first or known.get(tensor) in LASTING)
        }

    def order(self, kept: Mapping[int, int], before: Iteration | None = None) -> Order:
        """Return the order of this iteration, given the slots that `kept` returns.

        With an iteration ``before`` of the same operations, the order also has the deaths of the
        arrays that outlived it.
        """
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
