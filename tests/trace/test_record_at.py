"""A step recorded at two sizes says what a step at another takes, and leaves nothing behind."""

from __future__ import annotations

import gc
import re
import tracemalloc
from pathlib import Path
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import _backprop_utils, function_node, optimizer
from processes import printed_quietly
from project import ROOT

import umem
from umem.errors import ScalingError, SizeError
from umem.trace import Trace
from umem.trace.events import Alloc, Mark, Op
from umem.trace.recording.recorder import active

WIDTH, HIDDEN, CLASSES = 256, 512, 10


def mlp_step(make_optimizer: Any = chainer.optimizers.Adam) -> Any:
    """A small network; its weights take their shapes from the first batch."""
    model = chainer.Sequential(L.Linear(None, HIDDEN), F.relu, F.dropout, L.Linear(None, CLASSES))
    optimizer_ = make_optimizer().setup(model)

    def step(size: int) -> None:
        x, t = np.ones((size, WIDTH), np.float32), np.zeros(size, np.int32)
        optimizer_.update(lambda: F.softmax_cross_entropy(model(x), t))

    return step


def conv_step() -> Any:
    model = chainer.Sequential(
        L.Convolution2D(3, 16, 3, pad=1),
        L.BatchNormalization(16),
        F.relu,
        lambda x: F.max_pooling_2d(x, 2),
        L.Linear(None, CLASSES),
    )
    optimizer_ = chainer.optimizers.MomentumSGD().setup(model)

    def step(size: int) -> None:
        x, t = np.ones((size, 3, 16, 16), np.float32), np.zeros(size, np.int32)
        optimizer_.update(lambda: F.softmax_cross_entropy(model(x), t))

    return step


def attention_step() -> Any:
    """Of sequences of any length, whose products are squares of it."""
    project = L.Linear(16, 48)
    optimizer_ = chainer.optimizers.SGD().setup(project)

    def step(length: int) -> None:
        rows = project(np.ones((2 * length, 16), np.float32))
        q, k, v = F.split_axis(F.reshape(rows, (2, length, 48)), 3, 2)
        weights = F.softmax(F.matmul(q, k, transb=True), axis=2)
        project.cleargrads()
        F.sum(F.matmul(weights, v)).backward()
        optimizer_.update()

    return step


def measured_peak(step: Any, size: int) -> int:
    """The peak of arrays over a step, with what was there before, by tracemalloc."""
    gc.collect()
    tracemalloc.start(1)
    try:
        made = step()
        made(size)
        gc.collect()
        others = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([others]).traces
        objects = sum(trace.size for trace in traces)
        tracemalloc.reset_peak()
        made(size)
        return tracemalloc.get_traced_memory()[1] - objects
    finally:
        tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [mlp_step, conv_step])
def test_the_peak_at_a_size_that_was_not_recorded_is_what_tracemalloc_measures(make: Any) -> None:
    predicted = umem.record_at(make()).at(64).peak_bytes
    measured = measured_peak(make, 64)
    assert 0.98 * measured <= predicted <= 1.05 * measured


@pytest.mark.thorough
def test_the_peak_of_attention_over_a_longer_sequence_is_fitted_as_a_square() -> None:
    trace = umem.record_at(attention_step(), sizes=(64, 128, 256))
    measured = measured_peak(attention_step, 512)
    assert 0.98 * measured <= trace.at(512, degree=2).peak_bytes <= 1.05 * measured
    with pytest.raises(ScalingError, match="degree=2"):
        trace.at(512)


def test_the_trace_has_one_step_a_size_with_state_times_and_workspace(tmp_path: Path) -> None:
    trace = umem.record_at(mlp_step(), sizes=(2, 6))
    assert trace.sizes == (2, 6)
    loaded = Trace.load(trace.save(tmp_path / "step.umem.gz"))
    assert loaded == trace
    for size in (2, 4, 6):
        at = loaded.at(size)
        assert at.step_count == 1
        first_op = next(n for n, event in enumerate(at.events) if isinstance(event, Op))
        start = at.events.index(Mark("start"))
        assert start < first_op
        before = [e for e in at.events[:start] if isinstance(e, Alloc)]
        states = [e for e in before if e.kind == "state"]
        assert len(states) == 8  # Adam's two of each of four parameters, there from the start
        assert all(e.uploaded for e in states)
        assert all(op.host_seconds is not None and op.workspace_bytes is not None for op in at.ops)
    (update,) = {op.name for op in trace.ops if op.phase == "update"}
    assert update == "Adam"


def test_what_the_step_makes_grows_with_the_size_and_what_it_holds_does_not() -> None:
    trace = umem.record_at(mlp_step())
    small, large = (
        {(e.kind, e.label): e.nbytes for e in trace.at(n).events if isinstance(e, Alloc)}
        for n in (1, 100)
    )
    assert large["activation", "ReLU"] == 100 * small["activation", "ReLU"] == 100 * HIDDEN * 4
    assert large["stash", "Dropout.mask"] == 100 * HIDDEN * 4
    for key in (("parameter", "W"), ("state", "Adam.m")):
        assert large[key] == small[key]


def test_nothing_is_left_behind() -> None:
    before = wrapped()
    umem.record_at(mlp_step())
    assert wrapped() == before
    assert active() == ()
    assert not tracemalloc.is_tracing()


