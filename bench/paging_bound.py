"""The least that the host link must carry in a step of managed memory, whoever decides.

A block that an operation touches must be in VRAM then. Between two touches it is kept there, or it
is not, and then

- where an array in it lives until the next touch, its contents go out and come in again;
- where all its arrays die before that, they go out, if they did so before the last one died;
- where that happens after the last one died, nothing moves: dead contents need no copy.

Which blocks to keep is a choice of intervals of which at most so many overlap as VRAM has blocks:
a flow of least cost, solved exactly by SciPy's HiGHS. Operations are taken to touch their blocks
one after the other, a step to repeat for ever, and the link to carry one thing at a time. It leaves
out what a move costs beside its bytes, and what new memory costs. Not a bound where memory is
advised to be read mostly, of which the host keeps a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

import umem
from umem._common.scopes import Scope
from umem._common.specs import GpuSpec
from umem.devices import Policy
from umem.devices.virtual import VirtualGPU
from umem.trace import Alloc, Event, Free, Mark, Op
from umem.units import BLOCK_BYTES

ROUNDS = 3
"""Steps of which the middle one is counted."""
Period = list[tuple[str, tuple[int, ...]]]
"""What happens to blocks in a step: they are touched in this order, or their last array died."""


class Footprint(VirtualGPU):
    """A virtual GPU that writes down the blocks that each operation touches, and those that die."""

    def __init__(self, spec: GpuSpec, repeats: bool) -> None:
        super().__init__(spec)
        self.steps: list[Period] = [[]]
        self._arrays_in: dict[int, int] = {}
        self.install(Policy("managed"), everywhere=True)
        if repeats:
            self.repeat_places(Scope("the places of a bound"))

    def on_event(self, event: Event) -> None:
        """Follow the blocks that an event uses, and those whose last array dies."""
        dying = self._blocks(event.tensor) if isinstance(event, Free) else ()
        super().on_event(event)
        for block in dying:
            self._arrays_in[block] -= 1
        died = tuple(block for block in dying if not self._arrays_in[block])
        if died:
            self.steps[-1].append(("died", died))
        if isinstance(event, Alloc):
            for block in self._blocks(event.tensor):
                self._arrays_in[block] = self._arrays_in.get(block, 0) + 1
        elif isinstance(event, Op):
            touched = dict.fromkeys(self._touched(event))
            self.steps[-1].append(("touched", tuple(touched)))
        elif event == Mark("step"):
            self.steps.append([])

    def _blocks(self, tensor: int) -> range:
        placed = self.model.tensors[tensor]
        start, nbytes = placed.span.address, placed.nbytes
        return range(start // BLOCK_BYTES, -(-(start + nbytes) // BLOCK_BYTES) if nbytes else 0)

    def _touched(self, op: Op) -> Iterator[int]:
        for tensor, low, high in (*op.reads, *op.writes):
            if high > low:
                start = self.model.tensors[tensor].span.address
                yield from range((start + low) // BLOCK_BYTES, -(-(start + high) // BLOCK_BYTES))


def footprint(trace: umem.Trace, spec: GpuSpec, repeats: bool = True) -> Period:
    """What the last whole step of a trace does to blocks, in managed memory.

    ``repeats``: places are handed out again in every step, as under `LookaheadPrefetch`.
    """
    gpu = Footprint(spec, repeats)
    for event in trace.events:
        gpu.on_event(event)
    return gpu.steps[-2]


def largest_blocks(period: Period) -> int:
    """The most blocks that one operation touches."""
    return max(len(blocks) for what, blocks in period if what == "touched")


def least_moves(period: Period, capacity: int) -> tuple[int, int]:
    """The blocks that a step brings in, and sends out, where the link carries least in all."""
    touches, gaps = _gaps(period)
    length = touches // ROUNDS
    kept = _best_kept(touches, gaps, capacity)
    brought = sent = 0
    for (start, _, ways), is_kept in zip(gaps, kept, strict=True):
        if length <= start < 2 * length and not is_kept:
            brought += ways == 2
            sent += 1
    return brought, sent


def _gaps(period: Period) -> tuple[int, list[tuple[int, int, int]]]:
    """The touches of some steps, and the times between: from, to, and how often the link runs."""
    clock, last, gaps = 0, {}, []
    for what, blocks in period * ROUNDS:
        for block in blocks:
            before = last.pop(block, None)
            if before is not None and clock - before > 1:
                gaps.append((before, clock, 2 if what == "touched" else 1))
            if what == "touched":
                last[block] = clock
                clock += 1
    return clock, gaps


def _best_kept(touches: int, gaps: Sequence[tuple[int, int, int]], capacity: int) -> Any:
    """Which gaps to keep blocks in VRAM for: those that save most, as a flow through time."""
    spare, number = capacity - 1, touches + len(gaps)
    sources = [*range(touches), *(start + 1 for start, _, _ in gaps)]
    targets = [*range(1, touches + 1), *(stop for _, stop, _ in gaps)]
    arcs = np.arange(number)
    ones = np.ones(number)
    flow = coo_array(
        (np.concatenate([ones, -ones]), ([*sources, *targets], np.concatenate([arcs, arcs]))),
        shape=(touches + 1, number),
    )
    balance = np.zeros(touches + 1)
    balance[0], balance[-1] = spare, -spare
    costs = np.concatenate([np.zeros(touches), [-float(ways) for _, _, ways in gaps]])
    upper = np.concatenate([np.full(touches, spare), np.ones(len(gaps))])
    bounds = np.stack([np.zeros(number), upper], axis=1)
    found = linprog(costs, A_eq=flow.tocsr(), b_eq=balance, bounds=bounds, method="highs")
    assert found.status == 0, found.message
    return found.x[touches:] > 0.5  # a flow of whole numbers
