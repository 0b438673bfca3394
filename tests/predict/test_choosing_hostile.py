"""`umem.choose` on traces that hold together and that no program would leave."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces
from traced_graphs import check

import umem
from umem.devices.virtual.advice import ACCESSED_BY_GPU
from umem.devices.virtual.clock import BlockMoves
from umem.devices.virtual.residency import Residency
from umem.errors import SizeError, TraceError
from umem.predict.applying import apply
from umem.predict.recorded_problem import problems_of
from umem.predict.techniques.steady_state import distinct, period_of, steady
from umem.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.trace.events import TapeEntry

SIZE = 8 << 20


def whole(number: int) -> Access:
    return Access(number, 0, SIZE)


def chain(count: int = 6) -> list[Event]:
    """A step: forward calls after one another, their backward, an update."""
    events: list[Event] = [Alloc(0, SIZE, "parameter", "W", True)]
    for number in range(1, count + 1):
        reads = (whole(0),) if number == 1 else (whole(0), whole(number - 1))
        events.append(Alloc(number, SIZE, "activation", f"y{number}"))
        events.append(Op("Linear", "forward", reads, (whole(number),), 10**9, 3 * SIZE))
    for number in range(count, 0, -1):
        events.append(Op("LinearGrad", "backward", (whole(0), whole(number)), (), 10**9, SIZE))
        events.append(Free(number))
    return [*events, Op("SGD", "update", (), (whole(0),)), Mark("step")]


def tried(trace: Trace) -> umem.predict.choosing.Choice:
    choice = umem.choose(trace, "t4", vram="40MiB")
    assert len(choice.options) + len(choice.dropped) > 8
    return choice


# -- what is there before the start ------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["activation", "state", "gradient", "parameter", "input"])
@pytest.mark.parametrize("after", [False, True])
def test_a_tensor_from_before_the_start_may_be_used_anywhere(kind: str, after: bool) -> None:
    """By an operation before the mark, by hints before and after it, and freed in the step."""
    hint = Hint("prefetch", (whole(9), whole(0)), 0)
    begin: list[Event] = [
        Alloc(9, SIZE, kind, "z", True),
        hint,
        Op("f", "array", (whole(9),), ()),
        Mark("start"),
    ]
    step = chain()
    for place in (2, 8, len(step)):
        use = [Op("g", "forward", (whole(9),), ())] if after else []
        middle: list[Event] = [hint, *use, hint, Free(9)]
        trace = Trace([begin[0], step[0], *begin[1:], *step[1:place], *middle, *step[place:]])
        check(trace)
        tried(trace)
        check(steady(trace, 3))


@pytest.mark.thorough
@given(traces())
@settings(deadline=None, max_examples=60)
def test_any_trace_that_holds_together_is_settled_into_one_that_does(trace: Trace) -> None:
    if any(trace.ops):
        check(steady(trace, 3))
        umem.choose(trace, "t4", vram="2MiB")


def test_a_call_that_reads_what_it_makes_is_recomputed_once() -> None:
    """Three steps whose calls differ, so that the last ones are one graph."""
    entries = [TapeEntry(0, (), (), False, False, in_order, 0) for in_order in (True, False)]
    none = (Access(0, 0, 0),)
    first = Op("", "forward", (), (), entry=entries[0])
    trace = Trace(
        [
            Alloc(0, 0, "activation", ""), Mark("step"), first, Op("", "forward", (), ()),
            Mark("step"), Op("", "forward", none, none, entry=entries[1]), Mark("step"),
            Op("", "backward", none, ()), Mark("step"),
        ]
    )  # fmt: skip
    assert umem.choose(trace, "t4", vram="2MiB").options


# -- hints and numbers -------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["prefetch", "discard", "read_mostly"])
def test_hints_on_what_a_plan_has_dropped_are_left_out(action: str) -> None:
    step = chain()
    for place in range(2, len(step)):
        alive = {e.tensor for e in step[:place] if isinstance(e, Alloc)}
        alive -= {e.tensor for e in step[:place] if isinstance(e, Free)}
        hint = Hint(action, tuple(whole(number) for number in sorted(alive)), 0)
        trace = Trace([*step[:place], hint, *step[place:]])
        for problem in problems_of(trace):
            check(apply(trace, problem.least().plan))
    tried(trace)


@pytest.mark.thorough
def test_numbers_that_are_used_again_change_nothing() -> None:
    fresh = chain()
    free: list[int] = []
    now: dict[int, int] = {}
    again: list[Event] = []
    for event in [
        *fresh[:-1],
        Alloc(8, SIZE, "array", "a"),
        Op("h", "array", (), (whole(8),)),
        Free(8),
        Alloc(9, SIZE, "array", "b"),
        Op("h", "array", (), (whole(9),)),
        Free(9),
        Mark("step"),
    ]:
        if isinstance(event, Alloc):
            now[event.tensor] = free.pop() if free else len(now)
            event = event._replace(tensor=now[event.tensor])
        elif isinstance(event, Free):
            free.append(now[event.tensor])
            event = Free(now[event.tensor])
        elif isinstance(event, Op):
            reads, writes = (
                tuple(a._replace(tensor=now[a.tensor]) for a in each)
                for each in (event.reads, event.writes)
            )
            event = event._replace(reads=reads, writes=writes)
        again.append(event)
    trace = Trace(again)
    numbers = [event.tensor for event in distinct(trace).events if isinstance(event, Alloc)]
    assert len(set(numbers)) == len(numbers) > len(set(now.values()))
    check(distinct(trace))
    used_again, told_apart = tried(trace).options, tried(distinct(trace)).options
    assert [o.name for o in used_again] == [o.name for o in told_apart]
    assert [o.peak_bytes for o in used_again] == [o.peak_bytes for o in told_apart]
    seconds = [o.seconds for o in told_apart]
    assert [o.seconds for o in used_again] == pytest.approx(seconds)  # sums in another order


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [1 << 47, 1 << 62, (1 << 63) - 1])
def test_bytes_that_no_machine_has_are_a_sentence(figure: int) -> None:
    step = chain()
    large = [e._replace(nbytes=figure) if isinstance(e, Alloc) else e for e in step]
    with pytest.raises(TraceError, match=r"nbytes is \d+ bytes; no trace has more"):
        umem.choose(Trace(large))
    large = [e._replace(workspace_bytes=figure) if isinstance(e, Op) else e for e in step]
    with pytest.raises(TraceError, match=r"workspace_bytes is \d+ bytes; no trace has more"):
        umem.choose(Trace(large))


def test_bytes_that_a_correction_makes_are_looked_at_too() -> None:
    dropout = Op("Dropout", "forward", (), (), flops=(1 << 63) - 1, workspace_bytes=1)
    with pytest.raises(TraceError, match=r"the workspace of 'Dropout' is \d+, not a count"):
        umem.choose(Trace([dropout]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flops", "traffic_bytes"])
def test_counters_near_the_end_of_64_bits_are_followed(name: str) -> None:
    step = chain()
    large = [e._replace(**{name: (1 << 63) - 1}) if isinstance(e, Op) else e for e in step]
    tried(Trace(large))


def test_a_size_beyond_any_machine_is_a_sentence() -> None:
    def at(size: int) -> Trace:
        used = (Access(0, 0, size),)
        return Trace([Alloc(0, size, "input", "x", True), Op("f", "forward", used, used)])

    joined = Trace.join([at(4), at(8)], (4, 8))
    assert umem.choose(joined, size=1 << 30).best
    with pytest.raises(TraceError, match="no trace has more"):
        umem.choose(joined, size=1 << 60)
    with pytest.raises(SizeError, match="a size has at most 63 bits"):
        umem.choose(joined, size=10**400)


# -- much of it --------------------------------------------------------------------------------


def brute(steps: list[list[str]]) -> int:
    first = 1 if len(steps) > 2 else 0
    for period in range(1, len(steps)):
        if all(steps[i] == steps[i + period] for i in range(first, len(steps) - period)):
            return period
    return len(steps)


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=1), min_size=1, max_size=12))
def test_the_period_of_steps_is_what_brute_force_finds(steps: list[list[str]]) -> None:
    assert period_of(steps) == brute(steps)


def test_a_range_of_terabytes_takes_no_more_turns_than_a_small_one() -> None:
    """Piece after piece, as many as a VRAM of 8 blocks needs, would be half a million."""
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    residency = Residency(8)
    residency.grow(1 << 22)
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        moves = [residency.touch(1, 1 << 22, write=write) for write in (True, False)]
        residency.release(1, 1 << 22)
        residency.advise(1, 1 << 22, ACCESSED_BY_GPU, unset=False)
        moves.append(residency.touch(1, 1 << 22, write=True))
    finally:
        sys.setprofile(before)
    count = (1 << 22) - 1
    new = BlockMoves(populated=count, migrated_out=count - 8)
    assert moves == [new, BlockMoves(migrated_in=count, migrated_out=count), new]
    assert calls < 2000


def test_a_replay_leaves_no_tables_behind() -> None:
    import gc

    gc.collect()
    gc.disable()
    try:
        umem.replay(Trace(chain()), "t4")
        umem.choose(Trace(chain()), "t4")
        left = [each for each in gc.get_objects() if isinstance(each, Residency)]
        assert left and not any(len(each.resident) or each._stamps for each in left)
    finally:
        gc.enable()