def wrapped() -> list[Any]:
    return [
        function_node.FunctionNode.apply,
        _backprop_utils.backprop_step,
        optimizer.UpdateRule.update,
        optimizer.GradientMethod.update,
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("failing_call", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("error", [ValueError("no more data"), KeyboardInterrupt()])
def test_nothing_is_left_behind_by_a_step_that_raises(
    failing_call: int, error: BaseException
) -> None:
    before, calls, step = wrapped(), 0, mlp_step()

    def failing(size: int) -> None:
        nonlocal calls
        calls += 1
        step(size)
        if calls == failing_call:
            raise error

    later = failing_call > 3 and isinstance(error, Exception)
    with pytest.raises(ScalingError if later else type(error)) as caught:
        umem.record_at(failing)
    if later:
        assert caught.value.__cause__ is error
        assert "ran at size 4 and fails at size 8, with ValueError" in str(caught.value)
    assert calls == failing_call
    assert wrapped() == before
    assert active() == ()
    assert not tracemalloc.is_tracing()


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((4,), ScalingError),
        ((), ScalingError),
        ((4, 4), ScalingError),
        (4, ScalingError),
        ("48", ScalingError),
        ((0, 4), SizeError),
        ((-4, 4), SizeError),
        ((4, True), SizeError),
        ((4, 8.0), SizeError),
        ((4, "8"), SizeError),
        ((4, None), SizeError),
        (None, ScalingError),
    ],
)
def test_bad_sizes_are_refused_before_anything_runs(sizes: Any, error: Any) -> None:
    def step(size: int) -> None:
        pytest.fail("it ran")

    with pytest.raises(error):
        umem.record_at(step, sizes)


def test_a_step_that_does_other_things_at_another_size_names_the_first() -> None:
    link = L.Linear(WIDTH, CLASSES)

    def step(size: int) -> None:
        x = np.ones((size, WIDTH), np.float32)
        y = F.relu(link(x)) if size < 6 else F.tanh(link(x))
        F.sum(y).backward()

    with pytest.raises(ScalingError) as caught:
        umem.record_at(step)
    said = str(caught.value)
    assert "operation 2 is 'ReLU' forward at size 4 and 'Tanh' forward at size 8" in said


@pytest.mark.thorough
def test_a_step_that_keeps_a_state_of_the_size_before_names_both_sizes() -> None:
    model = chainer.Sequential(L.LSTM(8, 8), L.Linear(8, 2))

    def keeping(size: int) -> None:
        y = model(np.ones((size, 8), np.float32))
        model.cleargrads()
        F.sum(y).backward()
        y.unchain_backward()

    with pytest.raises(ScalingError) as caught:
        umem.record_at(keeping)
    assert "ran at size 4 and fails at size 8, with TypeError" in str(caught.value)
    assert "reset_state()" in str(caught.value)

    def resetting(size: int) -> None:
        model[0].reset_state()
        keeping(size)

    assert umem.record_at(resetting).sizes == (4, 8)


@pytest.mark.parametrize("error", [MemoryError("no room"), umem.errors.StateError("not now")])
def test_an_error_that_has_its_own_handling_stays_what_it_is(error: Exception) -> None:
    step = mlp_step()

    def failing(size: int) -> None:
        if size > 4:
            raise error
        step(size)

    with pytest.raises(type(error)) as caught:
        umem.record_at(failing)
    assert caught.value is error


def test_a_step_that_does_not_use_its_size_is_refused() -> None:
    step = mlp_step()
    with pytest.raises(ScalingError, match="nothing of the step depends on the size: at 4 and 8"):
        umem.record_at(lambda size: step(4))


def test_a_step_with_as_many_operations_as_samples_is_refused() -> None:
    link = L.Linear(WIDTH, CLASSES)

    def step(size: int) -> None:
        rows = [link(np.ones((1, WIDTH), np.float32)) for _ in range(size)]
        F.sum(F.concat(rows, axis=0)).backward()

    with pytest.raises(ScalingError, match=r"operation 5 is 'Concat' forward at size 4"):
        umem.record_at(step)


def test_a_step_that_changes_from_call_to_call_is_refused() -> None:
    calls = 0

    def step(size: int) -> None:
        nonlocal calls
        calls += 1
        x = chainer.Variable(np.ones((size, 4), np.float32))
        F.sum(F.relu(x) if calls % 3 else x).backward()

    with pytest.raises(ScalingError, match="does not do the same twice at size 4"):
        umem.record_at(step)


def test_a_step_in_which_nothing_is_seen_says_what_to_import() -> None:
    with pytest.raises(ScalingError, match=r"import umem\.chainer"):
        umem.record_at(lambda size: np.ones(size).sum())


def test_a_step_on_the_arrays_of_a_virtual_gpu_is_recorded_too() -> None:
    with umem.virtual_gpu("t4") as gpu:

        def step(size: int) -> None:
            a = gpu.xp.ones((size, 1000), "float32")
            (a * 2).sum()

        trace = umem.record_at(step, sizes=(64, 128))
    tensors = 2 * 1000 * 4000
    assert tensors <= trace.at(1000).peak_bytes < tensors + 65536  # NumPy's buffers


# -- the page ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_code_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "predicting.md").read_text(encoding="utf-8")
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code, encoding="utf-8")
    assert printed_quietly(script, cwd=tmp_path) == expected
