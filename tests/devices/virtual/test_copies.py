"""Copies beside the operations, against times worked out by hand.

The GPU has round numbers: 10 TFLOP/s, 20 GB/s in and 10 GB/s out; an operation here takes 1 ms,
and the host 10 us to issue anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem._common.specs import COSTS, GpuSpec
from umem.devices.base import Mode, Policy
from umem.devices.virtual.clock import BlockMoves, Clock
from umem.devices.virtual.model import Model
from umem.errors import TraceError
from umem.trace import Access, Alloc, Checker, Event, Free, Hint, Mark, Op, Trace

US, MS = 1e-6, 1e-3
BLOCK = 2 << 20
SPEC = GpuSpec("toy", "Toy", 1 << 30, 1 << 30, 1e12, 10e12, None, 20e9, 10e9, "made up", "made up")
NBYTES = 20_000_000
"""2 ms to send, 1 ms to fetch."""


def seconds(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def model(mode: Mode = "unmanaged", blocks: int = 1000) -> Model:
    spec = SPEC.with_vram(blocks * BLOCK)
    return Model(spec, COSTS, "caching", "numpy", lambda: Policy(mode))


def run(gpu: Model, *events: Event) -> None:
    for event in events:
        gpu.on_event(event)


def tensor(number: int, nbytes: int = NBYTES) -> Alloc:
    return Alloc(number, nbytes, "activation", "a")


def compute(*reads: int, writes: tuple[int, ...] = (), ms: int = 1) -> Op:
    return Op("f", "array", tuple(map(whole, reads)), tuple(map(whole, writes)), ms * 6 * 10**9)


def whole(number: int) -> Access:
    return Access(number, 0, NBYTES)


def send(number: int, nbytes: int = NBYTES) -> Hint:
    return Hint("send", (Access(number, 0, nbytes),), overlap=True)


def fetch(number: int, nbytes: int = NBYTES) -> Hint:
    return Hint("fetch", (Access(number, 0, nbytes),), overlap=True)


# -- plain memory ------------------------------------------------------------------------------


def test_a_send_begins_after_the_operations_before_it_and_runs_beside_those_after_it() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), send(0), compute(), compute(), compute(), Free(0))
    assert gpu.clock.sent_seconds == seconds(10 * US + 1 * MS + 2 * MS)
    assert gpu.figures.seconds == seconds(10 * US + 4 * MS)
    assert gpu.figures.stall_seconds == 0
    assert (gpu.figures.sent_bytes, gpu.figures.fetched_bytes) == (NBYTES, 0)


def test_what_is_freed_while_it_is_sent_makes_the_gpu_wait_and_not_the_host() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), send(0), Free(0))
    assert gpu.clock.host_seconds == seconds(20 * US)
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS + 2 * MS)
    assert gpu.figures.stall_seconds == seconds(2 * MS)
    run(gpu, compute())
    assert gpu.figures.seconds == seconds(10 * US + 4 * MS)


def test_sends_go_one_after_another() -> None:
    gpu = model()
    run(gpu, tensor(0), tensor(1), compute(writes=(0, 1)), send(0), send(1), Free(0))
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS + 2 * MS)
    run(gpu, Free(1))
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS + 4 * MS)


def test_what_reads_a_tensor_on_its_way_out_does_not_wait_and_what_writes_it_does() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), send(0), compute(0))
    assert gpu.figures.seconds == seconds(10 * US + 2 * MS)
    run(gpu, compute(writes=(0,)))
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS + 2 * MS + 1 * MS)
    assert gpu.figures.stall_seconds == seconds(1 * MS)


def test_a_fetch_runs_beside_the_operations_and_its_first_reader_waits() -> None:
    gpu = model()
    run(gpu, compute(), tensor(1), fetch(1), compute(ms=2), compute(1))
    assert gpu.clock.fetched_seconds == seconds(10 * US + 1 * MS + 1 * MS)
    assert gpu.figures.seconds == seconds(10 * US + 4 * MS)
    assert gpu.figures.stall_seconds == 0
    run(gpu, tensor(2), fetch(2), compute(2))
    assert gpu.figures.stall_seconds == seconds(1 * MS)
    assert gpu.figures.seconds == seconds(10 * US + 6 * MS)


def test_what_was_fetched_is_waited_for_once() -> None:
    gpu = model()
    run(gpu, tensor(1), fetch(1), compute(1), compute(1), compute(1))
    assert gpu.figures.stall_seconds == seconds(1 * MS - 10 * US)  # less the launch of the first
    assert not gpu.copies.are_running


def test_what_is_freed_before_it_came_is_waited_for() -> None:
    gpu = model()
    run(gpu, tensor(1), fetch(1), Free(1))
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS)


def test_both_ways_at_once() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), tensor(1), send(0), fetch(1), compute(1), Free(0))
    # the fetch needs 1 ms beside the send's 2 ms; then the operation, beside the send's second half
    assert gpu.figures.seconds == seconds(10 * US + 1 * MS + 1 * MS + 1 * MS)


def test_a_host_that_waits_waits_for_copies_too() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), send(0))
    gpu.synchronize()
    assert gpu.clock.host_seconds == seconds(10 * US + 1 * MS + 2 * MS)
    assert gpu.copies.is_sent(0)


def test_the_host_knows_of_a_copy_only_once_it_has_come_that_far() -> None:
    gpu = model()
    run(gpu, tensor(0), compute(writes=(0,)), send(0))
    assert not gpu.copies.is_sent(0)
    run(gpu, *(compute() for _ in range(5)))
    assert not gpu.copies.is_sent(0), "the host has run ahead of the GPU"
    assert gpu.copies.is_sent(7), "what was never sent"


def test_the_start_of_the_clock_forgets_copies() -> None:
    gpu = model()
    run(gpu, tensor(0), send(0), Mark("start"), Free(0))
    assert (gpu.figures.seconds, gpu.figures.sent_bytes) == (0, 0)


def test_an_empty_tensor_is_no_copy() -> None:
    gpu = model()
    run(gpu, compute(), tensor(0, 0), send(0, 0), tensor(1, 0), fetch(1, 0), Free(0), Free(1))
    assert gpu.figures.stall_seconds == 0 and not gpu.copies.are_running


# -- beside managed memory ---------------------------------------------------------------------


def test_what_is_sent_of_managed_memory_comes_in_first() -> None:
    gpu = model("managed")
    run(gpu, tensor(0), compute(writes=(0,)))
    gpu.driver.residency.prefetch_out(0, 20)
    before = gpu.counters.moves.migrated_in
    run(gpu, send(0))
    assert gpu.counters.moves.migrated_in - before == 10


def test_blocks_wait_for_copies_that_go_their_way_and_copies_for_blocks() -> None:
    clock = Clock(SPEC, COSTS)
    clock.send(NBYTES)
    done = clock.move(BlockMoves(migrated_in=10), overlap=True)
    assert done == seconds(10 * (BLOCK / 20e9 + 10 * US)), "the other way"
    done = clock.move(BlockMoves(prefetched_out=1), overlap=True)
    assert done == seconds(2 * MS + BLOCK / 10e9 + 10 * US)
    assert clock.fetch(NBYTES) == seconds(done + 1 * MS)


def test_an_upload_waits_for_a_fetch() -> None:
    clock = Clock(SPEC, COSTS)
    clock.fetch(NBYTES)
    assert clock.move(BlockMoves(), NBYTES) == seconds(2 * MS)


# -- in a trace --------------------------------------------------------------------------------


def test_a_copy_that_would_not_run_beside_the_operations_is_refused() -> None:
    checker = Checker()
    checker.check(tensor(0))
    checker.check(send(0))
    with pytest.raises(TraceError, match="a fetch runs beside the operations"):
        checker.check(fetch(0)._replace(overlap=False))


def test_a_trace_with_copies_is_saved(tmp_path: Path) -> None:
    trace = Trace([tensor(0), send(0), Free(0), Mark("step")], "numpy")
    path = trace.save(tmp_path / "step.gz")
    assert Trace.load(path).events == trace.events


SIZES = st.sampled_from((0, 100, 700_000, BLOCK, 5 * BLOCK, 23 << 20))


@st.composite
def steps(draw: Any) -> list[Any]:
    """A step, twice: tensors that come and go, operations, prefetches and copies in between."""
    events: list[Any] = [Alloc(0, 3 << 20, "parameter", "W", True), Mark("start")]
    number = 0
    for _ in range(2):
        alive = {0: 3 << 20}
        for _ in range(draw(st.integers(1, 25))):
            what = draw(st.sampled_from(("alloc", "alloc", "op", "op", "free", "hint")))
            mine = [tensor for tensor in alive if tensor]
            if what == "alloc":
                number += 1
                alive[number] = draw(SIZES)
                uploaded = draw(st.booleans())
                events.append(Alloc(number, alive[number], "array", "a", uploaded))
            elif what == "free" and mine:
                gone = draw(st.sampled_from(mine))
                del alive[gone]
                events.append(Free(gone))
            elif what == "hint":
                events.append(hint(draw, alive))
            else:
                events.append(operation(draw, alive))
        events += [operation(draw, alive), *(Free(tensor) for tensor in alive if tensor)]
        events.append(Mark("step"))
    return events


def hint(draw: Any, alive: dict[int, int]) -> Hint:
    tensor = draw(st.sampled_from(list(alive)))
    whole = (Access(tensor, 0, alive[tensor]),)
    if draw(st.booleans()):
        return Hint(draw(st.sampled_from(("send", "fetch"))), whole, overlap=True)
    place, overlap = draw(st.sampled_from((0, "cpu"))), draw(st.booleans())
    return Hint("prefetch", whole, place, overlap=overlap)


def operation(draw: Any, alive: dict[int, int]) -> Op:
    def accesses() -> tuple[Access, ...]:
        tensors = draw(st.lists(st.sampled_from(list(alive)), max_size=3))
        return tuple(
            Access(t, draw(st.sampled_from((0, alive[t] // 3))), alive[t]) for t in tensors
        )

    phase = draw(st.sampled_from(("forward", "backward", "update", "array")))
    pattern = draw(st.sampled_from(("stream", "random", "strided")))
    workspace = draw(st.sampled_from((None, 0, 512, 9 << 20)))
    return Op("f", phase, accesses(), accesses(), 10**9, 10**8, pattern, 0.01, workspace)


@pytest.mark.thorough
@given(steps(), st.sampled_from(("unmanaged", "managed")))
@settings(deadline=None, max_examples=100)
def test_nothing_is_quicker_than_the_link_each_way_and_the_operations(
    events: list[Event], mode: Mode
) -> None:
    gpu = model(mode, 10_000)
    gpu.follow(events)
    gpu.synchronize()
    figures, after = gpu.figures, events[events.index(Mark("start")) :]
    sizes = {event.tensor: event.nbytes for event in events if isinstance(event, Alloc)}
    copied = dict.fromkeys(("send", "fetch", "prefetch"), 0)
    for event in after:
        if isinstance(event, Hint):
            copied[event.action] += sum(sizes[access.tensor] for access in event.accesses)
    assert (figures.sent_bytes, figures.fetched_bytes) == (copied["send"], copied["fetch"])
    ways = copied["send"] / 10e9, copied["fetch"] / 20e9
    assert figures.seconds >= (1 - 1e-9) * max(*ways, figures.compute_seconds)
