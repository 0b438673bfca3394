"""The recorder: lifetimes are real, views are not counted twice, and nothing stays behind."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem
from umem.devices.virtual import VirtualGPU
from umem.errors import OutOfMemoryError, StateError
from umem.trace import Access, Alloc, Checker, Event, Free, Mark, Op
from umem.trace.recording import recorder as module
from umem.trace.recording import sources
from umem.trace.recording.recorder import Measured, Recorder, active
from umem.trace.recording.storage import root_of

xp = VirtualGPU("t4").xp


def check(events: list[Event]) -> None:
    checker = Checker()
    for event in events:
        checker.check(event)


def kinds(events: list[Event]) -> str:
    return " ".join(type(event).__name__ for event in events)


class Probe:
    """A source that counts how often it is started and stopped."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def probe() -> Iterator[Probe]:
    source = Probe()
    sources.add_source(source)
    yield source
    sources.added.remove(source)


# -- lifetimes ---------------------------------------------------------------------------------


def test_an_array_lives_until_its_last_reference_is_gone() -> None:
    with umem.record() as recorder:
        a = xp.ones(1000, "float32")
        b = a
        del a
        recorder.emit(Mark("one name left"))
        del b
        recorder.emit(Mark("none left"))
    assert kinds(recorder.trace.events) == "Alloc Op Mark Free Mark"
    assert recorder.trace.events[0] == Alloc(0, 4000, "array", "ones")


def test_an_array_in_a_cycle_lives_until_the_collector_comes() -> None:
    gc.collect()
    gc.disable()
    try:
        with umem.record() as recorder:
            cycle: list[Any] = [xp.ones(10)]
            cycle.append(cycle)
            del cycle
            recorder.emit(Mark("unreachable"))
            gc.collect()
            recorder.emit(Mark("collected"))
    finally:
        gc.enable()
    assert kinds(recorder.trace.events) == "Alloc Op Mark Free Mark"


def test_what_is_alive_at_the_end_is_never_freed_and_is_not_held() -> None:
    with umem.record() as recorder:
        a = xp.ones(10)
        dead = xp.ones(20)
        del dead
    root = weakref.ref(root_of(a))
    assert [life.death is None for life in recorder.trace.lifetimes().values()] == [True, False]
    before = list(recorder.trace.events)
    del a
    assert root() is None
    assert recorder.trace.events == before


def test_the_recorder_keeps_no_array_alive() -> None:
    with umem.record() as recorder:
        refs = [weakref.ref(root_of(xp.ones(10) + 1)) for _ in range(5)]
        assert [ref() for ref in refs] == [None] * 5
        assert len(recorder._known) <= 2  # the last deaths are told with the next event
    assert not recorder._known


def test_an_id_that_is_used_again_is_another_tensor() -> None:
    with umem.record() as recorder:
        ids = []
        for _ in range(50):
            a = np.empty(7)
            ids.append(id(a))
            recorder.access(a, "array", "a")
            del a
    assert len(set(ids)) < 50  # otherwise nothing was shown
    assert kinds(recorder.trace.events) == " ".join(["Alloc Free"] * 50)
    check(recorder.trace.events)


def test_an_array_seen_again_is_not_allocated_again() -> None:
    with umem.record() as recorder:
        a = np.empty(7)
        assert recorder.known(a) is None
        accesses = {recorder.access(a, "array", "a") for _ in range(3)}
        assert accesses == {recorder.known(a)}
    assert len(recorder.trace) == 1


# -- views -------------------------------------------------------------------------------------


def views() -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """A name, a function of a (4, 6) float64 array, and the bytes that its result covers."""
    yield "itself", lambda a: a, (0, 192)
    yield "reshaped", lambda a: a.reshape(24), (0, 192)
    yield "reshaped part", lambda a: a.reshape(24)[3:5], (24, 40)
    yield "as bytes", lambda a: a.view("u1")[1, 1:3], (49, 51)
    yield "as_strided", lambda a: np.lib.stride_tricks.as_strided(a[1], (2,), (8,)), (48, 64)
    yield "windows", lambda a: np.lib.stride_tricks.sliding_window_view(a[1], 3)[:1], (48, 72)
    yield "broadcast small", lambda a: np.broadcast_to(a[1, :1], (3,)), (48, 56)
    yield "broadcast large", lambda a: np.broadcast_to(a[1, :1], (99,)), (48, 56)
    yield "diagonal", lambda a: np.diagonal(a), (0, 176)


