"""A plan of moves, carried out by a machine that knows nothing of how it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from umem.planner.prefetch.block_footprint import Footprint, footprint
from umem.planner.prefetch.moves import MovePlan, Moves, SomeBlocks, plan_moves
from umem.planner.prefetch.order import Iteration, Order, Step
from umem.trace import Op
from umem.units import BLOCK_BYTES

CYCLES = 4


@dataclass(frozen=True)
class Placed:
    """An order and where its slots lie; no two that live at once overlap."""

    order: Order
    addresses: tuple[int, ...]

    def blocks(self, slot: int) -> range:
        start, size = self.addresses[slot], self.order.sizes[slot]
        return range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))

    def touched(self, number: int) -> set[int]:
        return {block for slot in self.order.steps[number].reads for block in self.blocks(slot)}

    def lives_after(self, slot: int, number: int) -> bool:
        """Whether the slot's array, of this iteration or the one before, lives after an op."""
        if slot in self.order.kept:
            return True
        count = len(self.order.steps)
        return any(born <= time < dies for born, dies in [self.life(slot)]
                   for time in (number, number + count))  # fmt: skip

    def life(self, slot: int) -> tuple[int, int]:
        uses = [n for n, step in enumerate(self.order.steps) if slot in step.reads]
        count = len(self.order.steps)
        late = count + self.order.late_ends.get(slot, count)
        return uses[0], self.order.ends.get(slot, late)


