"""Keeping some steps of a run: exactly those, whole, in bounded memory, and then no more."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import umem
from umem.devices.virtual import VirtualGPU
from umem.errors import SizeError
from umem.trace.events import Alloc, Checker, Event, Free, Mark, Op
from umem.trace.recording.kept_steps import Keeper, Kept, Steps, calibrate
from umem.trace.recording.recorder import active

chainer = pytest.importorskip("umem.chainer").chainer
F, L = chainer.functions, chainer.links
STEP = Mark("step")


class Network(chainer.Chain):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(8, 16)
            self.second = L.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return F.mean(self.second(F.relu(self.first(x))) ** 2)


class Training:
    """Steps of a small network; each holds its loss until the next has one, as scripts do."""

    def __init__(self) -> None:
        self.model = Network()
        self.optimizer = chainer.optimizers.Adam().setup(self.model)

    def step(self, batch: int = 4) -> None:
        self.loss = self.model(np.ones((batch, 8), "f"))
        self.model.cleargrads()
        self.loss.backward()
        self.optimizer.update()


@pytest.fixture
def training() -> Training:
    return Training()


def run(keeper: Keeper, steps: Iterator[Any] | Any) -> Kept:
    """Start, take the steps, finish; what is kept holds together."""
    keeper.start()
    try:
        for step in steps:
            step()
    finally:
        kept = keeper.finish()
    assert kept is not None
    check(kept.trace.events)
    return kept


def check(events: list[Event]) -> None:
    checker = Checker()
    for event in events:
        checker.check(event)


def slice_of(events: list[Event], first: int, last: int) -> list[Event]:
    """The steps of a whole recording, and before them what was alive when they began."""
    ends = [0] + [index + 1 for index, event in enumerate(events) if event == STEP]
    alive: dict[int, Event] = {}
    for event in events[: ends[first - 1]]:
        if isinstance(event, Alloc):
            alive[event.tensor] = event._replace(uploaded=True)
        elif isinstance(event, Free):
            del alive[event.tensor]
    beginning = [*alive.values(), Mark("start")] if first > 1 else []
    return [*beginning, *events[ends[first - 1] : ends[last]]]


# -- which steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps", "shown"),
    [("2-3", (2, 3), "2-3"), ("5", (5, 5), "5"), ("4-4", (4, 4), "4"), ("all", (1, None), "all")],
)
def test_steps_are_read(text: str, steps: tuple[int, int | None], shown: str) -> None:
    assert Steps.parse(text) == steps
    assert str(Steps.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "0", "0-1", "3-2", "-1", "2-", "2-x", "two", "1,2", " 2", "2.5", "9" * 30, "٢"]
)
def test_what_is_no_steps_is_refused(text: str) -> None:
    with pytest.raises(SizeError, match="steps"):
        Steps.parse(text)


@pytest.mark.parametrize(
    ("text", "first", "last"), [("2-3", 2, 3), ("1", 1, 1), ("3", 3, 3), ("4-6", 4, 6)]
)
def test_exactly_the_steps_are_kept_with_what_was_alive_before(
    training: Training, text: str, first: int, last: int
) -> None:
    keeper = Keeper(Steps.parse(text), workspace=False)
    with umem.record() as everything:
        kept = run(keeper, [training.step] * 7)
    assert kept.trace.events == slice_of(everything.trace.events, first, last)
    assert (kept.steps, kept.notes) == (text, ())
    assert kept.trace.step_count == last - first + 1


def test_all_of_them_are_kept(training: Training) -> None:
    keeper = Keeper(Steps.parse("all"))
    with umem.record() as everything:
        kept = run(keeper, [training.step] * 3)
    assert kept.trace.events == slice_of(everything.trace.events, 1, 3)
    assert kept.steps == "1-3"
    assert "no step comes after all of them" in kept.notes[0]


def test_parameters_state_and_the_graph_before_are_there_from_the_beginning(
    training: Training,
) -> None:
    kept = run(Keeper(), [training.step] * 5)
    found: dict[str, int] = {}
    for event in kept.trace.events:
        if isinstance(event, Op):
            break
        if isinstance(event, Alloc) and event.uploaded:
            found[event.kind] = found.get(event.kind, 0) + event.nbytes
    parameters = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert found["parameter"] == parameters
    assert found["state"] == 2 * parameters  # Adam's two moments
    assert found["gradient"] >= parameters  # until the next step clears them
    assert found["activation"] >= 4 * 4 * 16  # the loss of the step before holds its graph


ACTIONS = st.lists(
    st.one_of(
        st.integers(1, 50),  # an array of so many bytes
        st.floats(0, 1),  # the death of an array, so far along the list of them
        st.sampled_from(["op", "update", "update"]),
    ),
    max_size=60,
)


def act(actions: list[Any]) -> None:
    """Have the active recorders see arrays come and go, operations, and updates."""
    arrays: list[Any] = []
    for action in actions:
        if isinstance(action, int):
            arrays.append(np.zeros(action, "u1"))
        elif isinstance(action, float) and arrays:
            del arrays[min(int(action * len(arrays)), len(arrays) - 1)]
        for recorder in active():
            if action == "update":
                recorder.emit(STEP)
                continue
            uses = [recorder.access(array, "activation", "a") for array in arrays[-2:]]
            if action == "op":
                recorder.emit_op("f", "forward", uses, [], 1, None, "stream", 0.0, None)


@given(ACTIONS, st.integers(1, 4), st.integers(0, 3))
def test_whatever_happens_the_steps_are_a_part_of_the_whole(
    actions: list[Any], first: int, more: int
) -> None:
    last = first + more
    keeper = Keeper(Steps(first, last), workspace=False)
    with umem.record() as everything:
        kept = run(keeper, [lambda: act(actions)])
    events, count = everything.trace.events, everything.trace.step_count
    if not count:
        assert kept.trace.events == events and kept.steps == ""
    else:
        begin, end = min(first, count), min(last, count)
        assert kept.trace.events == slice_of(events, begin, end)
        assert kept.steps == str(Steps(begin, end))


@given(ACTIONS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 30), st.booleans())
def test_whatever_the_limit_a_trace_holds_together(
    actions: list[Any], first: int, more: int, limit: int, workspace: bool
) -> None:
    keeper = Keeper(Steps(first, first + more), workspace=workspace, limit=limit)
    kept = run(keeper, [lambda: act(actions)])  # which checks it
    assert sum(isinstance(event, Op) for event in kept.trace.events) <= limit + 1
    assert not active() and not tracemalloc.is_tracing()


# -- less than was asked for -------------------------------------------------------------------


def test_a_run_that_ends_before_the_steps_keeps_its_last_whole_one(training: Training) -> None:
    keeper = Keeper(Steps(5, 6))
    with umem.record() as everything:
        kept = run(keeper, [training.step] * 3)
    assert kept.trace.events == slice_of(everything.trace.events, 3, 3)
    assert kept.steps == "3"
    assert kept.notes[0] == "the run ended after step 3, before step 5: step 3 is kept"


def test_a_run_that_ends_within_the_steps_keeps_the_whole_ones(training: Training) -> None:
    def unfinished() -> None:
        training.model(np.ones((4, 8), "f"))
        raise MemoryError

    keeper = Keeper(Steps(2, 3))
    with umem.record() as everything, pytest.raises(MemoryError):
        run(keeper, [training.step, training.step, unfinished])
    kept = keeper.kept
    assert kept is not None
    assert kept.trace.events == slice_of(everything.trace.events, 2, 2)
    assert kept.steps == "2" and kept.notes[0] == "the run ended after step 2, before step 3"


def test_a_run_without_an_update_is_kept_whole(training: Training) -> None:
    keeper = Keeper()
    with umem.record() as everything:
        kept = run(keeper, [lambda: training.model(np.ones((4, 8), "f"))] * 3)
    assert kept.trace.events == everything.trace.events and kept.trace.events
    assert kept.steps == "" and "no step ended in this thread" in kept.notes[0]


def test_a_run_in_another_thread_is_not_seen_and_that_is_said(training: Training) -> None:
    def in_a_thread() -> None:
        thread = threading.Thread(target=training.step)
        thread.start()
        thread.join()

    kept = run(Keeper(), [in_a_thread])
    assert kept.trace.events == [] and "in this thread" in kept.notes[0]


# -- bounds ------------------------------------------------------------------------------------


def test_what_is_stored_does_not_grow_with_the_steps_before(training: Training) -> None:
    keeper = Keeper(Steps(30, 30), workspace=False)
    counts = []

    def step() -> None:
        training.step()
        counts.extend(recorder.stored_count for recorder in active())

    kept = run(keeper, [step] * 30)
    one_step = len(kept.trace.events)
    assert kept.steps == "30" and max(counts) <= 2 * one_step
    assert counts[10] == counts[20]


def test_a_long_run_without_an_update_is_cut(training: Training) -> None:
    keeper = Keeper(limit=50)
    kept = run(keeper, [lambda: training.model(np.ones((4, 8), "f"))] * 100)
    assert 50 <= len(kept.trace) < 60
    assert kept.notes[-1] == "recording ended after 50 events"


def test_a_step_that_is_too_long_is_cut_and_recording_is_over(training: Training) -> None:
    seen = []
    keeper = Keeper(Steps(1, 2), limit=30, complete=seen.append)
    kept = run(keeper, [training.step, training.step])
    assert seen == [kept] and 30 <= len(kept.trace) < 40
    assert kept.notes == (
        "recording ended after 30 events",
        "the workspace of 1 step is unknown and not in the peak: there was no room for a step to "
        "measure it in",
    )


def test_of_all_steps_the_whole_ones_are_kept_as_far_as_there_is_room(training: Training) -> None:
    seen: list[Kept] = []
    keeper = Keeper(Steps.parse("all"), workspace=False, limit=200, complete=seen.append)
    with umem.record() as everything:
        kept = run(keeper, [training.step] * 9)
    count = kept.trace.step_count
    assert 1 < count < 9 and kept.steps == f"1-{count}" and seen == [kept]
    assert kept.trace.events == slice_of(everything.trace.events, 1, count)
    assert kept.notes == ("recording ended after 200 events",)


def test_no_room_to_measure_workspace_is_said(training: Training) -> None:
    with umem.record() as everything:
        training.step()
    limit = 5 * len(everything.trace) // 2
    kept = run(Keeper(Steps(1, 2), limit=limit), [training.step] * 5)
    assert kept.steps == "1-2"
    assert "no room for a step to measure it in" in kept.notes[-1]


def test_steps_that_have_their_workspace_miss_none() -> None:
    def op(workspace: int | None) -> Op:
        return Op("f", "forward", (), (), 1, 1, workspace_bytes=workspace)

    events = [op(8), Mark("step"), op(None), Mark("step"), Mark("step")]
    found = calibrate(events, [2, 4, 5], [])
    assert found.missing == (1,) and found.events == events
    assert calibrate(events, [2, 4, 5], [[op(4)]]).events[2] == op(4)


def test_much_before_the_first_update_does_not_hide_the_second_step(training: Training) -> None:
    def evaluate() -> None:
        for _ in range(60):
            training.model(np.ones((4, 8), "f"))

    keeper = Keeper(Steps(2, 3), workspace=False, limit=200)
    with umem.record() as everything:
        kept = run(keeper, [evaluate, *[training.step] * 3])
    assert kept.trace.events == slice_of(everything.trace.events, 2, 3)
    assert kept.notes == ()


# -- out of the way ----------------------------------------------------------------------------


def test_after_the_steps_nothing_is_recorded_or_wrapped(training: Training) -> None:
    plain = chainer.FunctionNode.apply
    states = []

    def step() -> None:
        training.step()
        states.append((len(active()), tracemalloc.is_tracing()))

    seen: list[Kept] = []
    keeper = Keeper(complete=seen.append)
    keeper.start()
    for _ in range(5):
        step()
        if len(seen):
            assert chainer.FunctionNode.apply is plain
    assert states == [(1, False), (1, False), (1, True), (0, False), (0, False)]
    assert keeper.finish() is seen[0] and len(seen) == 1


def test_other_recorders_go_on(training: Training) -> None:
    with umem.virtual_gpu("t4") as gpu, umem.record() as outer:
        keeper = Keeper()
        keeper.start()
        with umem.record() as inner:
            for _ in range(6):
                training.step()
        keeper.finish()
        assert len(active()) == 2
    assert outer.trace.step_count == inner.trace.step_count == len(gpu.figures.step_seconds) == 6


def test_a_child_by_fork_keeps_nothing(training: Training) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    seen: list[Kept] = []
    keeper = Keeper(complete=seen.append)
    keeper.start()
    training.step()
    child = os.fork()
    if not child:
        code = 1
        try:
            for _ in range(5):
                training.step()
            code = 0 if not seen and not active() and keeper.finish() is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(3):
        training.step()
    keeper.finish()
    assert len(seen) == 1 and seen[0].steps == "2-3"


# -- workspace ---------------------------------------------------------------------------------


class Roomy(chainer.FunctionNode):  # type: ignore[misc]
    """Takes a MiB while it runs."""

    def forward(self, inputs: Any) -> Any:
        room = np.ones(1 << 20, "u1")
        return (inputs[0] + room[0],)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        return grad_outputs


def workspaces(kept: Kept, name: str) -> list[int | None]:
    return [op.workspace_bytes for op in kept.trace.ops if op.name == name]


def test_the_kept_steps_have_times_and_the_workspace_of_the_step_after(training: Training) -> None:
    def step() -> None:
        Roomy().apply((np.ones(4, "f"),))
        training.step()

    kept = run(Keeper(), [step] * 4)
    assert kept.notes == ()
    for op in kept.trace.ops:
        assert op.host_seconds is not None and op.workspace_bytes is not None
    sizes = workspaces(kept, "Roomy")
    assert len(sizes) == 2
    assert all(abs((size or 0) - (1 << 20)) < 20_000 for size in sizes)  # Python's own objects


def test_two_optimizers_take_turns_and_each_step_meets_its_like() -> None:
    generator, critic = Training(), Training()
    kept = run(Keeper(), [lambda: generator.step(2), lambda: critic.step(8)] * 3)
    assert kept.notes == () and kept.trace.step_count == 2
    assert all(op.workspace_bytes is not None for op in kept.trace.ops)


def test_gradients_that_add_up_over_batches_are_one_step(training: Training) -> None:
    def accumulate() -> None:
        training.model.cleargrads()
        for _ in range(3):
            training.model(np.ones((4, 8), "f")).backward()
        training.optimizer.update()

    kept = run(Keeper(), [accumulate] * 4)
    forward = [op for op in kept.trace.ops if (op.name, op.phase) == ("ReLU", "forward")]
    assert len(forward) == 2 * 3 and kept.notes == ()


def test_steps_of_other_shapes_have_no_workspace_and_that_is_said(training: Training) -> None:
    batches = iter(range(1, 20))
    kept = run(Keeper(), [lambda: training.step(next(batches))] * 8)
    assert kept.notes == (
        "the workspace of 2 steps is unknown and not in the peak: the steps after ran other "
        "operations, or of other shapes",
    )
    assert all(op.workspace_bytes is None for op in kept.trace.ops)


def test_a_run_that_ends_with_the_steps_says_why_there_is_no_workspace(training: Training) -> None:
    kept = run(Keeper(), [training.step] * 3)
    assert kept.steps == "2-3"
    assert "the run ended before a step to measure it in" in kept.notes[0]
    assert not tracemalloc.is_tracing()


def test_tracemalloc_that_the_script_started_stays_on(training: Training) -> None:
    tracemalloc.start()
    try:
        run(Keeper(), [training.step] * 5)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_a_replay_starts_its_clock_where_the_kept_steps_begin(training: Training) -> None:
    def uploaded(kept: Kept) -> int:
        gpu = VirtualGPU("t4")
        for event in kept.trace.events:
            gpu.on_event(event)
        return gpu.figures.uploaded_bytes

    batch, parameters = 4 * (4 * 8), 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert uploaded(run(Keeper(), [training.step] * 4)) == 2 * batch  # a new one in each step
    first = run(Keeper(Steps(1, 1)), [Training().step] * 2)
    assert uploaded(first) == batch + parameters


def test_a_trace_says_where_it_comes_from(training: Training) -> None:
    meta = run(Keeper(Steps(1, 1)), [training.step] * 2).trace.meta
    assert (meta["steps"], meta["numpy"], meta["umem"]) == ("1", np.__version__, umem.__version__)
    assert {"python", "chainer", "machine"} <= set(meta)


def test_stacks_are_kept_too(training: Training) -> None:
    kept = run(Keeper(stacks=True), [training.step] * 4)
    for event in kept.trace.events:
        if isinstance(event, Alloc):
            assert event.stack and os.path.basename(__file__) in event.stack[0]