@pytest.mark.parametrize(("name", "make", "covered"), list(views()), ids=lambda x: str(x)[:20])
def test_a_view_is_part_of_its_root_by_its_byte_range(name: str, make: Any, covered: Any) -> None:
    for first in ("root", "view"):
        with umem.record() as recorder:
            a = np.zeros((4, 6))
            view = make(a)
            if first == "root":
                recorder.access(a, "array", "a")
            assert recorder.access(view, "array", "a") == Access(0, *covered)
            assert recorder.known(view) == Access(0, *covered)
        assert recorder.trace.events == [Alloc(0, 192, "array", "a")]


def test_a_view_keeps_its_root_alive() -> None:
    with umem.record() as recorder:
        a = xp.ones((10, 10))
        view = a[2:4].T
        del a
        recorder.emit(Mark("only the view"))
        del view
        recorder.emit(Mark("nothing"))
    assert kinds(recorder.trace.events) == "Alloc Op Mark Free Mark"


@given(st.data())
@settings(deadline=None)
def test_ranges_of_nested_slices_are_what_the_addresses_say(data: st.DataObject) -> None:
    root = np.arange(60, dtype="i4").reshape(3, 4, 5)
    view = root
    for _ in range(data.draw(st.integers(1, 3))):
        key = tuple(
            slice(
                *data.draw(st.tuples(*[st.none() | st.integers(-6, 6)] * 2)),
                data.draw(st.sampled_from((1, 2, -1, -2, None))),
            )
            for _ in view.shape
        )
        view = view[key].transpose(data.draw(st.permutations(range(view.ndim))))
    with umem.record() as recorder:
        _, start, stop = recorder.access(view, "array", "a")
    elements = [int(x) for x in view.ravel()]  # an element's value is its place
    if view.size:
        assert (start, stop) == (4 * min(elements), 4 * max(elements) + 4)
    else:
        assert start == stop


def test_parts_of_memory_with_gaps_stay_inside_their_tensor() -> None:
    whole = np.frombuffer(bytes(400), "u1")
    gaps = np.asarray(memoryview(whole.view("f4"))[::4])  # 25 numbers in 400 bytes
    assert root_of(gaps[20:]).nbytes == 100
    with umem.record() as recorder:
        for view in (gaps, gaps[20:], gaps[::-1], gaps[24:]):
            read = Access(*recorder.access(view, "input", "x", uploaded=True))
            recorder.emit(Op("F", "forward", (read,), ()))
    check(recorder.trace.events)


# -- several recorders, threads, blocks --------------------------------------------------------


def test_two_recorders_at_once_see_the_same_from_when_they_were_entered() -> None:
    with umem.record() as outer:
        a = xp.ones(10)
        with umem.record() as inner:
            assert active() == (outer, inner)
            b = a + 1
            del b
        assert active() == (outer,)
        a += 1
    assert [op.name for op in outer.trace.ops] == ["ones", "add", "add"]
    assert [op.name for op in inner.trace.ops] == ["add"]
    assert inner.trace.events[0] == Alloc(0, 80, "input", "array", True)
    assert kinds(inner.trace.events) == "Alloc Alloc Op Free"
    check(outer.trace.events)
    check(inner.trace.events)


def test_recorders_may_be_left_in_any_order() -> None:
    first, second = umem.record(), umem.record()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert active() == (second,)
    a = xp.ones(3)
    second.__exit__(None, None, None)
    assert active() == ()
    assert (len(first.trace), len(second.trace)) == (0, 2)
    del a


def test_a_recorder_sees_the_thread_that_entered_it() -> None:
    seen: list[Any] = []

    def other() -> None:
        seen.append(active())
        with umem.record() as own:
            xp.ones(5).sum()
        seen.append([op.name for op in own.trace.ops])

    with umem.record() as recorder:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [(), ["ones", "add.reduce"]]
    assert len(recorder.trace) == 0


