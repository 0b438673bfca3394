"""What umem knows of a loss's divisors: which terms, and by what rules parts of them add up."""

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
    Net,
    apart,
    apart_after,
    gradients,
    of_net,
    optimizer_of,
    refuse,
    refused,
    some,
)

from umem.errors import AccumulationError

accumulate = umem.chainer.accumulate
MEAN = KNOWN["mean"]

# -- what passes and what does not -----------------------------------------------------------------

PASSES: dict[str, Any] = {
    "cast": lambda net, y, t: F.cast(F.mean(y**2), "f"),
    "reshape": lambda net, y, t: F.reshape(F.reshape(F.mean(y**2), (1, 1)), ()),
    "identity": lambda net, y, t: F.identity(F.mean(y**2)),
    "minus": lambda net, y, t: -F.mean(y**2),
    "an added number": lambda net, y, t: 2 + F.mean(y**2) - 1,
    "all of them": lambda net, y, t: (
        2 - F.cast(F.reshape(-F.mean(y**2) * 3, (1,)).reshape(()), "f") / 4
    ),
    "a sum of three": lambda net, y, t: F.add(F.mean(y), F.mean(y**2), F.mean(y**3)),
    "no gradient": lambda net, y, t: F.mean(y**2) + F.sum(y.array),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_changes_no_divisor_may_follow_a_mean(name: str) -> None:
    assert of_net(PASSES[name], micro_batch=4) < 1e-7


@pytest.mark.filterwarnings("ignore:Treating a variable with only one element:DeprecationWarning")
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_may_have_axes(shape: Any) -> None:
    assert of_net(lambda net, y, t: F.reshape(F.mean(y**2), shape), micro_batch=4) < 1e-13


PENALTIES: dict[str, Any] = {
    "mean": lambda net: F.mean(net.first.W**2),
    "root": lambda net: F.sqrt(F.sum(net.first.W**2)),
    "two layers": lambda net: F.sum(F.matmul(net.second.W, net.first.W)),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", PENALTIES)
def test_what_is_made_of_parameters_alone_counts_once(name: str, size: int) -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(y, t) + 0.3 * PENALTIES[name](net)

    assert of_net(loss, micro_batch=size) < 1e-12
    assert of_net(lambda net, y, t: PENALTIES[name](net), micro_batch=size) < 1e-12


def test_rows_of_a_parameter_do_not_count_once() -> None:
    refuse(lambda net, y, t: F.mean(y) + F.sum(net.second.W[:2] ** 2), r"'Sum' at test_\S+:\d+")


def test_a_penalty_that_is_zero_in_the_first_update_counts_once() -> None:
    """Its gradient is 0 then, which the comparison does not see."""

    def make() -> Net:
        net = Net(lambda net, y, t: F.softmax_cross_entropy(y, t) + F.sum(net.second.b**2))
        net.second.b.array[...] = 0
        return net

    assert max(apart_after(make, Net.__call__, [some()] * 3, micro_batch=4)) < 1e-13


NEITHER: dict[str, tuple[Any, str]] = {
    "a root of a mean": (lambda net, y, t: F.sqrt(F.mean(y**2)), "'sqrt' at .* weight="),
    "a product of means": (lambda net, y, t: F.mean(y) * F.mean(y**2), r"'_ \* _' at .* weight="),
    "a mean over features": (
        lambda net, y, t: F.mean(F.sum(y**2, axis=0)),
        r"'\w+' at test_\S+:\d+ was divided by 4 and 4 in parts and by 4 .* do not add up",
    ),
    "a mean of two losses": (
        lambda net, y, t: F.mean(F.stack([F.softmax_cross_entropy(y, t), F.mean(y**2)])),
        "do not add up",
    ),
    "a number that goes by the samples": (
        lambda net, y, t: F.mean(y**2) / len(t),
        "computes with 0.25 in one part and with 0.33.* in another",
    ),
    "a number that is another one in the comparison": (
        lambda net, y, t: F.mean(y**2) * (0.5 if len(t) == 4 else 0.25),
        "computes with 0.5 in one part and with 0.25 in another",
    ),
    "terms in another order": (
        lambda net, y, t: (
            F.mean(y**2) + F.softmax_cross_entropy(y, t)
            if len(t) == 4
            else F.softmax_cross_entropy(y, t) + F.mean(y**2)
        ),
        "umem does not know which belong together",
    ),
    "other elements a sample beside another term": (
        lambda net, y, t: F.mean(y[:, : len(t)] ** 2) + F.mean(y**2),
        "is one of several terms, and has other elements per sample",
    ),
    "a hinge beside another term": (
        lambda net, y, t: F.hinge(y, t.clip(0)) + F.mean(y**2),
        r"'Hinge' at test_\S+:\d+ is one of several terms",
    ),
    "a hinge beside a penalty": (
        lambda net, y, t: F.sum(net.first.W**2) + F.hinge(y, t.clip(0)),
        r"'Hinge' at test_\S+:\d+ is one of several terms",
    ),
    "classes that differ from part to part": (
        lambda net, y, t: sum(F.mean(y[t == c] ** 2) for c in np.unique(t)),
        "umem does not know which belong together|has other elements per sample",
    ),
    "nothing": (lambda net, y, t: F.mean(y.array), "the loss has no terms"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEITHER)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    loss, told = NEITHER[name]
    x, _ = some()
    refuse(loss, told, (x, np.array([0, 0, 1, 1, 2, 2, 1, 0, 3, 3, 3], "i")))


def test_classes_that_are_as_often_in_each_part_are_not_what_they_seem() -> None:
    """Which class a term is of stands on no tape: here each part has two others."""
    loss, told = NEITHER["classes that differ from part to part"]
    x, _ = some(8)
    for labels in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 2, 0, 2]):
        refuse(loss, told, (x, np.array(labels)))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_part_of_one_sample_and_a_short_last_part_are_exact(size: int) -> None:
    assert of_net(KNOWN["two counts and a penalty"], some(10), micro_batch=size) < 1e-12


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"micro_batch": 1}, {"steps": 1}])
def test_a_batch_without_labels_adds_nothing_and_proves_nothing(how: Any) -> None:
    x, t = some()
    none, one = np.full_like(t, -1), np.where(np.arange(11) == 9, 2, -1).astype("i")
    loss = KNOWN["valid labels"]
    assert of_net(loss, (x, none), (x, t), (x, none), (x, one), **how) < 1e-12


