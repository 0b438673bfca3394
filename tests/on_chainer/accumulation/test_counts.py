"""What a loss is divided by, step by step of a training run: each time step's own count, no count
at all, one sample a call. Every gradient is compared with plain Chainer's of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.accumulation.splitting import Arguments, joined
from umem.errors import AccumulationError, AccumulationWarning

accumulate = umem.chainer.accumulate
Batch = tuple[Any, ...]


def gradient(model: Any) -> Any:
    return np.concatenate([p.grad.ravel() for _, p in sorted(model.namedparams())])


def apart_after(make: Any, loss: Any, batches: Sequence[Batch], **how: Any) -> list[float]:
    """How far each step's gradient is from that of the whole batch; ``loss`` is given the model."""
    found = []
    with chainer.using_config("dtype", np.float64):
        models = []
        for _ in range(2):
            np.random.seed(0)
            models.append(make())
        plain, ours = (chainer.optimizers.SGD(0.1).setup(model) for model in models)
        with accumulate(ours, **how):
            for batch in batches:
                plain.update(lambda *args: loss(models[0], *args), *batch)
                ours.update(lambda *args: loss(models[1], *args), *batch)
                whole, parts = map(gradient, models)
                norm = np.linalg.norm(whole) or 1.0
                found.append(float(np.linalg.norm(whole - parts) / norm))
    return found


# -- time steps ------------------------------------------------------------------------------------


