"""A replay on a layout is what the model does with memory that is never full, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.devices.base import Policy
from umem.devices.specs import COSTS, extremes, gpu_spec
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.layout import Replayer, lay_out
from umem.devices.virtual.model import Model
from umem.predict.stepping import SteadyStep, steady_steps
from umem.trace import Access, Alloc, Free, Hint, Mark, Op, Trace
from umem.units import BLOCK_BYTES

SIZES = st.sampled_from((0, 100, 700_000, BLOCK_BYTES, 5 * BLOCK_BYTES, 23 << 20))
GPUS = [gpu_spec(name) for name in ("t4", "h200", "p100-16gb")]


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


def clocks() -> list[Clock]:
    return [Clock(gpu, costs) for gpu in GPUS for costs in (COSTS, *extremes(COSTS))]


@pytest.mark.thorough
@given(
    steps(),
    st.sampled_from(("managed", "prefetch", "plain")),
    st.sampled_from((1, 7, 20, 10_000)),
    st.sampled_from(("numpy", "cupy")),
)
@settings(deadline=None, max_examples=300)
def test_a_layout_is_replayed_as_the_model_follows_it(
    events: list[Any], how: str, blocks: int, backend: str
) -> None:
    vram = blocks * BLOCK_BYTES
    layout = lay_out(events)
    assert layout is not None
    managed = how != "plain"
    if not managed and layout.block_count > blocks:
        vram = layout.block_count * BLOCK_BYTES  # plain memory has room for all, or is no matter
    policy = Policy("managed" if managed else "unmanaged", None, how == "prefetch")
    model = Model(GPUS[0].with_vram(vram), COSTS, "caching", backend, lambda: policy, clocks())
    replayer = Replayer(
        vram,
        clocks(),
        uses_host_times=backend == "cupy",
        managed=managed,
        prefetch=how == "prefetch",
    )
    half = events.index(Mark("step")) + 1
    for part in (slice(0, half), slice(half, None)):
        model.follow(events[part])
        replayer.follow(layout.laid[part], layout.block_count)
        for machine in (model, replayer):
            machine.synchronize()
        for ours, theirs in zip(replayer.clocks, model.clocks, strict=True):
            assert ours.seconds == theirs.seconds
            assert ours.link_seconds == theirs.link_seconds
            assert ours.stall_seconds == theirs.stall_seconds
    assert replayer.copies.sent_bytes == model.copies.sent_bytes
    assert replayer.copies.fetched_bytes == model.copies.fetched_bytes
    moves, theirs = replayer.moves, model.counters.moves
    for name in ("migrated_in", "populated", "migrated_out", "dropped", "prefetched_out"):
        assert getattr(moves, name) == getattr(theirs, name)
    figures = model.figures
    assert layout.peak_bytes == figures.peak_bytes
    assert layout.reserved_bytes == figures.reserved_peak_bytes
    assert replayer.resident_peak_count * BLOCK_BYTES == figures.resident_peak_bytes


def test_what_a_layout_does_not_model_is_left_to_the_model() -> None:
    whole = Access(0, 0, 64)
    for action in ("discard", "read_mostly", "preferred_location"):
        assert lay_out([Alloc(0, 64, "array", "a"), Hint(action, (whole,), 0)]) is None
    assert lay_out([Alloc(0, 9 << 40, "array", "a")]) is None, "more than the model has addresses"


# -- clocks side by side -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["unmanaged", "managed", "hybrid"])
@pytest.mark.parametrize("laid", [False, True])
@given(events=steps(), blocks=st.sampled_from((4, 16, 10_000)))
@settings(deadline=None, max_examples=30)
def test_gpus_side_by_side_have_the_step_that_each_has_alone(
    mode: Any, laid: bool, events: list[Any], blocks: int
) -> None:
    trace = Trace(events, "numpy")
    gpus = [gpu.with_vram(blocks * BLOCK_BYTES) for gpu in GPUS]
    layout = lay_out(events) if laid else None
    together = steady_steps(trace, gpus, mode, layout=layout)
    alone = [steady_steps(trace, [gpu], mode) for gpu in gpus]
    assert together == tuple(step for (step,) in alone)
    assert all(isinstance(step, SteadyStep) for step in together)
    reasons = [step.reason for step in together if step.reason is not None]
    assert all(gpu.title in said for gpu, said in zip(gpus, reasons, strict=False))
