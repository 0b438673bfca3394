"""`accumulate` and `AccumulatingUpdater`: parts of a batch give the gradient of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from accumulation_cases import (
    FULL,
    KNOWN,
    LOSSES,
    SAID,
    WEIGHTS,
    Net,
    apart,
    gradients,
    of_net,
    optimizer_of,
    refuse,
    some,
    whole_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.errors import AccumulationWarning


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_give_the_gradient_of_the_whole(name: str, size: int) -> None:
    assert of_net(LOSSES[name], micro_batch=size, weight=WEIGHTS.get(name)) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", SAID)
def test_what_umem_does_not_know_is_refused_with_its_line_and_weight(name: str, size: int) -> None:
    if name == "one by one":
        told = "the loss has the terms"
    else:
        told = r"term '.+' at accumulation_cases\.py:\d+ does not.*weight=lambda x, t: len\(x\)"
    refuse(LOSSES[name], told, micro_batch=size)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
def test_an_updater_does_so_in_single_precision_one_sample_at_a_time(name: str) -> None:
    net = Net(LOSSES[name], np.float32)
    rows = list(zip(*some(dtype=np.float32), strict=True))
    iterator = chainer.iterators.SerialIterator(rows, FULL, shuffle=False)
    weight = WEIGHTS.get(name)
    umem.chainer.AccumulatingUpdater(iterator, optimizer_of(net), 1, weight=weight).update()
    whole = whole_gradient(LOSSES[name], dtype=np.float32)
    assert apart(whole, gradients(net)) < 1e-5


COUNTS_APART = {"two means", "two counts and a penalty", "a mean and a sum", *(
    name for name in SAID if "a penalty for" in name or "of rows" in name
)}  # fmt: skip
CUTS = (slice(0, 4), slice(4, 5), slice(5, 11))


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - COUNTS_APART))
def test_three_calls_of_update_make_one_with_the_gradient_of_all(name: str) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    x, t = some()
    with umem.chainer.accumulate(optimizer, steps=3, weight=WEIGHTS.get(name)):
        for cut in CUTS:
            optimizer.update(net, x[cut], t[cut])
    assert optimizer.t == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


@pytest.mark.parametrize("name", ["valid labels", "hinge", "mean of means", "sum"])
@pytest.mark.parametrize("clear_first", [True, False])
def test_so_do_calls_after_going_backward_by_hand(name: str, clear_first: bool) -> None:
    net = Net(LOSSES[name])
    optimizer = optimizer_of(net)
    x, t = some()
    with (
        umem.chainer.accumulate(optimizer, steps=3, weight=WEIGHTS.get(name)),
        pytest.warns(AccumulationWarning, match="backward is called by hand") as warned,
    ):
        for cut in CUTS:
            if clear_first:
                net.cleargrads()
            loss = net(x[cut], t[cut])
            if not clear_first:
                net.cleargrads()
            loss.backward()
            optimizer.update()
    assert optimizer.t == 1 and len(warned) == 1
    assert apart(whole_gradient(LOSSES[name]), gradients(net)) < 1e-13


ADDED = st.lists(
    st.tuples(
        st.sampled_from([name for name in KNOWN if "hinge" not in name and "minus" not in name]),
        st.sampled_from([1.0, 0.3, 2.0]),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.thorough
@settings(max_examples=25)
@given(ADDED, st.sampled_from([0.0, 0.1]), st.integers(1, 12), st.integers(0, 9))
def test_any_sum_of_losses_cut_anywhere(
    added: list[tuple[str, float]], penalty: float, size: int, seed: int
) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        total = sum(scale * KNOWN[name](net, y, t) for name, scale in added)
        return total + penalty * F.sum(net.first.W**2) if penalty else total

    draw = np.random.RandomState(seed)
    x, t = draw.randn(12, 5), draw.randint(-1, 4, 12).astype("i")
    t[0] = 1  # a weighted mean of nothing is nothing
    assert of_net(loss, (x, t), micro_batch=size) < 1e-12
