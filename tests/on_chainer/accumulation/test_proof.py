"""The first step proves itself, names what mixes samples, and leaves no trace of that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import (
    FULL,
    LOSSES,
    Net,
    apart,
    gradients,
    labelled,
    optimizer_of,
    parameters,
    samples,
    some,
    valid,
)

from umem.errors import AccumulationError, AccumulationWarning

MEAN = LOSSES["mean"]


def update(net: Any, **options: Any) -> Any:
    """One update in micro-batches; returns the optimizer."""
    optimizer = optimizer_of(net)
    with umem.chainer.accumulate(optimizer, micro_batch=4, **options):
        optimizer.update(net, *some())
    return optimizer


# -- what mixes samples ----------------------------------------------------------------------------

MIXING: dict[str, tuple[Any, str]] = {
    "normalising over the batch": (
        lambda net, y, t: F.mean(F.normalize(y, axis=0) ** 3),
        r"'NormalizeL2' \(call \d+ of \d+, result \(4, 4\)\) mixes samples",
    ),
    "a mean over the batch, by hand": (
        lambda net, y, t: F.mean((y - F.broadcast_to(F.mean(y, axis=0), y.shape)) ** 2),
        r"'Mean' \(call \d+ of \d+, result \(4,\)\) mixes samples",
    ),
    "similarities in the batch": (
        lambda net, y, t: F.softmax_cross_entropy(
            F.matmul(y, y, transb=True), np.arange(len(y.array), dtype="i")
        ),
        r"'MatMul' \(call \d+ of \d+, result \(4, 4\)\) mixes samples",
    ),
    "a softmax over the batch": (
        lambda net, y, t: F.mean(F.softmax(y, axis=0) ** 2),
        r"'Softmax' \(call \d+ of \d+, result \(4, 4\)\) mixes samples",
    ),
    "samples in another order": (
        lambda net, y, t: F.mean(y * F.flip(y, axis=0)),
        r"'Flip' \(call \d+ of \d+, result \(4, 4\)\) mixes samples",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_refused_by_its_name(name: str) -> None:
    loss, told = MIXING[name]
    net = Net(loss)
    before = parameters(net)
    with pytest.raises(AccumulationError, match=told) as caught:
        update(net)
    assert "umem.chainer.Recompute" in str(caught.value)
    assert np.array_equal(parameters(net), before)
    assert all(p.grad is None for p in net.params())


class Normalised(chainer.Chain):
    """A network with a normalisation, an image a sample."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.norm = L.Convolution2D(2, 6, 3), norm

    def __call__(self, x: Any, t: Any) -> Any:
        return F.mean(self.norm(self.first(x)) ** 3)


def images() -> tuple[Any, Any]:
    return np.random.RandomState(2).randn(6, 2, 5, 5).astype("f"), np.zeros(6, "i")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: L.BatchNormalization(6),
        lambda: L.BatchNormalization(6, use_gamma=False, use_beta=False),
        lambda: L.BatchRenormalization(6),
        lambda: L.DecorrelatedBatchNormalization(6, groups=1),
    ],
)
def test_batch_normalisation_is_refused_by_name_and_its_statistics_stay(
    norm: Callable[[], Any], check: bool, size: int
) -> None:
    net = Normalised(norm())
    optimizer = optimizer_of(net)
    before = {name: value.copy() for name, value in arrays_of(net.norm).items()}
    refused = pytest.raises(AccumulationError, match=r"ormalization.*umem\.chainer\.Recompute")
    with umem.chainer.accumulate(optimizer, micro_batch=size, check=check), refused:
        optimizer.update(net, *images())
    after = arrays_of(net.norm)
    assert all(np.array_equal(value, after[name]) for name, value in before.items())