@pytest.mark.parametrize("size", [1, 5])
def test_two_terms_of_which_one_comes_to_count_nothing(size: int) -> None:
    loss = KNOWN["two means"]
    x, t = some(12)
    none = np.full_like(t, -1)
    assert of_net(loss, (x, t), (x, none), (x, t), micro_batch=size) < 1e-12
    assert of_net(loss, (x, none), (x, t), micro_batch=size) < 1e-12


def test_a_loss_that_hangs_on_nothing_is_accepted() -> None:
    """Its gradient is rounding, which other parts have otherwise."""
    model = L.Linear(6, 5)
    before = [p.array.copy() for p in model.params()]
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = np.random.default_rng(0).standard_normal((8, 6)).astype("f")
    with accumulate(optimizer, micro_batch=4):
        for _ in range(2):
            optimizer.update(lambda x: F.mean(F.sum(F.softmax(model(x)), axis=1)), x)
    for parameter, was in zip(model.params(), before, strict=True):
        np.testing.assert_allclose(parameter.array, was, atol=1e-6)


def test_a_number_may_change_from_batch_to_batch() -> None:
    net, plain = Net(MEAN), Net(MEAN)
    ours, theirs = optimizer_of(net), optimizer_of(plain)
    with accumulate(ours, micro_batch=3):
        for at in range(3):
            for one in (net, plain):
                one.loss = lambda net, y, t, at=at: F.mean(y**2) * 0.9**at + F.mean(abs(y))
            ours.update(net, *some())
            theirs.update(plain, *some())
            assert apart(gradients(plain), gradients(net)) < 1e-12


# -- time steps ------------------------------------------------------------------------------------


