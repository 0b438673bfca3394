"""The comparison: three samples at once with two and one, in the first update and at new terms."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import (
    FULL,
    KNOWN,
    Net,
    apart,
    gradients,
    of_net,
    optimizer_of,
    parameters,
    refuse,
    refused,
    samples,
    some,
)

from umem.errors import AccumulationError, AccumulationWarning

MEAN = KNOWN["mean"]
accumulate = umem.chainer.accumulate


def mixing(net: Any, y: Any, t: Any) -> Any:
    return F.mean(F.softmax(y, axis=0) ** 2)


def update(net: Any, **options: Any) -> Any:
    """One update in micro-batches; returns the optimizer."""
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4, **options):
        optimizer.update(net, *some())
    return optimizer


# -- what it leaves --------------------------------------------------------------------------------


class Counting(Net):
    """Draws and keeps things from call to call."""

    def __init__(self) -> None:
        super().__init__(KNOWN["two means"], ratio=0.3)
        self.calls, self.last = 0, None

    def __call__(self, x: Any, t: Any) -> Any:
        self.calls, self.last = self.calls + 1, x
        return super().__call__(x, t)


def test_the_comparison_leaves_no_trace() -> None:
    found = []
    for check in (True, False):
        net = Counting()
        np.random.seed(3)
        random.seed(3)
        optimizer = update(net, check=check)
        found.append((net.calls, float(net.seen), optimizer.t, np.random.rand(), random.random()))
        found[-1] += (gradients(net).tobytes(), parameters(net).tobytes())
    assert found[0] == found[1]
    assert found[0][:3] == (3, FULL, 1)


def sizes_of(*losses: Any, **how: Any) -> list[list[int]]:
    """How many samples each call of the loss function is given, update by update."""
    net = Net(MEAN)
    optimizer, calls, found = optimizer_of(net), [], []
    with accumulate(optimizer, **({"micro_batch": 4} | how)):
        for loss in losses:
            net.loss = lambda net, y, t, loss=loss: (calls.append(len(y)), loss(net, y, t))[1]
            optimizer.update(net, *some())
            found.append(calls[:])
            calls.clear()
    return found


PARTS, COMPARED = [4, 4, 3], [3, 2, 1, 3, 1, 1, 1, 3, 1, 2]


def test_it_is_done_in_the_first_update_and_where_terms_are_new() -> None:
    def both(net: Any, y: Any, t: Any) -> Any:
        return MEAN(net, y, t) + 0.5 * F.mean_absolute_error(y, y.array * 2)

    found = sizes_of(MEAN, MEAN, both, both, MEAN)
    assert found == [PARTS + COMPARED * 3, PARTS, PARTS + COMPARED, PARTS, PARTS]
    assert sizes_of(MEAN, both, check=False) == [PARTS, PARTS]


@pytest.mark.parametrize("weight", [None, 1])
def test_a_term_that_mixes_samples_and_comes_later_is_refused(weight: Any) -> None:
    kind = F.sum if weight else F.mean
    net = Net(lambda net, y, t: kind(y**2))
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4, weight=weight):
        optimizer.update(net, *some())
        net.loss = lambda net, y, t: kind(y**2) + kind(F.softmax(y, axis=0) ** 2)
        with refused(optimizer, "of its norm from"):
            optimizer.update(net, *some())


def test_three_samples_are_spread_over_the_batch() -> None:
    net, seen = Net(MEAN), []
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=10):
        optimizer.update(
            lambda at, x: (seen.append(at.tolist()), F.mean(net.first(x)))[1],
            np.arange(30), some(30)[0],
        )  # fmt: skip
    assert seen[3:6] == [[0, 14, 29], [0, 14], [29]]


def test_a_batch_that_is_one_part_is_not_compared() -> None:
    assert sizes_of(MEAN, micro_batch=100) == [[FULL]]


def test_a_batch_of_two_samples_is_compared_with_one_and_one() -> None:
    x, t = some(2)
    assert of_net(MEAN, (x, t), micro_batch=1) < 1e-13
    refuse(mixing, "of its norm from", (x, t), micro_batch=1)


def test_parameters_that_get_their_arrays_in_the_first_pass_are_compared_after_it() -> None:
    net = chainer.Sequential(L.Linear(None, 8), F.tanh, L.Linear(None, 4))
    optimizer = optimizer_of(net)
    x, t = some(dtype=np.float32)
    with accumulate(optimizer, micro_batch=4):
        optimizer.update(lambda x, t: F.softmax_cross_entropy(net(x), t), x, t)
    assert optimizer.t == 1
    lazy = chainer.Sequential(L.Linear(None, 8), lambda x: F.normalize(x, axis=0))
    optimizer = optimizer_of(lazy)
    with accumulate(optimizer, micro_batch=4), pytest.raises(AccumulationError):
        optimizer.update(lambda x: F.mean(lazy(x) ** 3), x)
    assert optimizer.t == 0 and lazy[0].W.array is None


# -- when it waits ---------------------------------------------------------------------------------


def mixing_labels(net: Any, y: Any, t: Any) -> Any:
    return F.softmax_cross_entropy(F.softmax(y, axis=0) * 9, t)


def infinite(net: Any, y: Any, t: Any) -> Any:
    return F.mean(y**2) * np.float64("inf")


def test_a_gradient_that_is_not_finite_waits_for_the_next_update() -> None:
    net = Net(infinite)
    optimizer = optimizer_of(net, lambda: chainer.optimizers.SGD(0))
    with accumulate(optimizer, micro_batch=4), np.errstate(all="ignore"):
        optimizer.update(net, *some())
        for parameter in net.params():
            parameter.array[...] = 0.1 + np.arange(parameter.size).reshape(parameter.shape) / 50
        net.loss = mixing
        with refused(optimizer, "of its norm from"):
            optimizer.update(net, *some())
    assert optimizer.t == 1


def test_so_does_a_batch_in_which_nothing_is_counted() -> None:
    x, t = some(16)
    refuse(mixing_labels, "of its norm from", (x, np.full_like(t, -1)), (x, t))


def test_other_threes_are_tried_where_few_samples_have_a_gradient() -> None:
    x, t = some(40)
    t[:] = -1
    t[17] = t[30] = 2
    assert of_net(KNOWN["valid labels"], (x, t), micro_batch=4) < 1e-12
    refuse(mixing_labels, "of its norm from", (x, t))


def test_where_none_has_a_gradient_it_is_refused() -> None:
    told = "9 times up to 3 samples of the batch show no gradient.*check=False"
    refuse(lambda net, y, t: F.mean(y * 0), told, some(40))
    assert of_net(lambda net, y, t: F.mean(y * 0), micro_batch=4, check=False) == 0


def test_a_mixture_that_one_three_does_not_show_is_found_by_others() -> None:
    x, _ = some(40)

    def saturated(net: Any, y: Any, t: Any) -> Any:
        """The samples at which the first comparison looks attend to themselves alone."""
        scale = np.where(np.isin(t, [0, 19, 20, 39]), 1e4, 0.0)
        scores = F.matmul(y, y, transb=True) + np.diag(scale)
        return F.mean(F.matmul(F.softmax(scores), y) ** 2)

    refuse(saturated, "of its norm from", (x, np.arange(40)))


# -- dropout and other random numbers --------------------------------------------------------------


def test_dropout_passes_its_input_through_there() -> None:
    net = Net(MEAN, ratio=0.4)
    assert update(net).t == 1


def test_each_part_draws_its_own_masks() -> None:
    net, plain = Net(MEAN, ratio=0.4), Net(MEAN, ratio=0.4)
    np.random.seed(7)
    update(net)
    np.random.seed(7)
    x, t = some()
    total = 0.0
    for part in (slice(0, 4), slice(4, 8), slice(8, 11)):
        plain.cleargrads()
        plain(x[part], t[part]).backward()
        total = total + gradients(plain) * (part.stop - part.start) / FULL
    assert apart(total, gradients(net)) < 1e-13


@pytest.mark.parametrize("value", ["batch", "micro"])
def test_dropout_is_no_argument(value: str) -> None:
    net = Net(MEAN)
    with pytest.raises(TypeError, match="dropout"):
        accumulate(optimizer_of(net), micro_batch=4, dropout=value)
    with pytest.raises(TypeError, match="dropout"):
        iterator = chainer.iterators.SerialIterator([*some()], 1)
        umem.chainer.AccumulatingUpdater(iterator, optimizer_of(net), 4, dropout=value)


def raising(net: Any, y: Any, t: Any) -> Any:
    if len(y) < 3:
        raise ValueError("too few")
    return MEAN(net, y, t)


NOT_COMPARED: dict[str, tuple[Any, str]] = {
    "rrelu": (lambda net, y, t: F.mean(F.rrelu(y)), "a function other than dropout draws"),
    "numpy": (lambda net, y, t: F.mean(y * np.random.rand(*y.shape)), "a function other than drop"),
    "python": (
        lambda net, y, t: F.mean(y) + random.random(),
        "a function other than dropout draws",
    ),
    "raising": (raising, r"raised ValueError for 3 samples \(too few\)"),
}


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"steps": 1}])
@pytest.mark.parametrize("name", NOT_COMPARED)
def test_what_cannot_be_compared_is_said_once(name: str, how: Any) -> None:
    loss, told = NOT_COMPARED[name]
    net = Net(loss)
    optimizer = optimizer_of(net)
    with accumulate(optimizer, **how), pytest.warns(AccumulationWarning, match=told) as warned:
        for _ in range(2):
            optimizer.update(net, *some())
    assert optimizer.t == 2 and len(warned) == 1


@pytest.mark.filterwarnings("error::umem.errors.AccumulationWarning")
def test_that_is_raised_where_warnings_are_errors() -> None:
    net = Net(NOT_COMPARED["numpy"][0])
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4):
        with refused(optimizer, "a function other than dropout", AccumulationWarning):
            optimizer.update(net, *some())


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
def test_then_only_what_is_known_or_said_goes_on() -> None:
    loss = lambda net, y, t: F.sum(F.rrelu(y, 0.1, 0.1 + 1e-12))  # noqa: E731
    refuse(loss, r"'Sum' at .* does not end in a mean")
    assert of_net(loss, micro_batch=4, weight=1) < 1e-10


def test_one_sample_a_call_is_compared_in_the_end_of_the_group() -> None:
    def mixed(net: Any, y: Any, t: Any) -> Any:
        return F.mean(F.softmax(y, axis=0) ** 2)

    x, t = some()
    for loss, told in ((MEAN, None), (mixed, "of its norm from")):
        net = Net(loss)
        with accumulate(optimizer := optimizer_of(net), steps=FULL):
            for at in range(FULL - 1):
                optimizer.update(net, x[at : at + 1], t[at : at + 1])
            with nullcontext() if told is None else pytest.raises(AccumulationError, match=told):
                optimizer.update(net, x[-1:], t[-1:])
        assert optimizer.t == (told is None)


def test_samples_that_cannot_be_put_together_are_said() -> None:
    net = Net(MEAN)
    x, t = some()
    with (
        accumulate(optimizer := optimizer_of(net), steps=2),
        pytest.warns(AccumulationWarning, match="update is given one sample a call"),
    ):
        optimizer.update(net, x[:1], t[:1])
        optimizer.update(net, x=x[1:2], t=t[1:2])
    assert optimizer.t == 1


def test_an_interrupt_in_the_comparison_is_raised() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        if len(y) == 2:
            raise KeyboardInterrupt
        return MEAN(net, y, t)

    net = Net(loss)
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4), refused(optimizer, "^$", KeyboardInterrupt):
        optimizer.update(net, *some())


# -- functions that umem does not know -------------------------------------------------------------


class OwnLoss(chainer.FunctionNode):
    """A mean that umem does not know."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        return (inputs[0].mean(keepdims=True).reshape(()),)

    def backward(self, indexes: Any, gys: Any) -> Any:
        (x,) = self.get_retained_inputs()
        return (F.broadcast_to(gys[0] / x.size, x.shape),)


def test_an_own_function_is_named_and_exact_with_a_weight() -> None:
    own = lambda net, y, t: OwnLoss().apply((y,))[0]  # noqa: E731
    refuse(own, r"'OwnLoss' at \S+:\d+ does not end in a mean. Pass weight=")
    assert of_net(own, micro_batch=4, weight=samples) < 1e-13
