"""Places that repeat from step to step, and blocks that may be forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import umem
from umem._common.scopes import Scope
from umem.devices.base import Span
from umem.devices.virtual.repeating_pool import RepeatingPool
from umem.units import BLOCK_BYTES, MIB


class Source:
    """Memory without end."""

    def __init__(self) -> None:
        self.end = 0

    def reserve(self, nbytes: int) -> int:
        address = self.end
        self.end += -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        pass


def repeating() -> RepeatingPool:
    pool = RepeatingPool(Source())
    pool.repeats = True
    return pool


STEP = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 6)), min_size=1, max_size=12)
"""What a step allocates: its size, and how many allocations later it is freed."""


def run_step(pool: RepeatingPool, step: list[tuple[int, int]], held: list[Span]) -> list[int]:
    """Allocate and free as a step does; what outlives it goes as the next one begins."""
    pool.restart()
    while held:
        pool.free(held.pop())
    places, due = [], dict[int, list[Span]]()
    for number, (nbytes, after) in enumerate(step):
        span = pool.malloc(nbytes)
        places.append(span.address)
        due.setdefault(number + after, []).append(span)
        for one in due.pop(number, []):
            pool.free(one)
    held += [span for spans in due.values() for span in spans]
    return places


@given(STEP)
def test_steps_that_are_alike_get_the_same_places_in_the_end(step: list[tuple[int, int]]) -> None:
    pool, held = repeating(), list[Span]()
    places = [run_step(pool, step, held) for _ in range(len(step) + 3)]
    assert places[-1] == places[-2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * BLOCK_BYTES)), max_size=30))
def test_no_two_have_the_same_memory_and_what_is_free_is_known(actions) -> None:
    pool, held = repeating(), list[Span]()
    for kind, nbytes in actions:
        if kind == 0 and held:
            pool.free(held.pop(nbytes % len(held)))
        elif kind == 1:
            pool.restart()
        else:
            held.append(pool.malloc(nbytes))
        ordered = sorted(held)
        for one, other in itertools.pairwise(ordered):
            assert one.address + one.nbytes <= other.address
    assert pool.used_bytes == sum(span.nbytes for span in held)
    used = {
        block
        for span in held
        for block in range(span.address // BLOCK_BYTES, -(-sum(span) // BLOCK_BYTES))
    }
    for block in range(-(-int(pool.reserved_bytes) // BLOCK_BYTES) + len(actions)):
        is_free = pool.is_free(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
        assert not (is_free and block in used)


def test_a_pool_that_does_not_repeat_knows_no_free_memory() -> None:
    pool = RepeatingPool(Source())
    pool.free(pool.malloc(BLOCK_BYTES))
    assert not pool.is_free(0, BLOCK_BYTES)
    pool.repeats = True
    assert pool.is_free(0, BLOCK_BYTES)


@pytest.fixture
def gpu() -> Iterator[umem.devices.virtual.VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", "64MiB") as found, umem.managed():
        scope = Scope("a test")
        found.repeat_places(scope)
        yield found
        scope.close()


def test_what_an_array_has_is_not_forgotten(gpu) -> None:
    whole = gpu.xp.zeros(4 * MIB, "u1")
    first = gpu.address(whole) // BLOCK_BYTES
    assert gpu.discard_free([first, first + 1]) == 0
    assert gpu.location(whole).resident_bytes == 4 * MIB


def test_what_a_view_has_is_not_forgotten(gpu) -> None:
    whole = gpu.xp.zeros(4 * MIB, "u1")
    first, view = gpu.address(whole) // BLOCK_BYTES, whole[:8]
    del whole
    assert gpu.discard_free([first, first + 1]) == 0
    del view
    gpu.report_frees()
    assert gpu.discard_free([first, first + 1]) == 4 * MIB


def test_a_block_that_a_neighbour_has_a_part_of_is_not_forgotten(gpu) -> None:
    gone = gpu.xp.zeros(BLOCK_BYTES + BLOCK_BYTES // 2, "u1")
    first = gpu.address(gone) // BLOCK_BYTES
    del gone
    gpu.report_frees()
    head = gpu.xp.zeros(BLOCK_BYTES // 4, "u1")  # in the first of the two blocks
    assert gpu.address(head) // BLOCK_BYTES == first
    assert gpu.discard_free([first, first + 1]) == BLOCK_BYTES
    assert gpu.location(head).resident_bytes == head.nbytes


def test_what_was_forgotten_goes_and_comes_without_a_copy(gpu) -> None:
    gone = gpu.xp.zeros(4 * MIB, "u1")
    first = gpu.address(gone) // BLOCK_BYTES
    del gone
    before = gpu.usage().resident_bytes
    gpu.discard_free([first, first + 1])
    assert gpu.usage().resident_bytes == before - 4 * MIB
    gpu.make_ready([first, first + 1], None)
    assert gpu.usage().resident_bytes == before
    again = gpu.xp.zeros(4 * MIB, "u1")
    assert gpu.address(again) // BLOCK_BYTES == first
    figures = gpu.figures
    assert figures.migrated_in_bytes == figures.migrated_out_bytes == 0


def test_unmanaged_arrays_have_no_address_to_plan_with(gpu) -> None:
    with umem.unmanaged():
        assert gpu.address(gpu.xp.zeros(8)) is None