def arrays_of(link: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chainer.serializers.DictionarySerializer(found).save(link)
    return {name: np.array(value) for name, value in found.items()}


def test_the_link_is_named() -> None:
    with pytest.raises(AccumulationError, match="'BatchNormalization' of /norm computes with all"):
        optimizer = optimizer_of(net := Normalised(L.BatchNormalization(6)))
        with umem.chainer.accumulate(optimizer, steps=2):
            net(*images())


def instance_norm(x: Any) -> Any:
    n, c, h, w = x.shape
    one = np.ones(n * c, x.dtype)
    y = F.batch_normalization(F.reshape(x, (1, n * c, h, w)), one, 0 * one)
    return F.reshape(y, x.shape)


@pytest.mark.parametrize(
    "norm", [lambda: L.GroupNormalization(3), lambda: instance_norm], ids=["group", "instance"]
)
@pytest.mark.parametrize("size", [1, 4])
def test_normalisations_of_a_sample_are_not_refused(norm: Callable[[], Any], size: int) -> None:
    np.random.seed(0)
    net = Normalised(norm())
    optimizer = optimizer_of(net, lambda: chainer.optimizers.SGD(0))
    optimizer.update(net, *images())
    whole = gradients(net)
    with umem.chainer.accumulate(optimizer, micro_batch=size):
        optimizer.update(net, *images())
    assert apart(whole, gradients(net)) < 1e-5


def test_batch_normalisation_that_is_not_trained_is_no_matter() -> None:
    net = Normalised(L.BatchNormalization(6))
    optimizer = optimizer_of(net)
    with chainer.using_config("train", False), umem.chainer.accumulate(optimizer, micro_batch=2):
        optimizer.update(net, *images())
    assert optimizer.t == 1


# -- what is not known -----------------------------------------------------------------------------


class OwnLoss(chainer.FunctionNode):
    """A mean that umem does not know."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        return (inputs[0].mean(keepdims=True).reshape(()),)

    def backward(self, indexes: Any, gys: Any) -> Any:
        (x,) = self.get_retained_inputs()
        return (F.broadcast_to(gys[0] / x.size, x.shape),)


def own(net: Any, y: Any, t: Any) -> Any:
    return OwnLoss().apply((y,))[0]


def test_an_unknown_loss_is_named_and_asks_for_its_weight() -> None:
    with pytest.raises(
        AccumulationError, match=r"'OwnLoss' at \S+:\d+ stands between .* pass weight="
    ):
        update(Net(own))


def test_it_is_exact_with_a_weight() -> None:
    net, whole = Net(own), Net(MEAN)
    whole.loss = lambda net, y, t: F.mean(y)
    optimizer_of(whole).update(whole, *some())
    update(net, weight=lambda x, t: len(x))
    assert apart(gradients(whole), gradients(net)) < 1e-13


@pytest.mark.parametrize("weight", [1 / 3, 1.0])
def test_a_weight_that_is_a_number_multiplies_each_part(weight: float) -> None:
    net, whole = Net(LOSSES["sum"]), Net(LOSSES["sum"])
    optimizer_of(whole).update(whole, *some())
    update(net, weight=weight, check=False)
    assert apart(weight * gradients(whole), gradients(net)) < 1e-13


@pytest.mark.parametrize(
    "weight", [lambda x, t: -1, lambda x, t: float("nan"), lambda x, t: "4", lambda x, t: None]
)
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises(AccumulationError, match="weight= must give a number of 0 or more"):
        update(Net(MEAN), weight=weight, check=False)


def test_a_loss_of_a_root_of_a_mean_cannot_be_had_in_parts() -> None:
    with pytest.raises(AccumulationError, match=r"'sqrt' at \S+:\d+ stands between the"):
        update(Net(lambda net, y, t: F.sqrt(F.mean(y**2))))


def test_a_weight_does_not_help_there() -> None:
    net = Net(lambda net, y, t: F.sqrt(F.mean(y**2)))
    with pytest.raises(AccumulationError, match="divided by something else than weight= says"):
        update(net, weight=lambda x, t: len(x))


# -- the proof leaves no trace ---------------------------------------------------------------------


class Counting(Net):
    """Draws and keeps things from call to call."""

    def __init__(self) -> None:
        super().__init__(MEAN, ratio=0.3)
        self.calls, self.last = 0, None
        self.add_persistent("seen", np.zeros(()))

    def __call__(self, x: Any, t: Any) -> Any:
        self.calls, self.last = self.calls + 1, x
        self.seen += len(x)
        return super().__call__(x, t)


def test_the_proof_leaves_no_trace() -> None:
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


def test_it_compares_once() -> None:
    net = Net(MEAN)
    optimizer, calls = optimizer_of(net), []
    net.loss = lambda net, y, t: (calls.append(len(y)), F.mean(y))[1]
    with umem.chainer.accumulate(optimizer, micro_batch=4):
        optimizer.update(net, *some())
        first = calls[:]
        calls.clear()
        optimizer.update(net, *some())
    # Two samples of the first part are read, and not gone back from.
    assert first == [4, 1, 1, 4, 3, 4, 1, 1, 2, 2, 1, 1] and calls == [4, 4, 3]


def test_a_batch_that_is_one_part_needs_no_proof() -> None:
    net = Normalised(L.GroupNormalization(3))
    optimizer, calls = optimizer_of(net), []
    with umem.chainer.accumulate(optimizer, micro_batch=100):
        optimizer.update(lambda x, t: (calls.append(len(x)), net(x, t))[1], *images())
    assert calls == [6] and optimizer.t == 1


def test_parameters_that_get_their_arrays_in_the_first_pass_are_proven_after_it() -> None:
    net = chainer.Sequential(L.Linear(None, 8), F.tanh, L.Linear(None, 4))
    optimizer = optimizer_of(net)
    x, t = some(dtype=np.float32)
    with umem.chainer.accumulate(optimizer, micro_batch=4):
        optimizer.update(lambda x, t: F.softmax_cross_entropy(net(x), t), x, t)
    assert optimizer.t == 1
    lazy = chainer.Sequential(L.Linear(None, 8), lambda x: F.normalize(x, axis=0))
    optimizer = optimizer_of(lazy)
    with umem.chainer.accumulate(optimizer, micro_batch=4), pytest.raises(AccumulationError):
        optimizer.update(lambda x: F.mean(lazy(x) ** 3), x)
    assert optimizer.t == 0


def test_a_gradient_that_is_not_finite_is_proven_when_one_is() -> None:
    net = Net(MEAN, np.float32)
    optimizer = optimizer_of(net)
    net.loss = lambda net, y, t: F.mean(y) * np.float32("inf")
    calls = []
    with umem.chainer.accumulate(optimizer, micro_batch=4), np.errstate(all="ignore"):
        optimizer.update(net, *some(dtype=np.float32))
        net.loss = lambda net, y, t: (calls.append(len(y)), F.mean(y))[1]
        net.cleargrads()
        for parameter in net.params():
            parameter.array[...] = 0.1
        optimizer.update(net, *some(dtype=np.float32))
    assert calls == [4, 1, 1, 4, 3, 4, 1, 1, 2, 2, 1, 1]


# -- random numbers --------------------------------------------------------------------------------


def test_dropout_of_the_whole_batch_is_what_the_whole_batch_draws() -> None:
    found = []
    for options in (None, {"micro_batch": 4, "dropout": "batch"}):
        net = Net(MEAN, ratio=0.4)
        optimizer = optimizer_of(net)
        np.random.seed(7)
        if options is None:
            optimizer.update(net, *some())
        else:
            with umem.chainer.accumulate(optimizer, **options):
                optimizer.update(net, *some())
        found.append((gradients(net), np.random.rand()))
    (whole, drawn), (parts, drawn_in_parts) = found
    assert apart(whole, parts) < 1e-13 and drawn == drawn_in_parts


def test_masks_are_drawn_part_by_part_otherwise() -> None:
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


def test_what_else_draws_is_named_and_not_compared() -> None:
    net = Net(lambda net, y, t: F.mean(F.rrelu(y)))
    with pytest.warns(AccumulationWarning, match="'RReLU': draws random numbers of its own"):
        update(net)


def test_so_is_code_outside_of_functions() -> None:
    net = Net(lambda net, y, t: F.mean(y * np.random.rand(*y.shape)))
    with pytest.warns(AccumulationWarning, match="code outside of Chainer's functions: draws"):
        update(net)


# -- losses made sample by sample ------------------------------------------------------------------


def one_by_one(net: Any, y: Any, t: Any) -> Any:
    return [F.softmax_cross_entropy(y[i : i + 1], abs(t[i : i + 1])) for i in range(len(t))]


BY_SAMPLE: dict[str, tuple[Any, Any]] = {
    "sum": (lambda net, y, t: sum(one_by_one(net, y, t)), 1),
    "mean": (lambda net, y, t: sum(one_by_one(net, y, t)) / len(t), samples),
    "stack": (lambda net, y, t: F.mean(F.stack(one_by_one(net, y, t))), None),
    "scaled": (lambda net, y, t: sum(0.5 * one for one in one_by_one(net, y, t)) / len(t), samples),
    "penalty": (
        lambda net, y, t: 0.1 * F.sum(net.first.W**2) + F.mean(F.stack(one_by_one(net, y, t))),
        None,
    ),
    "steps": (
        lambda net, y, t: F.mean(
            F.stack([F.softmax_cross_entropy(y * (2 + step), t) for step in range(3)])
        ),
        None,
    ),
}
"""Losses that are made of several scalars, and what ``weight=`` they need."""


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_losses_made_one_by_one_are_exact(name: str, size: int) -> None:
    loss, weight = BY_SAMPLE[name]
    net, plain = Net(loss), Net(loss)
    optimizer_of(plain).update(plain, *some())
    with umem.chainer.accumulate(optimizer := optimizer_of(net), micro_batch=size, weight=weight):
        optimizer.update(net, *some())
    assert apart(gradients(plain), gradients(net)) < 1e-13


@pytest.mark.parametrize("name", ["sum", "mean", "scaled"])
def test_without_that_they_are_refused_by_name(name: str) -> None:
    with pytest.raises(AccumulationError, match=r" at test_\S+:\d+.*weight="):
        update(Net(BY_SAMPLE[name][0]))


# -- what the first comparison does not show -------------------------------------------------------


def apart_after(loss: Any, *batches: tuple[Any, ...], **how: Any) -> list[float]:
    """How far each step's gradient is from plain Chainer's."""
    nets = Net(loss), Net(loss)
    plain, ours = map(optimizer_of, nets)
    found = []
    with umem.chainer.accumulate(ours, **how):
        for batch in batches:
            plain.update(nets[0], *batch)
            ours.update(nets[1], *batch)
            found.append(apart(*map(gradients, nets)))
    return found


def by_labels(net: Any, y: Any, t: Any) -> Any:
    return F.sum(F.softmax_cross_entropy(y, t, reduce="no")) / valid(t)


def one_in_each_four() -> tuple[Any, Any]:
    x, t = some(16)
    t[:] = -1
    t[::4] = 1
    return x, t


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"micro_batch": 1}, {"steps": 1}])
def test_one_label_in_each_part_is_counted(how: Any) -> None:
    assert max(apart_after(by_labels, one_in_each_four(), weight=labelled, **how)) < 1e-13


@pytest.mark.parametrize("size", [1, 4])
def test_a_division_by_one_is_refused_since_it_may_be_a_count(size: int) -> None:
    x, t = one_in_each_four()
    net = Net(by_labels)
    before = parameters(net)
    with (
        umem.chainer.accumulate(optimizer := optimizer_of(net), steps=4),
        pytest.raises(AccumulationError, match=r"by 1 at \S+:\d+: umem cannot tell whether"),
    ):
        optimizer.update(net, x[:size], t[:size])
    assert (parameters(net) == before).all()


@pytest.mark.parametrize("size", [1, 4])
def test_a_factor_of_one_is_no_count(size: int) -> None:
    x, t = some(16)
    assert max(apart_after(lambda net, y, t: F.sum(y**2) * 1, (x, t), micro_batch=size)) < 1e-13


def test_a_penalty_that_is_zero_in_the_first_step_counts_once() -> None:
    """Its gradient is 0 then, which the comparison does not see."""

    def loss(net: Any, y: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(y, t) + F.sum((net.first.W - net.start) ** 2)

    nets = Net(loss), Net(loss)
    for net in nets:
        net.start = net.first.W.array.copy()
    plain, ours = map(optimizer_of, nets)
    for optimizer in (plain, ours):
        optimizer.hyperparam.lr = 0.1
    with umem.chainer.accumulate(ours, micro_batch=4):
        for _ in range(3):
            plain.update(nets[0], *some())
            ours.update(nets[1], *some())
            assert apart(*map(gradients, nets)) < 1e-13


@pytest.mark.parametrize("first", [3, None])
def test_the_longest_length_is_no_count(first: int | None) -> None:
    """All of one length in the first step: it looks like a factor."""

    def loss(net: Any, y: Any, lengths: Any) -> Any:
        return F.sum(y**2) / float(lengths.max())

    x, _ = some(16)
    lengths = np.array([2, 3, 1, 4] * 3 + [2, 1, 3, 2])
    with pytest.raises(
        AccumulationError, match=r"divided by [12345] at test_\S+:\d+|and that of another is"
    ):
        batches = [(x, np.full(16, first))] if first else []
        apart_after(loss, *batches, (x, lengths), micro_batch=4)


def test_a_mean_of_what_is_padded_in_each_part_is_refused() -> None:
    """All of one length in the first step: it adds up."""

    class Padded(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.layer = chainer.links.Linear(1, 2)

        def __call__(self, sequences: Any) -> Any:
            x = F.pad_sequence(sequences).array
            return F.mean(self.layer(x.reshape(-1, 1)) ** 2)

    def sequences(lengths: list[int]) -> list[Any]:
        return [np.ones(n, "f") for n in lengths]

    net = Padded()
    with umem.chainer.accumulate(optimizer := optimizer_of(net), micro_batch=4):
        optimizer.update(net, sequences([5] * 12))
        with pytest.raises(
            AccumulationError, match=r"'Mean' at \S+ was divided by .* do not add up"
        ):
            optimizer.update(net, sequences([1, 2, 3, 4] + [2, 7, 1, 5] + [3] * 4))


def test_samples_without_a_label_prove_nothing() -> None:
    """The comparison waits for a step whose gradient is not 0."""
    x, t = some(16)
    net = Net(lambda net, y, t: F.softmax_cross_entropy(y * F.broadcast_to(F.mean(y), y.shape), t))
    with umem.chainer.accumulate(optimizer := optimizer_of(net), micro_batch=4):
        optimizer.update(net, x, np.full_like(t, -1))
        with pytest.raises(AccumulationError, match="mixes samples"):
            optimizer.update(net, x, t.clip(0))


def test_backward_by_hand_from_rows_of_a_parameter_is_refused() -> None:
    """They may be those of the samples, and then count each time."""
    net = Net(lambda net, y, t: F.mean(y**2) + F.sum(net.second.W[t.clip(0)] ** 2))
    with (
        umem.chainer.accumulate(optimizer := optimizer_of(net), steps=2),
        pytest.raises(AccumulationError, match=r"at \S+:\d+ is of rows of a parameter"),
    ):
        net(*some()).backward()
        optimizer.update()


@pytest.mark.parametrize("power", [0, 1])
def test_a_loss_that_goes_by_the_order_of_samples_is_refused(power: int) -> None:
    """Backwards it is another one too, which is not a matter of rounding."""

    def loss(net: Any, y: Any, t: Any) -> Any:
        before = np.arange(1.0, len(y) + 1) if power else np.roll(y.array[:, 0], 1)
        return F.sum(F.sum(y, axis=1) * before)

    with pytest.raises(AccumulationError, match="of its norm away"):
        update(Net(loss))
