"""What ``weight=`` says a loss was divided by: of all of it, of its unknown terms, or by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import (
    KNOWN,
    SAID,
    Net,
    apart,
    gradients,
    labelled,
    of_net,
    optimizer_of,
    refuse,
    refused,
    samples,
    some,
    valid,
)

from umem.errors import AccumulationError, UnsupportedError

accumulate = umem.chainer.accumulate
MEAN = KNOWN["mean"]


def by_labels(net: Any, y: Any, t: Any) -> Any:
    return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / valid(t)


# -- what it may be --------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["4", True, np.nan, np.ones(3), [1], 0, 2, 1 / 3, {"a": None}])
def test_a_weight_is_a_function_or_1_or_a_dictionary_of_these(weight: Any) -> None:
    optimizer = optimizer_of(Net(MEAN))
    for how in ({"steps": 4}, {"micro_batch": 4}):
        with pytest.raises(UnsupportedError, match="weight= must be a function that returns"):
            accumulate(optimizer, weight=weight, **how)


@pytest.mark.parametrize("value", [-1, np.nan, np.inf, "4", None, np.ones(3), [1], {"a": 1}])
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"steps": 2}])
def test_it_gives_one_number_of_0_or_more(value: Any, how: Any) -> None:
    told = r"weight= must give one number of 0 or more, not"
    refuse(SAID["sum"][1], told, weight=lambda x, t: value, ratio=0.3, **how)


@pytest.mark.parametrize(
    "number", [np.float32, np.int64, np.array, lambda n: chainer.Variable(np.array(n, "f"))]
)
def test_that_may_be_a_number_of_numpys_or_a_variable(number: Any) -> None:
    weight = lambda x, t: number(len(x))  # noqa: E731
    assert of_net(SAID["sum by number"][1], micro_batch=4, weight=weight) < 1e-13


def test_what_it_raises_is_raised() -> None:
    net = Net(MEAN)
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4, weight=lambda x: len(x)):
        with refused(optimizer, "positional argument", TypeError):
            optimizer.update(net, *some())


def test_it_is_given_the_parts_arguments_by_their_names() -> None:
    net, plain = Net(MEAN), Net(MEAN)
    x, t = some()

    def loss(net: Any, x: Any, *, t: Any, scale: float) -> Any:
        return scale * F.sum(net.first(x)) / len(t)

    optimizer_of(plain).update(lambda x, **k: loss(plain, x, **k), x, t=t, scale=2.0)
    with accumulate(
        optimizer := optimizer_of(net), micro_batch=4, weight=lambda x, *, t, scale: scale * len(t)
    ):
        optimizer.update(lambda x, **k: loss(net, x, **k), x, t=t, scale=2.0)
    assert apart(gradients(plain.first), gradients(net.first)) < 1e-13


# -- of which terms it speaks ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_beside_known_terms_it_is_about_the_others(size: int) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(y, t) + F.sum(y**2) / len(y) + F.sum(net.first.W**2)

    assert of_net(loss, micro_batch=size, weight=samples) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
def test_where_all_terms_are_known_it_is_about_all_of_them(size: int) -> None:
    def total(net: Any, y: Any, t: Any) -> Any:
        return sum(F.mean(y[i] ** 2) for i in range(len(t)))

    def mean(net: Any, y: Any, t: Any) -> Any:
        return total(net, y, t) / len(t) + F.sum(net.first.W**2)

    assert of_net(total, micro_batch=size, weight=1) < 1e-13
    assert of_net(mean, micro_batch=size, weight=samples) < 1e-13


@pytest.mark.parametrize("weight", [samples, 1, lambda x, t: len(x) ** 2])
@pytest.mark.parametrize("size", [1, 4])
def test_it_may_not_contradict_divisors_that_add_up(weight: Any, size: int) -> None:
    """The fault of 2024: a weight by samples, where the loss was divided by valid labels."""
    told = "leave it out, the divisor is known|add up|of its norm from|for its parts together"
    refuse(KNOWN["valid labels"], told, micro_batch=size, weight=weight, ratio=0.3)


@pytest.mark.parametrize("name", ["valid labels", "mean"])
def test_it_may_say_what_is_known(name: str) -> None:
    weight = {"mean": samples, "valid labels": labelled}[name]
    assert of_net(KNOWN[name], micro_batch=4, weight=weight) < 1e-13


def test_it_may_not_come_to_contradict_them() -> None:
    x, t = some(12)
    few = np.where(np.arange(12) < 3, -1, 1).astype("i")
    told = "leave it out, the divisor is known"
    refuse(KNOWN["valid labels"], told, (x, t.clip(0)), (x, few), weight=samples)


def test_it_is_refused_where_the_loss_is_divided_by_something_else() -> None:
    told = "weight= does not give the loss's divisor"
    refuse(SAID["sum"][1], told, weight=samples)
    refuse(lambda net, y, t: F.sqrt(F.mean(y**2)), told, weight=samples)
    refuse(lambda net, y, t: F.sum(y**2) / len(y) ** 2, told, weight=samples)


@pytest.mark.parametrize("weight", [1, samples, labelled])
def test_one_weight_does_not_stand_for_two_divisors(weight: Any) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(y**2) / len(t) + F.sum(y[:, 0] * (t >= 0)) / valid(t)

    refuse(loss, "of its norm from|weight= gives 0 for some samples", weight=weight)


# -- counts of nothing -----------------------------------------------------------------------------

X, T = some(16)
NONE, ONE_EACH = np.full_like(T, -1), np.where(np.arange(16) % 4, -1, 1).astype("i")


@pytest.mark.thorough
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"micro_batch": 1}, {"steps": 1}])
@pytest.mark.parametrize("labels", [[T, NONE, T], [NONE, T], [ONE_EACH], [NONE]])
def test_a_part_of_0_adds_nothing(labels: Any, how: Any) -> None:
    assert of_net(by_labels, *[(X, t) for t in labels], weight=labelled, **how) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
def test_where_all_parts_are_0_the_gradient_is_that_of_the_program(size: int) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(y**2) / valid(t)

    assert of_net(loss, (X, NONE), micro_batch=size, weight=labelled) < 1e-13
    refuse(loss, "weight= gives 0 for some samples, whose loss is", (X, T), weight=labelled,
           micro_batch=size)  # fmt: skip


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"steps": 2}])
@pytest.mark.parametrize("loss", [MEAN, SAID["sum by number"][1]])
def test_0_everywhere_is_refused_where_the_loss_is_divided(loss: Any, how: Any) -> None:
    net, plain = Net(loss), Net(loss)
    optimizer_of(plain).update(plain, X, T)
    optimizer = optimizer_of(net)
    try:
        with accumulate(optimizer, weight=lambda x, t: 0, **how):
            for cut in np.split(np.arange(16), 2) if "steps" in how else [np.arange(16)]:
                optimizer.update(net, X[cut], T[cut])
    except AccumulationError:
        return
    assert apart(gradients(plain), gradients(net)) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
def test_a_part_of_0_may_have_no_terms(size: int) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        if (t >= 0).any():
            return by_labels(net, y, t)
        return chainer.Variable(np.zeros(()), requires_grad=False)

    assert of_net(loss, (X, T), micro_batch=size, weight=labelled) < 1e-13
    refuse(loss, "the loss has no terms.*give 0 for them", (X, T), micro_batch=1, weight=samples)


def test_a_part_of_0_may_be_0_by_0() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / y.dtype.type((t >= 0).sum())

    with np.errstate(all="ignore"):
        assert of_net(loss, (X, T), micro_batch=1, weight=labelled) < 1e-13


def test_a_part_of_0_may_have_another_term() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.mean(y[t >= 0] ** 2) if (t >= 0).any() else F.sum(y[:0])

    assert of_net(loss, (X, T), micro_batch=2, weight=labelled) < 1e-12


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_it_must_add_up_over_the_parts_of_the_batch(size: int, check: bool) -> None:
    told = "gives [0-9]+ for the batch, and [0-9]+ for its parts|do not add up"
    few = np.where(np.arange(16) < 5, -1, 1).astype("i")
    weight = lambda x, t: valid(t)  # noqa: E731
    refuse(by_labels, told, (X, few), weight=weight, check=check, micro_batch=size)


def test_with_steps_it_must_add_up_in_the_comparison() -> None:
    few = np.where(np.arange(16) < 9, -1, 1).astype("i")
    weight = lambda x, t: valid(t)  # noqa: E731
    refuse(by_labels, "do not add up|for its parts", (X, few), weight=weight, steps=2)


def test_so_it_must_in_later_calls() -> None:
    net = Net(by_labels)
    optimizer = optimizer_of(net)
    with accumulate(optimizer, steps=2, weight=lambda x, t: valid(t)):
        optimizer.update(net, X, T.clip(0))
        with refused(optimizer, "adds? up"):
            optimizer.update(net, X, NONE)


# -- a dictionary of terms -------------------------------------------------------------------------


class Terms(Net):
    """A network whose loss function returns a dictionary of terms."""

    def __init__(self, **terms: Any) -> None:
        super().__init__(lambda net, y, t: {name: term(net, y, t) for name, term in terms.items()})

    def __call__(self, x: Any, t: Any) -> Any:
        self.seen += len(x)
        return self.loss(self, self.second(F.tanh(self.first(x))), t)


def rows(net: Any, y: Any, t: Any) -> Any:
    return F.sum(y**2) / len(y)


def total(net: Any, y: Any, t: Any) -> Any:
    return F.sum(abs(y))


def penalty(net: Any, y: Any, t: Any) -> Any:
    return 0.1 * F.sum(net.first.W**2)


TERMS = {
    "rows": rows, "labels": by_labels, "known": KNOWN["two means"], "sum": total, "W": penalty
}  # fmt: skip
WEIGHTS = {"rows": samples, "labels": labelled, "sum": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("size", [1, 4, 20])
def test_each_term_of_a_dictionary_goes_by_its_own_weight(size: int, check: bool) -> None:
    net, plain = Terms(**TERMS), Terms(**TERMS)
    ours, theirs = optimizer_of(net), optimizer_of(plain)
    with accumulate(ours, micro_batch=size, weight=WEIGHTS, check=check):
        for t in (T, T.clip(0), T):
            theirs.update(lambda x, t: sum(plain(x, t).values()), X, t)
            ours.update(net, X, t)
            assert apart(gradients(plain), gradients(net)) < 1e-13


def test_with_steps_too_where_shares_are_the_same() -> None:
    terms = {"rows": rows, "mean": MEAN, "W": penalty}
    net, plain = Terms(**terms), Terms(**terms)
    optimizer_of(plain).update(lambda x, t: sum(plain(x, t).values()), X, T)
    with accumulate(optimizer := optimizer_of(net), steps=3, weight={"rows": samples}):
        for cut in (slice(0, 4), slice(4, 5), slice(5, 16)):
            optimizer.update(net, X[cut], T[cut])
    assert optimizer.t == 1 and apart(gradients(plain), gradients(net)) < 1e-13


def test_a_dictionary_is_no_loss_outside_of_accumulate() -> None:
    net = Terms(rows=rows)
    with pytest.raises((AttributeError, TypeError)):
        optimizer_of(net).update(net, X, T)


OTHERWISE: dict[str, tuple[Any, Any, str]] = {
    "a function": (TERMS, samples, "returns a dictionary of the terms 'rows', 'labels'"),
    "1": (TERMS, 1, "weight= must be a dictionary of some of these names, not 1"),
    "another name": (TERMS, WEIGHTS | {"row": samples}, "must be a dictionary of some of these"),
    "a name that is missing": (
        TERMS, {"rows": samples, "sum": 1}, r'weight=\{"labels": lambda x, t: len\(x\)\}'
    ),
    "no terms": ({}, {}, "returns a dictionary of the terms"),
    "a number": ({"rows": rows, "b": lambda *_: 3.0}, {"rows": samples}, "a dictionary of scalar"),
    "not a scalar": (
        {"rows": rows, "b": lambda net, y, t: y}, {"rows": samples}, r"not shape \(4, 4\)"
    ),
    "a wrong one of two": (TERMS, WEIGHTS | {"rows": labelled}, "weight= "),
}  # fmt: skip


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"steps": 1}])
@pytest.mark.parametrize("name", OTHERWISE)
def test_weights_of_another_form_than_the_loss_are_refused(name: str, how: Any) -> None:
    terms, weight, told = OTHERWISE[name]
    net = Terms(**terms)
    optimizer = optimizer_of(net)
    batch = (X, T) if "micro_batch" in how else (X[:4], T[:4])
    with accumulate(optimizer, weight=weight, **how), refused(optimizer, told):
        optimizer.update(net, *batch)


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"steps": 1}])
def test_a_dictionary_of_weights_for_a_loss_that_is_none_is_refused(how: Any) -> None:
    refuse(MEAN, "weight= is a dictionary, but the loss is not", weight={}, **how)
    refuse(MEAN, "weight= is a dictionary, but the loss is not", weight={"a": samples}, **how)


def test_a_dictionary_with_other_names_in_another_part_is_refused() -> None:
    net = Terms(rows=rows)
    net.loss = lambda net, y, t: {"rows" if len(y) == 4 else "others": rows(net, y, t)}
    optimizer = optimizer_of(net)
    for weight in ({}, {"rows": samples}):
        with accumulate(optimizer, micro_batch=4, weight=weight), refused(optimizer, "others|rows"):
            optimizer.update(net, X[:10], T[:10])


def test_terms_of_a_dictionary_may_share_a_scalar() -> None:
    def shared(net: Any, x: Any, t: Any) -> Any:
        one = F.mean(net.second(F.tanh(net.first(x))) ** 2)
        return {"a": one, "b": one, "c": 2 * one}

    net, plain = Net(MEAN), Net(MEAN)
    optimizer_of(plain).update(lambda x, t: sum(shared(plain, x, t).values()), X, T)
    with accumulate(optimizer := optimizer_of(net), micro_batch=5):
        optimizer.update(lambda x, t: shared(net, x, t), X, T)
    assert apart(gradients(plain), gradients(net)) < 1e-13


# -- what is reported ------------------------------------------------------------------------------


def test_each_term_is_reported_as_of_the_whole_batch() -> None:
    found = []
    for size in (16, 4):
        net = Terms(**TERMS)
        reporter = chainer.Reporter()
        reporter.add_observer("main", net)

        def loss(x: Any, t: Any, net: Any = net) -> Any:
            losses = net(x, t)
            chainer.report({name: losses[name] for name in WEIGHTS}, net)
            return losses

        optimizer = optimizer_of(net)
        with accumulate(optimizer, micro_batch=size, weight=WEIGHTS), reporter:
            optimizer.update(loss, X, T)
        found.append({k: float(getattr(v, "array", v)) for k, v in reporter.observation.items()})
    whole, parts = found
    assert len(whole) == 3 and parts == pytest.approx(whole)


def test_the_line_names_the_arguments_of_a_links_forward() -> None:
    class Model(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.layer = L.Linear(5, 4)

        def forward(self, image: Any, label: Any) -> Any:
            return F.sum(self.layer(image))

    model = Model()
    optimizer = optimizer_of(model)
    x, t = some(dtype=np.float32)
    told = r"weight=lambda image, label: len\(image\)"
    with accumulate(optimizer, micro_batch=4), refused(optimizer, told):
        optimizer.update(model, x, t)