class Words(chainer.Chain):
    """A language model over sequences that are padded in the loss."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed, self.lstm = L.EmbedID(20, 8, ignore_label=-1), L.LSTM(8, 8)
            self.out = L.Linear(8, 20)

    def scores(self, xs: Any) -> list[Any]:
        self.lstm.reset_state()
        x = F.pad_sequence(xs, padding=-1).array
        return [self.out(self.lstm(self.embed(x[:, k]))) for k in range(x.shape[1])]


def sentences(*lengths: int, seed: int = 0) -> Batch:
    draw = np.random.RandomState(seed)
    return tuple([draw.randint(0, 20, n).astype("i") for n in lengths] for _ in range(2))


def padded(ts: Any) -> Any:
    return F.pad_sequence(ts, padding=-1).array


def each_step(net: Any, xs: Any, ts: Any) -> Any:
    t = padded(ts)
    return sum(F.softmax_cross_entropy(y, t[:, k]) for k, y in enumerate(net.scores(xs)))


def backwards(net: Any, xs: Any, ts: Any) -> Any:
    t, ys = padded(ts), net.scores(xs)
    return sum(F.softmax_cross_entropy(ys[k], t[:, k]) for k in reversed(range(len(ys))))


BUCKETS = sentences(*[5] * 8), sentences(1, 2, 3, 4, 5, 2, 1, 4), sentences(3, 3, 3, 3, 2, 2, 2, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_time_step_goes_by_its_own_labels_where_lengths_come_to_vary(size: int) -> None:
    assert max(apart_after(Words, each_step, BUCKETS, micro_batch=size)) < 1e-12


@pytest.mark.parametrize("size", [1, 3])
def test_a_loop_that_goes_backwards_is_refused_where_lengths_come_to_vary(size: int) -> None:
    assert apart_after(Words, backwards, BUCKETS[:1], micro_batch=size)[0] < 1e-12
    with pytest.raises(
        AccumulationError, match=r"at test_\S+:\d+ is in a loop that runs backwards"
    ):
        apart_after(Words, backwards, BUCKETS, micro_batch=size)


def test_steps_that_count_what_is_padded_in_each_part_are_refused() -> None:
    def loss(net: Any, xs: Any, ts: Any) -> Any:
        t = padded(ts)
        return sum(
            F.softmax_cross_entropy(y, t[:, k], normalize=False)
            for k, y in enumerate(net.scores(xs))
        )

    with pytest.raises(AccumulationError, match=r"at test_\S+:\d+ was divided by .* do not add up"):
        apart_after(Words, loss, BUCKETS, micro_batch=2)


def test_a_factor_of_each_time_step_is_known() -> None:
    def loss(net: Any, xs: Any, ts: Any) -> Any:
        t = padded(ts)
        return sum(
            0.8**k * F.softmax_cross_entropy(y, t[:, k]) for k, y in enumerate(net.scores(xs))
        )

    assert max(apart_after(Words, loss, BUCKETS, micro_batch=3)) < 1e-12


# -- rows ------------------------------------------------------------------------------------------


def linear() -> Any:
    return L.Linear(6, 5)


def rows(count: int, labels: Any) -> Batch:
    x = np.random.RandomState(1).randn(count, 6)
    return x, np.broadcast_to(np.asarray(labels, "i"), count).copy()


NONE = rows(12, -1)
SOME = rows(12, [-1, 2, -1, 1, 0, -1, -1, -1, 3, -1, -1, -1])


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("batches", [(NONE,), (SOME, NONE, SOME), (NONE, SOME)])
def test_two_terms_of_which_one_counts_nothing(batches: Any, size: int) -> None:
    def loss(net: Any, x: Any, t: Any) -> Any:
        y = net(x)
        return F.softmax_cross_entropy(y, t) + F.sum(y**2) / len(x)

    how: Any = {"micro_batch": size, "weight": lambda x, t: len(x)}
    assert max(apart_after(linear, loss, batches, **how)) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sum_over_all_samples_by_the_labelled_ones_where_there_are_none(size: int) -> None:
    def loss(net: Any, x: Any, t: Any) -> Any:
        return F.sum(net(x) ** 2) / max(1, int((t >= 0).sum()))

    how: Any = {"micro_batch": size, "weight": lambda x, t: (t >= 0).sum()}
    assert max(apart_after(linear, loss, (SOME, NONE, SOME), **how)) < 1e-12
    with pytest.raises(AccumulationError, match=r"divided by \d+ at test_\S+:\d+.*weight="):
        apart_after(linear, loss, (NONE, SOME), micro_batch=size)


def mean_of_labelled(net: Any, x: Any, t: Any) -> Any:
    y = net(x)
    return F.mean(y[np.nonzero(t >= 0)[0]] ** 2) if (t >= 0).any() else F.sum(y[:0])


def test_a_mean_over_labelled_samples_of_which_a_part_has_one() -> None:
    """One sample alone, and the part with it, have the same count."""
    batch = rows(9, [0, -1, -1, 2, 1, 3, -1, 1, 1])
    assert max(apart_after(linear, mean_of_labelled, (batch,), micro_batch=2)) < 1e-12
    few = rows(9, [-1, -1, -1, 2, -1, -1, 1, -1, -1])
    assert max(apart_after(linear, mean_of_labelled, (few,), micro_batch=3)) < 1e-12


def test_a_sum_of_means_of_single_samples_is_refused_where_it_looks_like_means_of_many() -> None:
    def loss(net: Any, x: Any, t: Any) -> Any:
        y = net(x)
        return sum(F.mean(y[i] ** 2) for i in range(len(t)) if t[i] >= 0) + 0 * F.sum(y)

    batches = rows(9, [0, -1, -1, 2, 1, 3, -1, 1, 1]), rows(9, 1)
    with pytest.raises(AccumulationError, match="do not add up"):
        apart_after(linear, loss, batches, micro_batch=5)


def test_means_over_classes_are_refused() -> None:
    def loss(net: Any, x: Any, t: Any) -> Any:
        y = net(x)
        return sum(F.mean(y[np.nonzero(t == k)[0]] ** 2) for k in range(4) if k in t)

    batch = rows(8, [0, 1, 2, 2, 3, 0, 1, 3])
    with pytest.raises(AccumulationError, match="such counts do not add up"):
        apart_after(linear, loss, (batch,), micro_batch=2)


def test_parts_are_compared_where_few_samples_have_a_gradient() -> None:
    def loss(net: Any, xs: Any, ts: Any) -> Any:
        ts = padded(ts)
        x = padded(xs)
        steps = [F.softmax_cross_entropy(net(x[:, k : k + 1] * W), t) for k, t in enumerate(ts.T)]
        return F.mean(F.stack(steps))

    W = np.ones((1, 6))
    generator = np.random.RandomState(0)
    nothing = [np.full(n, -1, "i") for n in (2, 3, 5, 4)]
    one = [np.full(2, -1, "i") for _ in range(13)]
    one[11] = np.array([0, 2], "i")
    batches = [([generator.randn(len(t)) for t in ts], ts) for ts in (nothing, one)]
    with pytest.raises(AccumulationError, match="do not add up"):
        apart_after(linear, loss, batches, micro_batch=2)


def test_a_loop_over_rows_by_hand_is_refused() -> None:
    model = linear()
    x, t = rows(3, 1)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    with accumulate(optimizer, steps=2), pytest.raises(AccumulationError, match="single rows"):
        y = model(x.astype("f"))
        sum(F.softmax_cross_entropy(y[i : i + 1], t[i : i + 1]) for i in range(3)).backward()
        optimizer.update()


def test_lists_of_one_sequence_are_put_together_as_sequences() -> None:
    one, other = ([np.zeros(4, "f")],), ([np.ones(3, "f")],)
    both = joined(Arguments(one, {}), Arguments(other, {}))
    assert both is not None and both.size == 2
    arrays = ([np.zeros((4, 2), "f"), np.zeros((4, 3), "f")], np.zeros(4, "i"))
    both = joined(Arguments(arrays, {}), Arguments(arrays, {}))
    assert both is not None and both.size == 8


def test_an_array_beside_a_parameter_by_hand_is_refused() -> None:
    model = linear()
    start = model.W.array.copy()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    with accumulate(optimizer, steps=2), pytest.raises(AccumulationError, match="of its shape"):
        (F.sum((model.W - start) ** 2) + F.sum(model(rows(3, 1)[0].astype("f")) ** 2)).backward()
        optimizer.update()
    np.testing.assert_array_equal(model.W.array, start)


def test_a_loss_that_hangs_on_nothing_is_accepted() -> None:
    """Its gradient is rounding, which other parts have otherwise."""
    model = linear()
    before = [p.array.copy() for p in model.params()]
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = np.random.default_rng(0).standard_normal((8, 6)).astype("f")
    with accumulate(optimizer, micro_batch=4):
        for _ in range(2):
            optimizer.update(lambda x: F.mean(F.sum(F.softmax(model(x)), axis=1)), x)
    for parameter, was in zip(model.params(), before, strict=True):
        np.testing.assert_allclose(parameter.array, was, atol=1e-6)


def test_a_factor_that_changes_from_batch_to_batch_is_a_factor() -> None:
    at: list[float] = []

    def loss(net: Any, x: Any, t: Any) -> Any:
        y = net(x)
        return F.mean(y**2) * 0.9 ** len(at) + F.mean(abs(y))

    batches = []
    for _ in range(3):
        batches.append(rows(8, 1))
    with chainer.using_config("dtype", np.float64):
        np.random.seed(0)
        nets = linear(), linear()
        nets[1].copyparams(nets[0])
        plain, ours = (chainer.optimizers.SGD(0.1).setup(net) for net in nets)
        with accumulate(ours, micro_batch=3):
            for batch in batches:
                plain.update(lambda x, t: loss(nets[0], x, t), *batch)
                ours.update(lambda x, t: loss(nets[1], x, t), *batch)
                assert np.abs(gradient(nets[0]) - gradient(nets[1])).max() < 1e-12
                at.append(0.0)


def test_two_counts_for_which_one_weight_stands_are_refused() -> None:
    def loss(net: Any, x: Any, t: Any) -> Any:
        y, valid = net(x), t >= 0
        each = [F.sum(y[i] ** 2) for i in range(len(t))]
        return sum(each) / len(each) + F.sum(y[:, 0] * valid) / max(1, int(valid.sum()))

    for weight in (None, lambda x, t: len(x), lambda x, t: (t >= 0).sum()):
        with pytest.raises(AccumulationError, match=r"divided by \d+ at test_\S+:\d+"):
            apart_after(linear, loss, (SOME,), micro_batch=5, weight=weight)


# -- one sample a call -----------------------------------------------------------------------------


def mixing(net: Any, x: Any) -> Any:
    y = net(x)
    return F.mean(F.square(F.matmul(F.softmax(F.matmul(y, y, transb=True)), y)))


def test_one_sample_a_call_is_compared_with_the_call_before() -> None:
    np.random.seed(0)
    net = L.Linear(6, 5)
    before = net.W.array.copy()
    x = np.random.randn(8, 6).astype("f")
    with (
        accumulate(optimizer := chainer.optimizers.SGD(1).setup(net), steps=8),
        pytest.raises(AccumulationError, match=r"mixes samples|of its norm away"),
    ):
        for k in range(8):
            optimizer.update(lambda x: mixing(net, x), x[k : k + 1])
    assert (net.W.array == before).all()


def test_one_sample_a_call_that_cannot_be_compared_is_said() -> None:
    np.random.seed(0)
    net = L.Convolution2D(1, 2, 1)
    images = [np.ones((1, 1, size, size), "f") for size in (4, 5)]
    with (
        accumulate(optimizer := chainer.optimizers.SGD(1).setup(net), steps=2),
        pytest.warns(AccumulationWarning, match="one sample a call"),
    ):
        for image in images:
            optimizer.update(lambda x: F.sum(net(x)), image)
    assert optimizer.t == 1


# -- parameters that are made on the way -----------------------------------------------------------


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