def test_an_array_may_die_in_another_thread() -> None:
    with umem.record() as recorder:
        held = [xp.ones(10)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert kinds(recorder.trace.events) == "Alloc Op"
        recorder.emit(Mark("here"))
    assert kinds(recorder.trace.events) == "Alloc Op Free Mark"


def test_deaths_may_be_told_from_two_threads_at_once() -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def watch() -> None:
        try:
            while not done.is_set():
                recorder.flush()
        except BaseException as error:
            errors.append(error)

    with umem.record() as recorder:
        threads = [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3000):
            recorder.access(np.empty(3), "array", "a")
        done.set()
        for thread in threads:
            thread.join()
    assert not errors
    check(recorder.trace.events)
    assert kinds(recorder.trace.events).count("Free") == 3000


def test_an_exception_leaves_the_block_and_keeps_what_was_recorded(probe: Probe) -> None:
    with pytest.raises(ZeroDivisionError), umem.record() as recorder:
        xp.ones(10)
        raise ZeroDivisionError
    assert active() == ()
    assert [op.name for op in recorder.trace.ops] == ["ones"]
    assert probe.calls == ["start", "stop"]


def test_an_operation_that_raises_leaves_no_trace_of_itself() -> None:
    with umem.record() as recorder:
        a = xp.ones((2, 3))
        with pytest.raises(ValueError, match="broadcast"):
            a + xp.ones((4, 5))
        assert not umem.trace.recording.thread.inside()
        b = a + 1
    assert [op.name for op in recorder.trace.ops] == ["ones", "ones", "add"]
    check(recorder.trace.events)
    del b


def test_a_recorder_is_used_once(probe: Probe) -> None:
    recorder = umem.record()
    with recorder:
        with pytest.raises(StateError, match="used before"), recorder:
            pass
        assert active() == (recorder,)
    with pytest.raises(StateError, match="make a new one"), recorder:
        pass
    assert probe.calls == ["start", "stop"]


def test_leaving_what_was_never_entered_changes_nothing(probe: Probe) -> None:
    with pytest.raises(StateError, match="not inside"):
        umem.record().__exit__(None, None, None)
    with umem.record() as recorder:
        pass
    with pytest.raises(StateError, match="not inside"):
        recorder.__exit__(None, None, None)
    with umem.record():
        assert probe.calls[-1] == "start"
    assert probe.calls == ["start", "stop"] * 2


def test_unknown_measures_are_refused() -> None:
    with pytest.raises(StateError, match="'time' or 'workspace'; got 'bytes'"):
        umem.record(measure="bytes")  # type: ignore[arg-type]


def test_a_recorder_that_keeps_nothing_has_no_trace() -> None:
    with Recorder(keep=False) as recorder:
        xp.ones(3)
    with pytest.raises(StateError, match="keeps no events"):
        _ = recorder.trace


# -- sources and cost when off -----------------------------------------------------------------


def test_a_source_runs_from_the_first_recorder_to_the_last_of_any_thread(probe: Probe) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with umem.record():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=other)
    with umem.record():
        thread.start()
        assert inside.wait(300)
    assert probe.calls == ["start"]
    leave.set()
    thread.join()
    assert probe.calls == ["start", "stop"]


def test_a_source_added_while_recording_starts_at_once() -> None:
    source = Probe()
    with umem.record():
        sources.add_source(source)
    sources.added.remove(source)
    assert source.calls == ["start", "stop"]


def test_chainer_is_exactly_as_it_was_afterwards() -> None:
    import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
    from chainer import FunctionNode, _backprop_utils, optimizer

    def now() -> list[Any]:
        return [
            FunctionNode.__dict__["apply"],
            _backprop_utils.backprop_step,
            optimizer.UpdateRule.__dict__["update"],
            optimizer.GradientMethod.__dict__["update"],
        ]

    before = now()
    with umem.record():
        wrapped = now()
        with umem.record():
            assert now() == wrapped
    assert all(a is b for a, b in zip(before, now(), strict=True))
    assert not any(a is b for a, b in zip(before, wrapped, strict=True))
    with pytest.raises(ZeroDivisionError), umem.record():
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(before, now(), strict=True))


