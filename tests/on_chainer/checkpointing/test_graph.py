"""A checkpointed region in the graph: what it captures, and what it leaves."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from checkpoint_cases import agree, gradients, plain, variable
from recompute_cases import OldStyle
from traced_graphs import check

import umem
from umem.chainer import checkpoint, checkpoint_sequential
from umem.errors import StateError

pytestmark = pytest.mark.thorough

# -- what a region captures --------------------------------------------------------------------


def test_captured_variables_get_gradients_also_one_upstream_of_another() -> None:
    x, link = variable(4, 4), L.Linear(4, 4)

    def loss(call: Any) -> Any:
        a = F.tanh(link(x))
        b = F.exp(a)
        y = call(lambda x: link(x * a) + b * a, x)
        return F.sum(call(lambda: y * link(a * b)))

    agree(loss, link.W, link.b)

    def beside(call: Any) -> Any:
        a = F.tanh(link(x))
        y = call(lambda x: link(x * a) + F.exp(a) * a, x)
        return F.sum(y * a) + F.sum(call(lambda: a * a * x))

    for expected, found in zip(*gradients(beside, x, link.W, link.b), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_argument_may_be_captured_as_well() -> None:
    x = variable(4)
    agree(lambda call: F.sum(call(lambda v: F.tanh(v) * x, x)), x)


def test_inner_parameters_and_inputs_can_be_asked_for() -> None:
    link, x = L.Linear(4, 4), variable(3, 4)

    def asked(call: Any) -> list[Any]:
        h = F.tanh(x)
        y = F.sum(call(lambda h: F.tanh(link(h)), h))
        return [g.array for g in chainer.grad([y], [link.W, h, x, link.b])]

    for expected, found in zip(asked(plain), asked(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert x.grad is None


def test_a_gradient_that_is_not_asked_for_is_not_computed() -> None:
    link, x = L.Linear(4, 4), variable(3, 4)
    asked: list[tuple[int, ...]] = []

    class Watch(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
        def forward(self, inputs: Any) -> Any:
            return (inputs[0] + inputs[1],)

        def backward(self, indexes: Any, grads: Any) -> Any:
            asked.append(indexes)
            return grads[0], grads[0]

    y = checkpoint(lambda x: Watch().apply((x, link(x)))[0], x)
    chainer.grad([F.sum(y)], [link.W])
    assert asked == [(1,)]


def test_retain_grad_keeps_the_gradients_around_a_region() -> None:
    def retained(call: Any) -> list[Any]:
        x = variable(4)
        h = F.tanh(x)
        y = call(lambda h: F.exp(F.tanh(h)), h)
        F.sum(y * y).backward(retain_grad=True)
        return [x.grad, h.grad, y.grad]

    for expected, found in zip(retained(plain), retained(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_unchaining_cuts_at_a_region_as_at_a_function() -> None:
    x = variable(4)
    h = checkpoint(F.tanh, x)
    y = F.sum(checkpoint(lambda h: F.exp(F.sin(h)), h))
    h.unchain()
    y.backward()
    assert h.grad is not None and x.grad is None
    node = weakref.ref(y.creator_node)
    y.unchain_backward()
    assert y.creator_node is None and node() is None


def test_second_derivatives_are_those_of_the_plain_run() -> None:
    net = chainer.Sequential(L.Linear(5, 6), F.tanh, L.Linear(6, 3))
    x = variable(4, 5)

    def penalty(call: Any) -> Any:
        h = F.sin(x)
        y = call(lambda h: call(net, h) * F.sum(h), h)
        (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
        return F.sum(y) + F.mean(gx * gx)

    found = []
    for call in (plain, checkpoint):
        net.cleargrads()
        x.cleargrad()
        loss = penalty(call)
        loss.backward()
        found.append([loss.array, x.grad, *(p.grad for _, p in sorted(net.namedparams()))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_a_gradient_penalty_inside_a_region_is_equal_bit_for_bit() -> None:
    link, x = L.Linear(5, 3), variable(4, 5)

    def region(x: Any) -> Any:
        h = F.dropout(F.tanh(link(x)))
        (gx,) = chainer.grad([h], [x], enable_double_backprop=True)
        return F.sum(gx * gx) + F.sum(h)

    agree(lambda call: call(region, F.sin(x)), x, link.W, link.b)


def test_second_derivatives_of_an_old_style_function_say_so() -> None:
    x = variable(3)
    y = checkpoint(lambda x: OldStyle()(F.tanh(x)), x)
    (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
    with pytest.raises(RuntimeError, match="twice-differentiate an old style Function"):
        chainer.grad([gx * gx], [x])


def test_forget_and_checkpoint_nest_either_way() -> None:
    link, x = L.Linear(4, 4), variable(3, 4)
    forget = {plain: plain, checkpoint: F.forget}
    inner = lambda x: F.tanh(link(x))  # noqa: E731
    agree(lambda call: F.sum(forget[call](lambda x: call(inner, F.sin(x)), x)), x, link.W)
    agree(lambda call: F.sum(call(lambda x: forget[call](inner, F.sin(x)), x)), x, link.W)


def test_function_hooks_of_the_user_fire_in_both_runs() -> None:
    x = variable(4)
    with chainer.function_hooks.TimerHook() as timer:
        y = F.sum(checkpoint(lambda x: F.exp(F.tanh(x)), x))
        assert [name for name, _ in timer.call_history] == ["Tanh", "Exp", "Checkpoint", "Sum"]
        y.backward()
    names = [name for name, _ in timer.call_history[4:]]
    assert names.count("Tanh") == names.count("Exp") == 2 and names.count("Checkpoint") == 1
    assert not chainer.get_function_hooks()


# -- what a region leaves ----------------------------------------------------------------------


def test_the_graph_dies_when_the_loss_does() -> None:
    link, x = L.Linear(4, 4), variable(3, 4)
    made: list[Any] = []

    def region(x: Any) -> Any:
        h = F.dropout(F.tanh(link(x)))
        made.append(weakref.ref(h.node))
        return F.exp(h)

    gc.disable()
    try:
        outer = lambda x: F.sin(checkpoint(region, x))  # noqa: E731
        y = checkpoint(outer, x)
        assert made[0]() is None  # after the first run
        loss = F.sum(y)
        left = [weakref.ref(y.creator_node), weakref.ref(outer)]
        loss.backward()
        assert len(made) == 3 and all(ref() is None for ref in made)
        del y, loss, outer
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


@pytest.fixture
def _traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def deep_net() -> tuple[Any, Any]:
    steps = [step for _ in range(64) for step in (L.Bias(shape=(32,)), F.tanh)]
    return chainer.Sequential(*steps), variable(1024, 32)


def peak_of(run: Callable[[], Any]) -> int:
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    run()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.usefixtures("_traced")
def test_the_peak_of_a_deep_net_is_below_two_fifths_of_the_plain_one() -> None:
    net, x = deep_net()
    net.cleargrads()
    expected = peak_of(lambda: F.sum(net(x)).backward())
    for segments in (None, 8):
        net.cleargrads()
        peak = peak_of(lambda n=segments: F.sum(checkpoint_sequential(net, x, n)).backward())  # type: ignore[misc]
        assert peak < 0.4 * expected
    net.cleargrads()
    whole = peak_of(lambda: F.sum(checkpoint(halves, list(net), x)).backward())
    assert whole < 0.4 * expected


def halves(net: Any, x: Any) -> Any:
    """Regions in regions: the depth of the tree of regions bounds the peak."""
    if len(net) <= 4:
        return chainer.Sequential(*net)(x)
    middle = len(net) // 2
    return checkpoint(halves, net[middle:], checkpoint(halves, net[:middle], x))


@pytest.mark.usefixtures("_traced")
def test_state_left_on_a_link_does_not_keep_the_graph_of_either_run() -> None:
    link, cell, x = L.Bias(shape=(4,)), L.LSTM(4, 4), variable(20000, 4)

    def region(x: Any) -> Any:
        cell.reset_state()
        for _ in range(20):
            x = F.tanh(link(x))
        return F.sum(cell(x))

    before = tracemalloc.get_traced_memory()[0]
    y = checkpoint(region, x)
    array = x.array.nbytes
    assert tracemalloc.get_traced_memory()[0] - before < 5 * array
    y.backward()
    assert tracemalloc.get_traced_memory()[0] - before < 5 * array


@pytest.mark.usefixtures("_traced")
def test_memory_falls_region_by_region_during_backward() -> None:
    net, x = deep_net()
    net.cleargrads()
    sizes: list[int] = []

    class Sizes(chainer.FunctionHook):  # type: ignore[misc, unused-ignore]
        name = "sizes"

        def backward_postprocess(self, function: Any, in_data: Any, grads: Any) -> None:
            if type(function).__name__ == "Checkpoint":
                sizes.append(tracemalloc.get_traced_memory()[0])

    y = F.sum(checkpoint_sequential(net, x, 8))
    before = tracemalloc.get_traced_memory()[0]
    with Sizes():
        y.backward()
    assert len(sizes) == 8 and max(sizes) - before < 6 * x.array.nbytes


def test_a_variable_that_was_not_returned_can_be_read_but_not_differentiated() -> None:
    x, kept = variable(4), []

    def region(x: Any) -> Any:
        kept.append(F.tanh(x))
        return F.exp(kept[-1])

    y = checkpoint(region, x)
    np.testing.assert_array_equal(kept[0].array, np.tanh(x.array))
    for loss in (F.sum(y) + F.sum(kept[0]), F.sum(checkpoint(lambda: F.sin(kept[0])))):
        for backward in (loss.backward, lambda v=loss: chainer.grad([v], [x])):  # type: ignore[misc]
            with pytest.raises(StateError, match=r"did not return.*return it from the region"):
                backward()
    F.sum(y).backward()
    with pytest.raises(StateError, match="did not return"):
        F.sum(kept[1]).backward()


# -- under umem --------------------------------------------------------------------------------


def test_inside_a_virtual_gpu_less_memory_is_enough() -> None:
    net, x = deep_net()
    with umem.virtual_gpu("v100-16gb", vram="8MiB"):
        net.cleargrads()
        with pytest.raises(umem.errors.OutOfMemoryError):
            F.sum(net(x)).backward()
        net.cleargrads()
        gc.collect()
        F.sum(checkpoint_sequential(net, x)).backward()
    found = [p.grad.copy() for p in net.params()]
    net.cleargrads()
    F.sum(net(x)).backward()
    for p, grad in zip(net.params(), found, strict=True):
        np.testing.assert_array_equal(p.grad, grad)


def test_a_recorded_trace_is_valid_and_its_peak_falls() -> None:
    net, x = deep_net()
    peaks = []
    for run in (net, lambda x: checkpoint_sequential(net, x)):
        net.cleargrads()
        with umem.record() as recorder:
            F.sum(run(x)).backward()
        peaks.append(check(recorder.trace).peak_bytes)
    assert peaks[1] < 0.4 * peaks[0]
