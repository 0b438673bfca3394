"""`accumulate` and `AccumulatingUpdater`: parts of a batch give the gradient of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from accumulation_cases import (
    FULL,
    LOSSES,
    WEIGHTS,
    Net,
    apart,
    gradients,
    labelled,
    optimizer_of,
    parameters,
    samples,
    some,
    whole_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.errors import AccumulationError


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_give_the_gradient_of_the_whole(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, micro_batch=4, weight=WEIGHTS.get(name)):
        optimizer.update(net, *some())
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


@pytest.mark.parametrize("name", LOSSES)
def test_so_does_an_updater_in_single_precision_one_sample_at_a_time(name: str) -> None:
    net = Net(LOSSES[name], np.float32)
    rows = list(zip(*some(dtype=np.float32), strict=True))
    iterator = chainer.iterators.SerialIterator(rows, FULL, shuffle=False)
    weight = WEIGHTS.get(name)
    umem.chainer.AccumulatingUpdater(iterator, optimizer_of(net), 1, weight=weight).update()
    whole = whole_gradient(LOSSES[name], dtype=np.float32)
    assert apart(whole, gradients(net)) < 1e-5


def parts() -> Iterator[tuple[Any, Any]]:
    x, t = some()
    for part in (slice(0, 4), slice(4, 5), slice(5, 11)):
        yield x[part], t[part]


ALONE = {name for name in LOSSES if "two" not in name and "and a sum" not in name}
"""Losses that divide by one count, of which the total may be known in the end."""


@pytest.mark.parametrize("name", sorted(ALONE))
def test_three_calls_of_update_make_one_with_the_gradient_of_all(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, steps=3, weight=WEIGHTS.get(name)):
        for x, t in parts():
            optimizer.update(net, x, t)
    assert optimizer.t == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_what_divides_is_named_with_its_line_and_asked_for(name: str, size: int) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    told = r"the loss is divided by \d+ at accumulation_cases\.py:\d+.*weight=lambda x, t: len\(x\)"
    refused = pytest.raises(AccumulationError, match=told)
    with umem.chainer.accumulate(optimizer, micro_batch=size), refused:
        optimizer.update(net, *some())
    assert optimizer.t == 0


@pytest.mark.parametrize("name", ["valid labels", "mean", "sum", "mean of means"])
@pytest.mark.parametrize("clear_first", [True, False])
def test_so_do_calls_after_going_backward_by_hand(name: str, clear_first: bool) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, steps=3):
        for x, t in parts():
            if clear_first:
                net.cleargrads()
            loss = net(x, t)
            if not clear_first:
                net.cleargrads()
            loss.backward()
            optimizer.update()
    assert optimizer.t == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


def test_the_fault_of_2024_is_caught() -> None:
    """A weight by samples, where the loss was divided by valid labels."""
    net = Net(LOSSES["valid labels"])
    optimizer = optimizer_of(net)
    before = parameters(net)
    wrong = umem.chainer.accumulate(optimizer, micro_batch=4, weight=lambda x, t: len(x))
    told = r"'SoftmaxCrossEntropy' at .* was divided by \d and weight= says 4"
    with wrong, pytest.raises(AccumulationError, match=told.replace(" and", ", and")):
        optimizer.update(net, *some())
    assert optimizer.t == 0 and np.array_equal(before, parameters(net))


LEFT_OUT = "penalty", "two", "minus", "and a sum"
TERMS = [
    name
    for name in LOSSES
    if not any(word in name for word in LEFT_OUT) and WEIGHTS.get(name) is not labelled
]
"""Single terms that do not cancel each other."""
ADDED = st.lists(
    st.tuples(st.sampled_from(TERMS), st.sampled_from([1.0, 0.3, 2.0])), min_size=1, max_size=3
)


@pytest.mark.thorough
@settings(max_examples=25)
@given(ADDED, st.sampled_from([0.0, 0.1]), st.integers(1, 12), st.integers(0, 9))
def test_any_sum_of_losses_cut_anywhere(
    added: list[tuple[str, float]], penalty: float, size: int, seed: int
) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        total = sum(scale * LOSSES[name](net, y, t) for name, scale in added)
        return total + penalty * F.sum(net.first.W**2) if penalty else total

    draw = np.random.RandomState(seed)
    x, t = draw.randn(12, 5), draw.randint(-1, 4, 12).astype("i")
    t[0] = 1  # a weighted mean of nothing is nothing
    net, plain = Net(loss), Net(loss)
    optimizer_of(plain).update(plain, x, t)
    weight = samples if any(name in WEIGHTS for name, _ in added) else None
    with umem.chainer.accumulate(optimizer := optimizer_of(net), micro_batch=size, weight=weight):
        optimizer.update(net, x, t)
    assert apart(gradients(plain), gradients(net)) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_sample_alone_that_is_summed_and_not_counted(size: int) -> None:
    draw = np.random.RandomState(8)
    x, t = draw.randn(12, 5), draw.randint(-1, 4, 12).astype("i")
    assert (t == -1).sum() == 1 and t[0] >= 0
    loss = LOSSES["all by a count of labels"]
    for labels in (t, np.full_like(t, -1)):
        net, plain = Net(loss), Net(loss)
        optimizer_of(plain).update(plain, x, labels)
        optimizer = optimizer_of(net)
        with umem.chainer.accumulate(optimizer, micro_batch=size, weight=labelled):
            optimizer.update(net, x, labels)
        assert apart(gradients(plain), gradients(net)) < 1e-12