class Words(chainer.Chain):
    """A language model over rows of words, of which -1 is none."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed, self.lstm = L.EmbedID(20, 8, ignore_label=-1), L.LSTM(8, 8)
            self.out = L.Linear(8, 20)

    def __call__(self, x: Any) -> list[Any]:
        self.lstm.reset_state()
        return [self.out(self.lstm(self.embed(x[:, k]))) for k in range(x.shape[1])]


def sentences(*lengths: int, seed: int = 0) -> tuple[Any, ...]:
    draw = np.random.RandomState(seed)
    return tuple([draw.randint(0, 20, n).astype("i") for n in lengths] for _ in range(2))


def padded(rows: Any) -> Any:
    return F.pad_sequence(rows, padding=-1).array if isinstance(rows, list) else rows


def each_step(net: Any, xs: Any, ts: Any) -> Any:
    t = padded(ts)
    return sum(F.softmax_cross_entropy(y, t[:, k]) for k, y in enumerate(net(padded(xs))))


def backwards(net: Any, xs: Any, ts: Any) -> Any:
    t, ys = padded(ts), net(padded(xs))
    return sum(0.8**k * F.softmax_cross_entropy(ys[k], t[:, k]) for k in reversed(range(len(ys))))


def all_steps(net: Any, xs: Any, ts: Any) -> Any:
    y, t = F.stack(net(padded(xs)), 1), padded(ts)
    return F.softmax_cross_entropy(y.reshape(-1, 20), t.ravel(), normalize=False)


BUCKETS = sentences(*[5] * 8), sentences(1, 2, 3, 4, 5, 2, 1, 4), sentences(3, 3, 3, 3, 2, 2, 2, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", [each_step, backwards, all_steps])
def test_sequences_that_are_padded_before_they_are_cut_are_exact(loss: Any, size: int) -> None:
    batches = [(padded(xs), padded(ts)) for xs, ts in BUCKETS]
    assert max(apart_after(Words, loss, batches, micro_batch=size)) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (each_step, "umem does not know which belong together"),
        (backwards, "umem does not know which belong together"),
        (all_steps, r"at test_\S+:\d+ was divided by .* do not add up"),
    ],
)
def test_sequences_that_are_padded_in_each_part_are_refused_where_lengths_come_to_vary(
    loss: Any, told: str, size: int
) -> None:
    assert max(apart_after(Words, loss, BUCKETS[:1], micro_batch=size)) < 1e-12
    with pytest.raises(AccumulationError, match=told):
        apart_after(Words, loss, BUCKETS, micro_batch=size)


def of_joined(net: Any, xs: Any, ts: Any) -> Any:
    return F.mean(net.embed(np.concatenate(xs)) ** 2)


def test_a_mean_over_joined_sequences_adds_up_where_lengths_vary() -> None:
    assert max(apart_after(Words, of_joined, BUCKETS, micro_batch=3)) < 1e-12


def test_with_steps_it_is_refused_where_calls_have_other_lengths() -> None:
    net = Words()
    optimizer = optimizer_of(net)
    with accumulate(optimizer, steps=2):
        optimizer.update(lambda xs: of_joined(net, xs, None), BUCKETS[0][0])
        with refused(optimizer, "has other elements per sample in one call of update"):
            optimizer.update(lambda xs: of_joined(net, xs, None), BUCKETS[1][0])


# -- counts that go apart --------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
def test_where_counts_go_apart_each_part_goes_forward_once_more(check: bool) -> None:
    sizes: list[int] = []

    def loss(net: Any, y: Any, t: Any) -> Any:
        sizes.append(len(y))
        return KNOWN["two means"](net, y, t)

    net = Net(loss, ratio=0.3)
    optimizer = optimizer_of(net)
    with accumulate(optimizer, micro_batch=4, check=check):
        optimizer.update(net, *some())
        assert sizes[:6] == [4, 4, 3, 4, 4, 3] and float(net.seen) == 11
        sizes.clear()
        optimizer.update(net, *some())
    assert sizes == [4, 4, 3, 4, 4, 3] and float(net.seen) == 22


def test_with_steps_that_is_refused_at_the_update() -> None:
    net = Net(KNOWN["two means"])
    optimizer = optimizer_of(net)
    x, t = some()
    t[:4] = 1
    with accumulate(optimizer, steps=2, check=False):
        optimizer.update(net, x[:6], t[:6])
        before = net.first.W.array.copy()
        with pytest.raises(AccumulationError, match=r"use micro_batch= instead of steps="):
            optimizer.update(net, x[6:], t[6:])
        assert optimizer.t == 0 and np.array_equal(net.first.W.array, before)
        optimizer.update(net, x, t.clip(0))
        optimizer.update(net, x, t.clip(0))
    assert optimizer.t == 1


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"micro_batch": 1}, {"steps": 1}])
def test_random_numbers_come_as_without_where_another_model_is_made_on_the_way(how: Any) -> None:
    found = []
    for options in (None, how):
        np.random.seed(0)
        made, judge = L.Linear(None, 8), L.Linear(8, 3)
        optimizer = chainer.optimizers.SGD(0.1).setup(judge)
        x, t = np.random.randn(8, 4).astype("f"), np.array([1, -1, 0, 2, -1, -1, 1, 1], "i")

        def loss(x: Any, t: Any, made: Any = made, judge: Any = judge) -> Any:
            y = judge(made(x))
            return F.softmax_cross_entropy(y, t) + 0.3 * F.mean(y**2)

        if options is None:
            optimizer.update(loss, x, t)
        else:
            with accumulate(optimizer, **options):
                optimizer.update(loss, x, t)
        found.append((made.W.array.tobytes(), np.random.rand()))
    assert found[0] == found[1]


def test_a_loss_function_may_change_its_arguments_where_parts_run_twice() -> None:
    def loss(net: Any, y: Any, t: Any) -> Any:
        t[t >= 0] = (t[t >= 0] + 1) % 4
        return KNOWN["two means"](net, y, t)

    net, plain = Net(loss), Net(loss)
    x, t = some()
    t[:6] = 1  # counts go apart, so that each part runs twice
    optimizer_of(plain).update(plain, x, t.copy())
    with accumulate(optimizer := optimizer_of(net), micro_batch=4):
        optimizer.update(net, x, t)
    assert apart(gradients(plain), gradients(net)) < 1e-13
