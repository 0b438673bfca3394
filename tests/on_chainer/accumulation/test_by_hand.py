"""Backward by hand inside of ``accumulate(optimizer, steps=...)``: nothing can be compared."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer.functions as F
from accumulation_cases import KNOWN, Net, apart, gradients, labelled, optimizer_of, refused, some

from umem.errors import AccumulationError, AccumulationWarning

accumulate = umem.chainer.accumulate
pytestmark = pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
MEAN, VALID = KNOWN["mean"], KNOWN["valid labels"]
CUTS = (slice(0, 4), slice(4, 6), slice(6, 11))


def train(loss: Any, cuts: Any = CUTS, weight: Any = None, by: float = 1.0) -> tuple[Any, Any]:
    """Go backward by hand for each cut; returns the model and the optimizer."""
    net = Net(loss)
    optimizer = optimizer_of(net)
    x, t = some()
    parts = iter(cuts)
    now: list[Any] = []

    def weighed() -> Any:
        return weight(x[now[0]], t[now[0]])

    with accumulate(optimizer, steps=len(cuts), weight=weighed if callable(weight) else weight):
        for cut in parts:
            now[:] = [cut]
            net.cleargrads()
            loss_of_cut = net(x[cut], t[cut])
            (loss_of_cut if by == 1 else loss_of_cut * by).backward()
            optimizer.update()
    return net, optimizer


def apart_by_hand(loss: Any, **how: Any) -> float:
    plain = Net(loss)
    optimizer_of(plain).update(plain, *some())
    net, optimizer = train(loss, **how)
    assert optimizer.t == 1
    return apart(gradients(plain), gradients(net))


def test_a_weight_is_a_function_of_nothing() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / max(1, int((t >= 0).sum()))

    assert apart_by_hand(loss, weight=labelled) < 1e-13
    with pytest.raises(AccumulationError, match=r"'Sum' at \S+:\d+ .*weight=lambda: len\(x\)"):
        train(loss)


def test_a_call_of_0_adds_nothing() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / max(1, int((t >= 0).sum()))

    cuts = (slice(0, 4), slice(4, 5), slice(5, 11))
    assert some()[1][4] == -1 and apart_by_hand(loss, weight=labelled, cuts=cuts) < 1e-13


def test_a_penalty_counts_once() -> None:
    assert apart_by_hand(KNOWN["a mean and a penalty"]) < 1e-13


def test_terms_with_shares_that_go_apart_are_refused() -> None:
    with pytest.raises(
        AccumulationError, match="counts whose ratio differs between parts: give the"
    ):
        train(KNOWN["two means"])


def test_where_their_shares_are_the_same_they_are_not() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.mean(y**2) + 0.5 * F.softmax_cross_entropy(y, t, normalize=False)

    assert apart_by_hand(loss) < 1e-13


@pytest.mark.parametrize("name", ["mean", "valid labels", "a mean and a penalty"])
def test_the_habit_of_dividing_by_the_steps_is_refused_by_name(name: str) -> None:
    with pytest.raises(AccumulationError, match=r"as in PyTorch's loops with loss / steps"):
        train(KNOWN[name], by=1 / 3)
    train(KNOWN[name], by=1 / 4)


def test_it_is_so_where_backward_goes_several_times_before_an_update() -> None:
    net = Net(MEAN)
    x, t = some()
    with accumulate(optimizer := optimizer_of(net), steps=5):
        for cut in CUTS:
            (net(x[cut], t[cut]) / 3).backward()
        with pytest.raises(AccumulationError, match="as in PyTorch's loops"):
            optimizer.update()


def test_several_terms_of_single_rows_are_refused() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return sum(F.softmax_cross_entropy(y[i : i + 1], abs(t[i : i + 1])) for i in range(len(t)))

    with pytest.raises(AccumulationError, match="has a single row, and so has another term"):
        train(loss, (slice(0, 4), slice(4, 8)))
    assert apart_by_hand(loss, weight=1) < 1e-13


def test_a_number_that_goes_by_the_samples_is_refused() -> None:
    with pytest.raises(AccumulationError, match=r"computes with 0\.5 in one part and with 0\.25"):
        train(lambda net, y, t: F.mean(y**2) / len(t))


def test_padding_to_other_lengths_is_refused() -> None:
    with pytest.raises(AccumulationError, match="has other elements per sample in one call"):
        train(lambda net, y, t: F.mean(y[:, : len(t)] ** 2), (slice(0, 4), slice(4, 6)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, y, t: F.mean(y**2) + F.sum(net.second.W[t.clip(0)] ** 2),
        lambda net, y, t: F.mean(y**2) + F.sum((net.first.W - np.ones((8, 5))) ** 2),
        lambda net, y, t: F.mean(y**2) + F.sum(y**2),
        lambda net, y, t: F.sqrt(F.mean(y**2)),
    ],
)
def test_what_is_not_known_is_refused(loss: Any) -> None:
    with pytest.raises(AccumulationError, match=r" at \S+:\d+ does not end in a mean"):
        train(loss)


def test_functions_of_the_whole_batch_are_refused_at_their_call() -> None:
    with pytest.raises(AccumulationError, match="'DeCov' computes with all samples"):
        train(lambda net, y, t: F.mean(y) + F.decov(y))


def test_a_refusal_drops_the_group_and_the_next_begins_anew() -> None:
    net = Net(VALID)
    x, t = some()
    with accumulate(optimizer := optimizer_of(net), steps=2) as accumulated:
        for bad in (True, False):
            for cut in (slice(0, 4), slice(4, 11)):
                net.loss = (lambda net, y, t: F.sum(y)) if bad and cut.start else VALID
                net.cleargrads()
                net(x[cut], t[cut]).backward()
                if bad and cut.start:
                    with refused(optimizer, "'Sum' at"):
                        optimizer.update()
                    assert accumulated.count == 0
                else:
                    optimizer.update()
    plain = Net(VALID)
    optimizer_of(plain).update(plain, x, t)
    assert optimizer.t == 1 and apart(gradients(plain), gradients(net)) < 1e-13


def test_a_call_of_0_may_be_0_by_0() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / y.dtype.type((t >= 0).sum())

    cuts = (slice(0, 4), slice(4, 5), slice(5, 11))
    with np.errstate(all="ignore"):
        assert apart_by_hand(loss, weight=labelled, cuts=cuts) < 1e-13


def test_a_warning_that_is_an_error_drops_the_group() -> None:
    net = Net(VALID)
    x, t = some()
    with accumulate(optimizer := optimizer_of(net), steps=2) as accumulated:
        net(x, t).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with refused(optimizer, "backward is called by hand", AccumulationWarning):
                optimizer.update()
        for cut in (slice(0, 4), slice(4, 11)):
            net.cleargrads()
            net(x[cut], t[cut]).backward()
            optimizer.update()
    assert optimizer.t == 1 and accumulated.count == 0


def test_an_update_without_backward_is_refused() -> None:
    net = Net(MEAN)
    with accumulate(optimizer := optimizer_of(net), steps=2):
        with refused(optimizer, "no backward of this optimizer's model has run"):
            optimizer.update()


def test_a_dictionary_of_weights_is_refused() -> None:
    with pytest.raises(AccumulationError, match="weight= is a dictionary, but the loss is not"):
        train(MEAN, weight={"a": 1})


@pytest.mark.parametrize("value", [-1, np.nan, np.ones(2), "4"])
def test_a_weight_gives_one_number_of_0_or_more(value: Any) -> None:
    with pytest.raises(AccumulationError, match="weight= must give one number of 0 or more"):
        train(MEAN, weight=lambda x, t: value)