@st.composite
def placed_orders(draw: st.DrawFn) -> Placed:
    """Random orders, their slots at the lowest addresses that are free as long as they live."""
    count = draw(st.integers(1, 8))
    some_bytes = st.sampled_from([512, BLOCK_BYTES // 3, BLOCK_BYTES, 5 * BLOCK_BYTES // 2])
    sizes = draw(st.lists(some_bytes, min_size=1, max_size=8))
    slots = st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)
    uses = [draw(slots) for _ in range(count)]
    names = {slot: number for number, slot in enumerate(sorted(set().union(*uses)))}
    steps = [
        Step("f", "forward", tuple(sorted(names[slot] for slot in use)), (), ()) for use in uses
    ]
    seen_sizes = tuple(sizes[slot] for slot in names)
    kept, ends, late_ends = {}, {}, {}
    for slot in names.values():
        times = [number for number, step in enumerate(steps) if slot in step.reads]
        fate = draw(st.sampled_from(["kept", "dies", "late"]))
        if fate == "kept":
            kept[slot] = slot
        elif fate == "dies":
            ends[slot] = draw(st.integers(times[-1] + 1, count))
        else:
            late_ends[slot] = draw(st.integers(0, times[0]))
    order = Order(tuple(steps), seen_sizes, ends, kept, late_ends)
    return Placed(order, _first_fit(order))


def _first_fit(order: Order) -> tuple[int, ...]:
    placed = Placed(order, (0,) * len(order.sizes))
    count = len(order.steps)
    busy: list[tuple[set[int], int, int]] = []
    addresses = []
    for slot, size in enumerate(order.sizes):
        born, dies = (0, count) if slot in order.kept else placed.life(slot)
        times = {time % count for time in range(born, dies)}
        address = 0
        for _, low, high in sorted((b for b in busy if b[0] & times), key=lambda b: b[1]):
            if address + size > low:
                address = max(address, high)
        busy.append((times, address, address + size))
        addresses.append(address)
    return tuple(addresses)


@dataclass
class Machine:
    """VRAM of so many blocks, in which nothing is evicted: what has no room is an error."""

    placed: Placed
    capacity: int
    resident: set[int] = field(default_factory=set)
    missing: int = 0

    def run(self, plan: MovePlan) -> Iterator[tuple[int, int]]:
        for cycle in range(CYCLES):
            for number in range(len(self.placed.order.steps)):
                touched = self.placed.touched(number)
                if cycle > 1:
                    self.missing += len(touched - self.resident)
                self.resident |= touched
                yield cycle, number
                self.carry_out(plan[number], number)

    def carry_out(self, moves: Moves, number: int) -> None:
        for part in moves.discards:
            for block in part.blocks:
                assert not self._is_needed(block, number), "an array has this block"
                self.resident.discard(block)
        self.resident -= _blocks(moves.sends)
        self.resident |= _blocks(moves.fetches) | _blocks(moves.ready)

    def _is_needed(self, block: int, number: int) -> bool:
        slots = range(len(self.placed.order.sizes))
        return any(
            block in self.placed.blocks(slot) and self.placed.lives_after(slot, number)
            for slot in slots
        )


def _blocks(parts: list[SomeBlocks]) -> set[int]:
    return {block for part in parts for block in part.blocks}


def _used(placed: Placed) -> Footprint:
    return footprint(placed.order, placed.addresses)


def _largest(placed: Placed) -> int:
    return max(len(placed.touched(number)) for number in range(len(placed.order.steps)))


@given(placed_orders(), st.integers(1, 4), st.integers(0, 6))
def test_where_every_operation_has_room_none_waits_and_vram_is_never_full(placed, depth, more):
    capacity = _largest(placed) + more
    plan = plan_moves(_used(placed), depth, capacity)
    if not plan:
        return
    machine = Machine(placed, capacity)
    for cycle, number in machine.run(plan):
        if cycle > 1:
            assert len(machine.resident) <= capacity, number
    assert machine.missing == 0


@given(placed_orders(), st.integers(1, 3), st.integers(0, 3))
def test_where_an_operation_has_no_room_nothing_that_lives_is_forgotten(placed, depth, capacity):
    plan = plan_moves(_used(placed), depth, capacity)
    for _ in Machine(placed, capacity).run(plan) if plan else ():
        pass


@given(placed_orders(), st.integers(1, 3))
def test_a_plan_with_room_for_all_is_empty(placed, depth):
    everything = {block for slot in range(len(placed.order.sizes)) for block in placed.blocks(slot)}
    assert not plan_moves(_used(placed), depth, len(everything))


def _placed(uses: list[tuple[int, ...]], ends: dict[int, int], blocks: int = 1) -> Placed:
    steps = tuple(Step("f", "forward", use, (), ()) for use in uses)
    count = 1 + max(slot for use in uses for slot in use)
    kept = {slot: slot for slot in range(count) if slot not in ends}
    addresses = tuple(slot * blocks * BLOCK_BYTES for slot in range(count))
    return Placed(Order(steps, (blocks * BLOCK_BYTES,) * count, ends, kept), addresses)


def test_what_is_used_furthest_in_the_future_goes_after_its_last_use():
    placed = _placed([(0,), (1,), (2,), (3,), (2,), (1,), (0,)], {3: 4, 2: 5, 1: 6, 0: 7})
    plan = plan_moves(_used(placed), 1, 3)
    assert [_blocks(moves.sends) for moves in plan] == [
        {0},
        set(),
        set(),
        set(),
        set(),
        set(),
        set(),
    ]
    assert [_blocks(moves.fetches) for moves in plan].index({0}) == 5


def test_what_died_is_forgotten_before_anything_is_sent():
    placed = _placed([(0,), (1, 2), (1, 3), (1, 2), (1,), (1,)], {0: 1, 3: 3})
    plan = plan_moves(_used(placed), 1, 3)
    assert not any(moves.sends for moves in plan)
    assert any(_blocks(moves.discards) == {0} for moves in plan)


def test_what_comes_back_comes_as_early_as_there_is_room():
    uses = [(0,), (1,), (2,), (1,), (1,), (1,), (0,)]
    placed = _placed(uses, {2: 3})
    early, late = (plan_moves(_used(placed), depth, 2) for depth in (3, 1))
    assert [bool(moves.fetches) for moves in early].index(True) == 3
    assert [bool(moves.fetches) for moves in late].index(True) == 5


def test_an_array_that_outlives_its_iteration_is_forgotten_after_it_dies_in_the_next():
    def iteration(first: int, deaths: dict[int, int], tensor: int) -> Iteration:
        done = Iteration(first)
        for number in range(3):
            for old, time in deaths.items():
                if time == number:
                    done.free(old)
            reach = ((tensor, 0, 8),) if number == 2 else ((0, 0, 8),)
            done.add(Op("f", "forward", reach, ()), dict.fromkeys(range(9), 8))
        return done

    first, second = iteration(0, {}, 5), iteration(6, {5: 1}, 7)
    order = second.order({0: 0}, first)
    assert order.late_ends == {1: 1}
    assert second.order({0: 0}).late_ends == {}
