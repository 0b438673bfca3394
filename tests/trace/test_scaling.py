"""A step at a size that was never run: what is affine is predicted exactly, what is not is said."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import umem
from umem.errors import ScalingError, SizeError, TraceError
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Checker, Event, Free, Hint, Mark, Op

# -- traces that are polynomials of the size ---------------------------------------------------


def grown(trace: Trace, size: int, square: int = 0) -> Trace:
    """A step of which every figure of ``trace`` is the slope, plus a constant of its own.

    A last tensor grows whatever the trace holds.

    Its tensors are numbered in order of allocation, as those of a recorder.
    """

    def grow(value: int) -> int:
        return value * size + square * value * size * size + value % 7

    def access(item: Access) -> Access:
        slope = size * (1 + square * size)
        stop = grow(item.stop) if item.stop == sizes[item.tensor] else item.stop * slope
        return Access(numbers[item.tensor], item.start * slope, stop)

    numbers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Alloc):
            sizes[event.tensor] = event.nbytes
            numbers[event.tensor] = len(numbers)
            event = event._replace(tensor=numbers[event.tensor], nbytes=grow(event.nbytes))
        elif isinstance(event, Free):
            event = Free(numbers[event.tensor])
        elif isinstance(event, Op):
            workspace = event.workspace_bytes
            event = event._replace(
                reads=tuple(map(access, event.reads)),
                writes=tuple(map(access, event.writes)),
                flops=grow(event.flops),
                traffic_bytes=grow(event.traffic_bytes),
                workspace_bytes=None if workspace is None else grow(workspace),
                host_seconds=None if event.host_seconds is None else 0.25 * size + 1,
            )
        elif isinstance(event, Hint):
            event = event._replace(accesses=tuple(map(access, event.accesses)))
        events.append(event)
    events.append(Alloc(len(numbers), grow(1), "activation", "last"))
    checker = Checker()
    for event in events:
        checker.check(event)
    return Trace(events, trace.backend, trace.meta)


def unchecked(traces_: list[Trace], sizes: tuple[int, ...]) -> Trace:
    """What `join` makes of traces by ascending size, whatever they hold."""
    recordings = {size: each.events for size, each in zip(sizes, traces_, strict=True)}
    last = traces_[-1]
    return Trace(last.events, last.backend, last.meta, recordings)


SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=3, unique=True)


@given(traces(), SIZES, st.integers(1, 1000))
@settings(deadline=None, max_examples=60)
def test_what_is_affine_is_predicted_exactly(trace: Trace, sizes: list[int], size: int) -> None:
    joined = Trace.join([grown(trace, n) for n in sizes], sizes)
    assert joined.sizes == tuple(sorted(sizes))
    assert joined.events == grown(trace, max(sizes)).events
    assert joined.at(size) == grown(trace, size)


@pytest.mark.thorough
@given(traces(), st.integers(1, 1000))
@settings(deadline=None, max_examples=60)
def test_what_is_a_square_is_predicted_exactly_from_three_sizes(trace: Trace, size: int) -> None:
    sizes = (3, 8, 20)
    joined = Trace.join([grown(trace, n, 2) for n in sizes], sizes)
    found, expected = joined.at(size, degree=2), grown(trace, size, 2)
    if size not in sizes:  # times are affine here, and fitted with a parabola: equal but rounding
        found = without_times(found)
        expected = without_times(expected)
    assert found == expected


def without_times(trace: Trace) -> Trace:
    events = [e._replace(host_seconds=None) if isinstance(e, Op) else e for e in trace.events]
    return Trace(events, trace.backend, trace.meta)


@pytest.mark.thorough
@given(traces(), traces(), st.integers(1, 10**6))
@settings(deadline=None, max_examples=60)
def test_whatever_was_recorded_what_is_predicted_holds_together(
    one: Trace, other: Trace, size: int
) -> None:
    """Two steps that are the same but for their figures, which are anything."""
    figures = iter([e for e in other.events if isinstance(e, Alloc)])
    sizes: dict[int, int] = {}
    events: list[Event] = []
    for event in one.events:
        if isinstance(event, Alloc):
            sizes[event.tensor] = next(figures, event).nbytes
            event = event._replace(nbytes=sizes[event.tensor])
        elif isinstance(event, Op):
            reads, writes = clipped(event.reads, sizes), clipped(event.writes, sizes)
            event = event._replace(reads=reads, writes=writes, flops=event.flops // 2)
        elif isinstance(event, Hint):
            event = event._replace(accesses=clipped(event.accesses, sizes))
        events.append(event)
    joined = unchecked([Trace(events, one.backend), one], (4, 8))
    checker = Checker()
    for event in joined.at(size).events:
        checker.check(event)


def clipped(accesses: tuple[Access, ...], sizes: dict[int, int]) -> tuple[Access, ...]:
    return tuple(
        Access(a.tensor, min(a.start, sizes[a.tensor]), min(a.stop, sizes[a.tensor]))
        for a in accesses
    )


def step(nbytes: int, workspace: int | None = None, seconds: float | None = None) -> Trace:
    """One tensor, written once."""
    write = Op("f", "forward", (), (Access(0, 0, nbytes),), 1, 1, "stream", seconds, workspace)
    return Trace([Alloc(0, nbytes, "activation", "f"), write, Free(0)])


def test_bytes_are_rounded_up_and_never_negative() -> None:
    joined = Trace.join([step(10), step(13)], (4, 8))
    assert [joined.at(n).events[0].nbytes for n in (1, 3, 5, 6, 9)] == [8, 10, 11, 12, 14]
    falling = unchecked([step(100), step(50)], (4, 8))
    assert falling.at(1000).peak_bytes == 0


def test_host_time_that_shrinks_with_the_size_is_noise() -> None:
    joined = Trace.join([step(1, seconds=0.5), step(2, seconds=0.25)], (4, 8))
    assert [op.host_seconds for op in joined.at(64).ops] == [0.375]
    missing = Trace.join([step(1, seconds=0.5), step(2)], (4, 8))
    assert [op.host_seconds for op in missing.at(64).ops] == [None]


def test_workspace_follows_the_steepest_slope() -> None:
    """400 and 800 bytes, then 1000: as when larger arrays get by with fewer temporaries."""
    for found in ((400, 800, 1000), (400, 500, 1400)):
        joined = Trace.join(
            [step(n, w) for n, w in zip((4, 8, 16), found, strict=True)], (4, 8, 16)
        )
        assert [op.workspace_bytes for op in joined.at(32).ops] == [3200]


def test_the_largest_figure_that_a_trace_holds_is_an_error_beyond() -> None:
    joined = Trace.join([step(4), step(8)], (4, 8))
    assert joined.at(10**9).peak_bytes == 10**9
    assert joined.at(1 << 62).peak_bytes == 1 << 62
    with pytest.raises(SizeError, match=r"would need a figure of 4\.6e"):
        joined.at((1 << 62) + 1)


# -- frees in another order --------------------------------------------------------------------


def two(frees: list[list[int]], size: int) -> Trace:
    """Two tensors and three operations, with frees before each and at the end."""
    events: list[Event] = [Alloc(n, size, "activation", f"t{n}") for n in range(2)]
    for number in range(3):
        events += map(Free, frees[number])
        events.append(Op(f"op{number}", "forward", (), ()))
    return Trace([*events, *map(Free, frees[3])])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([[0], [1], [], []], [[], [0, 1], [], []], [[], [0, 1], [], []]),
        ([[1, 0], [], [], []], [[0, 1], [], [], []], [[0, 1], [], [], []]),
        ([[0], [], [], []], [[], [], [], [1]], [[], [], [], []]),
        ([[], [], [1], [0]], [[], [0], [], [1]], [[], [], [], [0, 1]]),
    ],
)
def test_a_tensor_lives_until_the_later_of_its_deaths(one: Any, other: Any, expected: Any) -> None:
    for traces_ in ([two(one, 4), two(other, 8)], [two(other, 4), two(one, 8)]):
        assert gaps(Trace.join(traces_, (4, 8)).at(16)) == [set(gap) for gap in expected]


def gaps(trace: Trace) -> list[set[int]]:
    """What is freed before each operation, and at the end."""
    found: list[set[int]] = [set()]
    for event in trace.events:
        if isinstance(event, Op):
            found.append(set())
        elif isinstance(event, Free):
            found[-1].add(event.tensor)
    return found


def test_numbers_of_tensors_do_not_matter() -> None:
    events: list[Event] = [
        Alloc(7, 8, "array", "a"),
        Free(7),
        Alloc(7, 16, "array", "b"),
        Op("f", "array", (Access(7, 0, 16),), ()),
    ]
    other: list[Event] = [
        Alloc(0, 16, "array", "a"),
        Free(0),
        Alloc(3, 32, "array", "b"),
        Op("f", "array", (Access(3, 0, 32),), ()),
    ]
    found = Trace.join([Trace(events), Trace(other)], (1, 2)).at(3)
    assert [e.nbytes for e in found.events if isinstance(e, Alloc)] == [24, 48]
    assert found.peak_bytes == 48


# -- a third size checks -----------------------------------------------------------------------


def test_a_third_size_that_no_line_passes_is_an_error_and_a_parabola_fits_it() -> None:
    sizes = (8, 16, 32)
    joined = Trace.join([step(n * n * 1000) for n in sizes], sizes)
    with pytest.raises(ScalingError, match=r"'f' \(activation\) has 62.5 KiB at 8, .* degree=2"):
        joined.at(64)
    assert joined.at(64, degree=2).peak_bytes == 64 * 64 * 1000


def test_within_the_tolerance_a_third_size_says_nothing() -> None:
    sizes = (8, 16, 32)
    assert (
        Trace.join([step(n) for n in (80_700, 160_000, 320_000)], sizes).at(64).peak_bytes
        == 640_000
    )
    with pytest.raises(ScalingError):
        Trace.join([step(n) for n in (80_900, 160_000, 320_000)], sizes).at(64)


def test_a_tensor_that_does_not_matter_is_not_checked() -> None:
    def both(small: int, n: int) -> Trace:
        large = Alloc(1, n * 1_000_000, "activation", "large")
        return Trace([Alloc(0, small, "activation", "small"), large])

    sizes = (8, 16, 32)
    Trace.join([both(s, n) for s, n in zip((5000, 8, 8), sizes, strict=True)], sizes).at(64)
    with pytest.raises(ScalingError, match="'small'"):
        Trace.join([both(s, n) for s, n in zip((50_000, 8, 8), sizes, strict=True)], sizes).at(64)


# -- what cannot be scaled ---------------------------------------------------------------------


def test_a_trace_of_one_size_says_how_to_record_two() -> None:
    for act in (lambda: step(1).at(64), lambda: umem.replay(step(1), "t4", size=64)):
        with pytest.raises(ScalingError, match=r"umem.record_at\(step, sizes=\(4, 8\)\)"):
            act()
    assert step(1).sizes == ()


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8", None])
def test_what_is_no_size_is_refused(size: Any) -> None:
    joined = Trace.join([step(4), step(8)], (4, 8))
    with pytest.raises(SizeError, match="whole number of at least 1"):
        joined.at(size)
    with pytest.raises(SizeError, match="whole number of at least 1"):
        Trace.join([step(4), step(8)], (4, size))


@pytest.mark.parametrize(
    ("count", "sizes", "said"),
    [
        (1, (4,), "two sizes at least"),
        (0, (), "two sizes at least"),
        (2, (4, 4), "sizes must differ; got 4, 4"),
        (1, (4, 8), "1 traces and 2 sizes"),
        (3, (4, 8), "3 traces and 2 sizes"),
        (2, 4, "two sizes at least"),
        (2, "48", "two sizes at least"),
    ],
)
def test_what_cannot_be_joined_is_refused(count: int, sizes: Any, said: str) -> None:
    with pytest.raises(ScalingError, match=said):
        Trace.join([step(4)] * count, sizes)


@pytest.mark.parametrize("wrong", [None, "ab", step(4), 3])
def test_traces_that_are_no_list_are_refused(wrong: Any) -> None:
    with pytest.raises(ScalingError, match=r"traces come as a list, such as \[a, b\]; got"):
        Trace.join(wrong, (4, 8))


def test_traces_of_two_backends_or_of_several_sizes_are_not_joined() -> None:
    cupy = Trace(step(8).events, "cupy")
    with pytest.raises(ScalingError, match="of numpy, cupy"):
        Trace.join([step(4), cupy], (4, 8))
    joined = Trace.join([step(4), step(8)], (4, 8))
    with pytest.raises(ScalingError, match="holds sizes 4, 8 already"):
        Trace.join([joined, step(16)], (8, 16))


@pytest.mark.parametrize("degree", [0, 3, 1.5, None])
def test_other_degrees_are_refused(degree: Any) -> None:
    with pytest.raises(ScalingError, match="degree is 1"):
        Trace.join([step(4), step(8)], (4, 8)).at(64, degree)


def test_a_parabola_needs_three_sizes() -> None:
    with pytest.raises(ScalingError, match=r"degree=2 needs three recorded sizes; .* has 4, 8"):
        Trace.join([step(4), step(8)], (4, 8)).at(64, degree=2)


def test_the_first_operation_that_differs_is_named_with_both_names() -> None:
    def ops(*names: str) -> Trace:
        return Trace([Op(name, "forward", (), ()) for name in names])

    with pytest.raises(ScalingError) as caught:
        Trace.join([ops("a", "b", "c"), ops("a", "d", "c")], (4, 8))
    assert "operation 2 is 'b' forward at size 4 and 'd' forward at size 8" in str(caught.value)
    with pytest.raises(ScalingError) as caught:
        Trace.join([ops("a", "b"), ops("a")], (8, 4))
    said = str(caught.value)
    assert "operation 2 is the end of the step at size 4 and 'b' forward at size 8" in said


def test_a_constant_in_a_name_may_depend_on_the_size() -> None:
    def multiplied(name: str, nbytes: int = 8) -> Trace:
        return Trace([Alloc(0, nbytes, "gradient", name), Op(name, "backward", (), ())])

    names = ("_ * 0.0001220703125", "_ * 6.103515625e-05")
    found = Trace.join([multiplied(names[0]), multiplied(names[1], 16)], (4, 8)).at(16)
    assert [op.name for op in found.ops] == [names[1]]
    for one, other in (("conv2d", "conv3d"), ("_ * 2", "_ + 2"), ("_ * 2", "_ * x")):
        with pytest.raises(ScalingError, match="operation 1 is"):
            Trace.join([multiplied(one), multiplied(other)], (4, 8))


def test_the_first_tensor_or_access_that_differs_is_named() -> None:
    one = Trace([Op("a", "forward", (), ()), Alloc(0, 8, "stash", "mask")])
    other = Trace([Op("a", "forward", (), ()), Alloc(0, 8, "activation", "y")])
    with pytest.raises(ScalingError) as caught:
        Trace.join([one, other], (4, 8))
    said = str(caught.value)
    assert "after 'a' forward comes a tensor 'mask' (stash) at size 4" in said
    assert "a tensor 'y' (activation) at size 8" in said
    reads = Op("a", "forward", (Access(0, 0, 8),), ())
    one, other = (
        Trace([Alloc(0, 8, "array", "x"), op]) for op in (reads, reads._replace(reads=()))
    )
    with pytest.raises(ScalingError, match="'a' forward on 1 and 0 tensors at size 4"):
        Trace.join([one, other], (4, 8))
    with pytest.raises(ScalingError, match="the mark 'step' at size 4 and nothing more at size 8"):
        Trace.join([Trace([Mark("step")]), Trace([])], (4, 8))


def test_a_trace_that_does_not_hold_together_is_not_joined() -> None:
    use = Op("f", "forward", (Access(5, 0, 1),), ())
    for event in (Free(5), use, Hint("prefetch", (Access(5, 0, 1),))):
        with pytest.raises(TraceError, match="tensor 5 is used or freed, and is not alive"):
            Trace.join([Trace([event]), Trace([event])], (4, 8))


@pytest.mark.parametrize("sizes", [(8, 4), (4, 16, 8), (16, 4, 8)])
def test_a_step_that_shrinks_as_the_size_grows_asks_whether_sizes_are_swapped(
    sizes: tuple[int, ...],
) -> None:
    recorded = [step(1024 * n) for n in (4, 8, 16)[: len(sizes)]]
    with pytest.raises(ScalingError, match=r"it allocates and moves .*Are the sizes swapped\?"):
        Trace.join(recorded, sizes)
    with pytest.raises(ScalingError, match=r"8\.0 KiB at size 4 and 4\.0 KiB at size 8"):
        Trace.join([step(1024 * 4), step(1024 * 8)], (8, 4))


def test_a_step_may_hold_less_at_its_peak_because_of_its_workspace() -> None:
    """NumPy gets by with fewer temporaries for larger arrays."""
    joined = Trace.join([step(100, 5000), step(200, 100)], (4, 8))
    assert joined.at(4).peak_bytes > joined.at(8).peak_bytes


def test_one_recording_at_two_sizes_is_refused_whatever_its_times_and_workspace() -> None:
    again = step(8, workspace=5, seconds=0.25)
    for other in (again, step(8, workspace=70, seconds=0.5)):
        with pytest.raises(ScalingError, match="nothing of the step depends on the size: at 4 and"):
            Trace.join([again, other], (4, 8))
    with pytest.raises(ScalingError, match="at 8 and 16 it is the same"):
        Trace.join([step(4), step(8), step(8)], (4, 8, 16))


def test_what_was_measured_with_and_without_workspace_is_not_joined() -> None:
    said = r"the workspace of 'f' forward was measured at size {} and not at size {}\. `umem run"
    with pytest.raises(ScalingError, match=said.format(8, 4)):
        Trace.join([step(4), step(8, workspace=0)], (4, 8))
    with pytest.raises(ScalingError, match=said.format(4, 16)):
        Trace.join([step(4, workspace=1), step(8, workspace=1), step(16)], (4, 8, 16))
    assert Trace.join([step(4), step(8)], (4, 8)).at(16).unmeasured_count == 1
    assert Trace.join([step(4, 0), step(8, 0)], (4, 8)).at(16).unmeasured_count == 0


# -- files -------------------------------------------------------------------------------------


@given(traces(), SIZES)
@settings(deadline=None, max_examples=30)
def test_a_trace_of_several_sizes_is_one_file(trace: Trace, sizes: list[int]) -> None:
    joined = Trace.join([grown(trace, n) for n in sizes], sizes)
    with tempfile.TemporaryDirectory() as folder:
        loaded = Trace.load(joined.save(Path(folder) / "x.trace"))
    assert loaded == joined
    assert loaded.at(100) == joined.at(100)


def test_the_documented_text_is_the_format_of_two_sizes(tmp_path: Path) -> None:
    joined = Trace.join([step(4), step(8)], (4, 8))
    lines = gzip.decompress(joined.save(tmp_path / "x").read_bytes()).decode().splitlines()
    assert json.loads(lines[0])["sizes"] == [4, 8]
    assert [json.loads(line)[0] for line in lines[1:]] == ["alloc", "op", "free", "end"] * 2
    assert [line for line in lines if line.startswith('["end"')] == ['["end", 3]'] * 2


@pytest.mark.parametrize("sizes", [[4], [8, 4], [4, 4], [4, 8, 16], [0, 4], [4.0, 8], "48", {}, 3])
def test_sizes_of_a_file_that_do_not_hold_together_are_refused(tmp_path: Path, sizes: Any) -> None:
    path = Trace.join([step(4), step(8)], (4, 8)).save(tmp_path / "x")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    header = {**json.loads(lines[0]), "sizes": sizes}
    path.write_bytes(gzip.compress((json.dumps(header) + "\n" + "".join(lines[1:])).encode()))
    with pytest.raises(TraceError, match="x"):
        Trace.load(path)


def test_a_file_without_its_second_size_is_truncated(tmp_path: Path) -> None:
    path = Trace.join([step(4), step(8)], (4, 8)).save(tmp_path / "x")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    for count in range(len(lines)):
        path.write_bytes(gzip.compress("".join(lines[:count]).encode()))
        with pytest.raises(TraceError):
            Trace.load(path)
    path.write_bytes(gzip.compress("".join([*lines, '["mark","more"]\n']).encode()))
    with pytest.raises(TraceError, match="goes on after its end"):
        Trace.load(path)
