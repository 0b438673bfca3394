"""What counts as a leak: ordinary training loops have none, and those that collect have each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import umem
from umem.trace import Access, Alloc, Event, Free, Mark, Op, Trace
from umem.trace.analysis.analysis import analyse
from umem.trace.analysis.leaks import Leak

needs_chainer = pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer")


def leaks_of(events: list[Event]) -> list[Leak]:
    return analyse(Trace(events)).leaks


def step(
    loss: int,
    *frees: int,
    params: tuple[int, ...] = (0,),
    stack: tuple[str, ...] = (),
    uses: tuple[int, ...] = (),
) -> list[Event]:
    """A step that makes one tensor, frees others when its forward is done, and updates."""
    W = tuple(Access(p, 0, 8) for p in params)
    read = tuple(Access(t, 0, 4) for t in uses)
    return [
        Alloc(loss, 4, "activation", "loss", stack=stack),
        Op("F", "forward", W + read, (Access(loss, 0, 4),)),
        *(Free(tensor) for tensor in frees),
        Op("B", "backward", (Access(loss, 0, 4),), ()),
        Op("SGD", "update", W, W),
        Mark("step"),
    ]


W, V = Alloc(0, 8, "parameter", "W", True), Alloc(99, 8, "parameter", "V", True)


# -- what is none ------------------------------------------------------------------------------


def test_a_loss_that_lives_until_the_next_forward_is_none() -> None:
    assert leaks_of([W, *step(1), *step(2, 1), *step(3, 2)]) == []


def test_a_loss_that_lives_until_the_next_step_has_returned_is_none() -> None:
    events = [W, *step(1), *step(2), Free(1), *step(3), Free(2), *step(4), Free(3)]
    assert leaks_of(events) == leaks_of(events[:-1]) == leaks_of(events[:-8]) == []


def test_the_last_loss_may_live_to_the_end() -> None:
    assert leaks_of([W, *step(1), Free(1), *step(2)]) == []
    assert leaks_of([W, *step(1)]) == []
    assert leaks_of([W, *step(1), *step(2)[:2]]) == []  # cut off in the next forward pass
    assert leaks_of([W, *step(1), *step(2)[:3]]) == []  # or in its backward pass


def test_what_an_update_touches_is_none() -> None:
    grad, state = Alloc(1, 8, "gradient", "gW"), Alloc(2, 8, "state", "Adam.m")
    touched = tuple(Access(t, 0, 8) for t in (0, 1, 2))
    update: list[Event] = [Op("Adam", "update", touched, touched), Mark("step")]
    assert leaks_of([W, grad, state, *update, *update, *update]) == []


def test_what_came_from_the_host_is_none() -> None:
    batches = [Alloc(10 + n, 100, "input", "x", True) for n in range(3)]
    events: list[Event] = [W]
    for n, batch in enumerate(batches):
        events += [batch, *step(n + 1, *([n] if n else []), uses=(batch.tensor,))]
    assert leaks_of(events) == []


def test_what_later_steps_use_is_none() -> None:
    made = [Alloc(50, 100, "activation", "norm"), Op("Norm", "forward", (), (Access(50, 0, 9),))]
    used = {"uses": (50,)}
    assert leaks_of([W, *made, *step(1, **used), *step(2, 1, **used), *step(3, 2, **used)]) == []
    (leak,) = leaks_of([W, *made, *step(1), *step(2, 1), *step(3, 2)])
    assert leak.label == "norm"


def test_two_networks_in_turns_keep_each_others_losses() -> None:
    D, G = {"params": (0,)}, {"params": (99,)}
    first = [W, V, *step(1, **D), *step(2, **G)]
    assert leaks_of([*first, *step(3, 1, **D), *step(4, 2, **G)]) == []
    second = [*first, *step(3, **D), Free(1), *step(4, **G), Free(2), *step(5, **D)]
    assert leaks_of(second) == []
    assert leaks_of([*first, *step(3, **D), *step(4, **G), *step(5, **D)])[0].steps == (0, 1, 2)


def test_several_updates_of_one_before_the_other_are_its_steps() -> None:
    D, G = {"params": (0,)}, {"params": (99,)}
    events = [W, V]
    for n in range(3):  # the losses are assigned anew after the next forward pass of their own
        base = 10 * n
        events += step(base + 1, *([base - 8] if n else []), **D)
        events += step(base + 2, base + 1, **D)
        events += step(base + 3, *([base - 7] if n else []), **G)
    assert leaks_of(events) == []


def test_losses_that_functions_return_in_turns_are_none() -> None:
    D, G = {"params": (0,)}, {"params": (99,)}
    events = [W, V, Alloc(1000, 4, "activation", "loss", True)]
    last: dict[str, int] = {"G": 1000}
    for n, which in enumerate("DDGDDGDDG"):  # assigned anew once the step has returned
        events += step(n + 1, **{"D": D, "G": G}[which])
        events += [Free(last[which])] if which in last else []
        last[which] = n + 1
    first = [n for n, event in enumerate(events) if event == Mark("step")][2]
    for end in range(first + 1, len(events)):  # from where both were seen
        assert leaks_of(events[:end]) == [], end


# -- what is one -------------------------------------------------------------------------------


def test_losses_in_a_list_are_told_once_each_with_operation_steps_and_line() -> None:
    stack = ("train.py:12 step", "train.py:30 main")
    events = [W, *(e for n in (1, 2, 3) for e in step(n, stack=stack))]
    (leak,) = leaks_of(events)
    assert (leak.label, leak.op, leak.phase, leak.kind) == (
        "loss",
        "F",
        "forward",
        "saved for backward",
    )
    assert (leak.tensor_count, leak.total_bytes, leak.steps) == (2, 8, (0, 1))  # not the last
    assert (leak.stack, leak.freed_count) == (stack, 0)


def test_a_leak_that_is_freed_later_is_still_one() -> None:
    events = [W, *step(1), *step(2, 1), *step(3), *step(4), Free(2), Free(3), Free(4)]
    (leak,) = leaks_of(events)
    assert (leak.steps, leak.freed_count) == ((1, 2), 2)


def test_a_past_that_grows_is_one_though_it_is_used() -> None:
    grown = [W, *step(1), *step(2, uses=(1,)), *step(3, uses=(1, 2)), *step(4, uses=(1, 2, 3))]
    (leak,) = leaks_of(grown)
    assert leak.steps == (0, 1, 2)
    assert leaks_of([W, *step(1), *step(2, uses=(1,)), *step(3, uses=(1,))])[0].steps == (0, 1)


def test_where_the_trace_ends_with_the_next_step_it_takes_two_of_a_make() -> None:
    before = Alloc(9, 4, "activation", "loss", True)  # the loss of a step before the recording
    assert leaks_of([W, *step(1), *step(2)]) == []
    assert leaks_of([W, before, *step(1), Free(9), *step(2)]) == []
    (leak,) = leaks_of([W, before, *step(1), *step(2)])
    assert (leak.steps, leak.earlier_count, leak.tensor_count) == ((0,), 1, 2)
    assert (leak.op, leak.phase) == ("F", "forward")


def test_it_is_said_how_sure_none_is() -> None:
    def said(*events: Event) -> str:
        return analyse(Trace([W, *events])).no_leaks

    before = Alloc(9, 4, "activation", "loss", True)
    assert (
        said(*step(1)) == said(*step(1), Free(1)) == "Two recorded steps are needed to find them."
    )
    assert said(*step(1), *step(2)).startswith("None found")
    assert said(before, *step(1), Free(9), *step(2)) == "None."
    assert said(*step(1), *step(2), Free(1)) == said(*step(1), *step(2), *step(3, 1, 2)) == "None."


def test_where_something_was_freed_after_the_next_step_the_rest_stays() -> None:
    x = Alloc(50, 7, "input", "x", True)
    (leak,) = leaks_of([W, *step(1), x, *step(2), Free(50)])
    assert leak.steps == (0,)


def test_the_largest_leak_comes_first() -> None:
    made: list[Event] = [
        Alloc(7, 4000, "array", "kept"),
        Op("zeros", "array", (), (Access(7, 0, 9),)),
    ]
    found = leaks_of([W, *made, *step(1), *step(2), *step(3), *step(4)])
    assert [leak.label for leak in found] == ["kept", "loss"]


# -- Chainer's own loops -----------------------------------------------------------------------


@pytest.fixture
def training() -> Any:
    """A model, its optimizer, and the loss of a batch."""
    import_module("umem.chainer")  # before Chainer, which it makes ready
    import chainer
    import chainer.functions as F
    import chainer.links as L

    model = chainer.Sequential(L.Linear(4, 8), L.BatchNormalization(8), F.relu, L.Linear(8, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    x = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)

    def loss_of() -> Any:
        return F.mean(F.dropout(model(x + np.float32(1))) ** 2)

    return model, optimizer, loss_of


def recorded(loop: Callable[[], object]) -> list[Leak]:
    with umem.record() as recorder:
        kept = loop()
    del kept
    return analyse(recorder.trace).leaks


@needs_chainer
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_ordinary_loop_reports_none(training: Any, count: int) -> None:
    model, optimizer, loss_of = training

    def loop() -> object:
        for _ in range(count):
            loss = loss_of()
            model.cleargrads()
            loss.backward()
            optimizer.update()
        return loss

    assert recorded(loop) == []


@needs_chainer
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_loop_over_a_function_that_returns_the_loss_reports_none(
    training: Any, count: int
) -> None:
    model, optimizer, loss_of = training

    def step() -> object:
        loss = loss_of()
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return loss

    def loop() -> object:
        for _ in range(count):
            loss = step()
        return loss

    assert recorded(loop) == []


@needs_chainer
def test_a_list_of_losses_reports_each_with_what_its_graph_holds(training: Any) -> None:
    model, optimizer, loss_of = training

    def loop() -> object:
        losses = []
        for _ in range(3):
            losses.append(loss_of())
            model.cleargrads()
            losses[-1].backward()
            optimizer.update()
        return losses

    found = {leak.label: leak for leak in recorded(loop)}
    assert found["Mean"].tensor_count == 2 and found["Mean"].steps == (0, 1)
    assert found["Dropout.mask"].total_bytes == 2 * 5 * 2 * 4


@needs_chainer
def test_a_running_total_of_variables_reports_the_graphs(training: Any) -> None:
    model, optimizer, loss_of = training

    def loop() -> object:
        total: Any = 0
        for _ in range(3):
            loss = loss_of()
            model.cleargrads()
            loss.backward()
            optimizer.update()
            total += loss
        return total

    assert {leak.op for leak in recorded(loop)} >= {"LinearFunction", "Dropout"}


@needs_chainer
def test_arrays_of_losses_in_a_list_are_only_themselves(training: Any) -> None:
    model, optimizer, loss_of = training

    def loop() -> object:
        losses = []
        for _ in range(3):
            loss = loss_of()
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array)
        return losses

    (leak,) = recorded(loop)
    assert (leak.label, leak.total_bytes, leak.tensor_count) == ("Mean", 8, 2)


@needs_chainer
def test_a_trainer_with_reports_reports_none(training: Any, tmp_path: Any) -> None:
    import chainer
    from chainer.training import extensions

    model, _, _ = training
    classifier = chainer.links.Classifier(model)
    optimizer = chainer.optimizers.MomentumSGD().setup(classifier)
    data = [(np.full(4, n, np.float32), np.int32(n % 2)) for n in range(24)]
    iterator = chainer.iterators.SerialIterator(data, 8)
    test = chainer.iterators.SerialIterator(data, 8, repeat=False, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (4, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Evaluator(test, classifier), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))

    def loop() -> object:
        trainer.run()
        return trainer

    assert recorded(loop) == []
