"""The map of what is known, beside one that has an entry for each byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umem.host_cuda.dry.known_memory import FULLY_KNOWN, KnownMemory, Origin

BYTES = 40
ORIGINS = [FULLY_KNOWN, Origin(1, "guessed"), Origin(2, "unknown"), Origin(2, "other", 4, 7, 2.0)]
RANGES = st.tuples(st.integers(0, BYTES), st.integers(0, BYTES)).map(sorted)


@given(st.lists(st.tuples(RANGES, st.sampled_from(ORIGINS)), max_size=20), RANGES)
def test_ranges_are_those_of_single_bytes(
    puts: list[tuple[list[int], Origin]], asked: list[int]
) -> None:
    memory, by_byte = KnownMemory(), [FULLY_KNOWN] * BYTES
    for (low, high), origin in puts:
        memory.put(low, high, origin)
        by_byte[low:high] = [origin] * (high - low)
    low, high = asked
    expected = max((each.level for each in by_byte[low:high]), default=0)
    if low < high:
        assert memory.worst(low, high).level == expected
    assert [memory.worst(at, at + 1) for at in range(BYTES)] == by_byte
    assert all(a != b for a, b in zip(memory._origins, memory._origins[1:], strict=False))


@given(st.integers(1, 50), st.floats(0.1, 900))
def test_counts_of_parts_add_up_to_the_running_count(number: int, weight: float) -> None:
    parts, running = Origin(2, "bsum", 4, 0, weight), Origin(2, "scan", 4, 0, weight, True)
    assert sum(parts.count(each) for each in range(number)) == running.count(number - 1)
