"""The blocks that an iteration's operations use, and how long each of them stays unused.

Managed memory moves in blocks, and small arrays share them: the VRAM that an iteration needs is
counted in blocks, from the addresses of its arrays. Blocks with the same arrays form a
`BlockGroup`.

Models: births, uses and deaths of arrays, in an iteration that repeats for ever. Does not model:
contents, arrays that no operation uses, workspace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from umem.planner.prefetch.order import Order
from umem.units import BLOCK_BYTES


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with the same arrays, and the slots of these arrays."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Gap:
    """A time in which a group of blocks is not used.

    Times are numbers of operations; the count continues into the next iteration.

    Attributes:
        group: the blocks.
        last, next: the uses before and after the gap.
        death: the operation before which the last array in the blocks died; None if one lives until
            the next use, which then needs the contents.
    """

    group: BlockGroup
    last: int
    next: int
    death: int | None


@dataclass(frozen=True)
class Footprint:
    """The blocks that an iteration uses: how many at each operation, and the gaps between uses."""

    used: tuple[int, ...]
    gaps: tuple[Gap, ...]


def footprint(order: Order, addresses: Sequence[int | None], *, forgets: bool = True) -> Footprint:
    """Find the blocks that an order uses; a slot with the address None is not in managed memory.

    Without ``forgets``, blocks cannot be discarded, and all contents count as needed.

    Cost: a pass over the blocks, and over the uses of each group.
    """
    uses = _uses(order)
    used = [0] * len(order.steps)
    gaps: list[Gap] = []
    for group in _groups(order, addresses):
        times = sorted({time for slot in group.slots for time in uses[slot]})
        for time in times:
            used[time] += len(group.blocks)
        lives = sorted(_lives(order, uses, group.slots))
        following = [*times[1:], times[0] + len(used)]
        for last, after in zip(times, following, strict=True):
            if after - last > 1:
                death = _death(lives, last, after) if forgets else None
                gaps.append(Gap(group, last, after, death))
    return Footprint(tuple(used), tuple(gaps))


def _uses(order: Order) -> list[list[int]]:
    uses: list[list[int]] = [[] for _ in order.sizes]
    for number, step in enumerate(order.steps):
        for slot in {*step.reads, *step.writes}:
            uses[slot].append(number)
    return uses


def _groups(order: Order, addresses: Sequence[int | None]) -> Iterator[BlockGroup]:
    """Group the blocks with the same slots; slots without an address or bytes have no block."""
    inside: dict[int, list[int]] = {}
    for slot, (address, size) in enumerate(zip(addresses, order.sizes, strict=True)):
        if address is not None and size:
            for block in range(address // BLOCK_BYTES, -(-(address + size) // BLOCK_BYTES)):
                inside.setdefault(block, []).append(slot)
    groups: dict[tuple[int, ...], list[int]] = {}
    for block, slots in inside.items():
        groups.setdefault(tuple(slots), []).append(block)
    for slots_, blocks in groups.items():
        yield BlockGroup(tuple(sorted(blocks)), slots_)


def _lives(
    order: Order, uses: Sequence[Sequence[int]], slots: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield birth and death of the arrays of slots, in this iteration and its neighbours."""
    count = len(order.steps)
    for slot in slots:
        born = uses[slot][0]
        if slot in order.kept:
            yield -count, 3 * count
            continue
        end = order.ends.get(slot)
        if end is None:  # the array outlives the iteration
            end = count + order.late_ends.get(slot, count)
        for start in (-count, 0, count):
            yield start + born, start + end


def _death(lives: Sequence[tuple[int, int]], last: int, after: int) -> int | None:
    """Return the operation before which all arrays have died after a use; None: one lives on."""
    end = last
    for born, dies in lives:  # by birth
        if born > end:
            break
        end = max(end, dies)
    return None if end >= after else end