def test_without_a_recorder_nothing_is_made() -> None:
    import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
    import chainer.functions as F

    def step() -> None:
        F.relu(x)
        (a + 1).sum()

    x, a = np.ones((2, 2), "f"), xp.ones(10)
    parts = (module, umem.trace.recording.thread, umem.trace.recording.storage, umem.chainer.source)
    files = [part.__file__ for part in parts]
    step()
    tracemalloc.start(10)
    try:
        step()
        made = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, file, all_frames=True) for file in files]
        )
    finally:
        tracemalloc.stop()
    assert not made.traces


# -- memory that runs out ----------------------------------------------------------------------


class Full:
    """A listener with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.live: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Alloc):
            if sum(self.live.values()) + event.nbytes > self.room:
                raise OutOfMemoryError("full")
            self.live[event.tensor] = event.nbytes
        elif isinstance(event, Free):
            del self.live[event.tensor]


def test_out_of_memory_leaves_a_consistent_state() -> None:
    full = Full(1000)
    with Recorder(full) as recorder, umem.record() as beside:
        a = xp.ones(100)
        with pytest.raises(OutOfMemoryError):
            a + 1
        assert not umem.trace.recording.thread.inside()
        assert full.live == {0: 800}
        b = xp.ones(20)
        with pytest.raises(OutOfMemoryError):
            a + b[0]
        del a
        c = b + 1
    assert [op.name for op in recorder.trace.ops] == ["ones", "ones", "add"]
    check(recorder.trace.events)
    check(beside.trace.events)
    assert sum(full.live.values()) == b.nbytes + c.nbytes


def test_garbage_is_collected_before_memory_runs_out() -> None:
    full = Full(1000)
    gc.disable()
    try:
        with Recorder(full) as recorder:
            for _ in range(5):
                cycle: list[Any] = [xp.ones(100)]
                cycle.append(cycle)
                del cycle
    finally:
        gc.enable()
    assert kinds(recorder.trace.events) == " Free ".join(["Alloc Op"] * 5)
    check(recorder.trace.events)


# -- measuring ---------------------------------------------------------------------------------


def test_time_inside_an_inner_operation_is_not_the_outer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from umem.trace.recording import recorder as measuring

    now = 100.0
    monkeypatch.setattr(measuring, "perf_counter", lambda: now)
    with umem.record():
        outer = Measured()
        now += 1.0
        inner = Measured()
        now += 5.0
        inner.stop()
        now += 2.0  # recording the inner one
        inner.close()
        now += 0.5
        outer.stop()
        outer.close()
    assert inner.seconds == 5.0
    assert outer.seconds == 1.5
    assert not umem.trace.recording.thread.inside()


def test_a_calibration_pass_measures_what_an_operation_needs_while_it_runs() -> None:
    with umem.record(measure="workspace") as recorder:
        a = xp.ones((300, 100))
        b = xp.ones(100) + a
    sizes = {op.name: op.workspace_bytes for op in recorder.trace.ops}
    # NumPy's own buffers, of 8192 elements, but not the arrays of 240 kB
    assert all(size is not None and size < 70_000 for size in sizes.values())
    assert all(op.host_seconds is None for op in recorder.trace.ops)
    assert not tracemalloc.is_tracing()
    del b


def test_a_calibration_pass_leaves_tracing_on_where_it_was_on() -> None:
    tracemalloc.start()
    try:
        with umem.record(measure="workspace"):
            pass
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_an_outer_operations_workspace_counts_the_time_before_an_inner_one() -> None:
    with umem.record(measure="workspace"):
        outer = Measured()
        large = np.ones(1_000_000, "u1")
        del large
        inner = Measured()
        small = np.ones(100_000, "u1")
        del small
        inner.stop()
        inner_bytes = inner.workspace_bytes
        inner.close()
        outer.stop()
        outer_bytes = outer.workspace_bytes
        outer.close()
    assert inner_bytes is not None
    assert outer_bytes is not None
    assert 100_000 <= inner_bytes < 110_000
    assert 1_000_000 <= outer_bytes < 1_010_000
