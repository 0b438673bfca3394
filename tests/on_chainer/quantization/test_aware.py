"""Training for few bits: what is rounded, what gradients are, and what `quantize` then gives."""

from __future__ import annotations

import copy
import io
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import quantization_oracle as oracle

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.link_hooks
import chainer.links as L

from tests.on_chainer.quantization.test_quantize import called
from umem.chainer import quantization_aware, quantize
from umem.errors import AccumulationError, QuantizationError, StateError

Array = np.ndarray[Any, Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


class Network(chainer.Chain):  # type: ignore[misc]
    """Words, a convolution in groups, normalised, and a layer whose size is not known yet."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(20, 8, ignore_label=-1)
            self.conv = L.Convolution2D(4, 6, (1, 3), stride=(1, 2), pad=(0, 1), groups=2)
            self.norm, self.score = L.BatchNormalization(6), L.Linear(None, 5)

    def forward(self, x: Any) -> Any:
        y = F.reshape(self.embed(x), (-1, 4, 2, 4))
        return self.score(F.relu(self.norm(self.conv(y))))


WORDS = np.random.default_rng(1).integers(-1, 20, (16, 4)).astype("i")
LABELS = (WORDS.sum(axis=1) % 5).astype("i")


def network(seed: int = 0) -> Network:
    np.random.seed(seed)
    return Network()


def train(model: Any, steps: int, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or chainer.optimizers.Adam(0.01).setup(model)
    losses = []
    for _ in range(steps):
        loss = F.softmax_cross_entropy(model(WORDS), LABELS)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    return losses


@pytest.mark.parametrize(("bits", "activation", "group"), [
    (4, 8, None), (4, 4, 8), (8, 8, None), (8, 4, None)
])  # fmt: skip
def test_what_is_evaluated_is_what_quantize_gives_to_the_bit(
    bits: int, activation: int, group: int | None
) -> None:
    model = network()
    quantization_aware(model, bits, activation_bits=activation, group=group)
    losses = train(model, 30)
    assert losses[-1] < 0.7 * losses[0]
    small = quantize(model)
    assert small.quantization_report.stays.keys() == {"/norm"}
    assert small.conv.scheme.bits == bits and small.conv.scheme.group == group
    assert (called(small, WORDS) == called(model, WORDS)).all()
    with chainer.using_config("train", False):  # a graph: floats, which rounding may set apart
        trained = model(WORDS).array
    scale = np.abs(trained).max()
    assert 0 <= np.abs(trained - called(small, WORDS)).max() < 1e-2 * scale


@pytest.mark.parametrize("kind", [L.LSTM, L.StatefulGRU])
def test_a_recurrent_link_that_trained_so_is_quantised_as_it_is_evaluated(kind: Any) -> None:
    np.random.seed(0)
    model = L.Classifier(chainer.Sequential(L.EmbedID(20, 6), kind(6, 6), L.Linear(6, 5)))
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    quantization_aware(model)
    for _ in range(5):
        loss = model(WORDS[:, 0] % 20, LABELS) + model(WORDS[:, 1] % 20, LABELS)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        model.predictor[1].reset_state()
    small = quantize(model)
    assert not small.quantization_report.stays
    for step in range(3):
        words = WORDS[:, step] % 20
        assert (called(small.predictor, words) == called(model.predictor, words)).all()


def test_training_computes_with_what_codes_stand_for() -> None:
    link, x = L.Linear(6, 3, initial_bias=numbers(3)), numbers(7, 6)
    with quantization_aware(link, 4):
        y = link(x)
        codes, scales = oracle.weight_codes(link.W.array, 7)
        weight = codes.astype("f") * scales[:, None]
        scale, zero = oracle.range_of(x.min(), x.max(), 255)
        rounded = ((oracle.input_codes(x, scale, zero, 255) - zero) * scale).astype("f")
        assert np.allclose(y.array, rounded @ weight.T + link.b.array, rtol=1e-6, atol=1e-6)


def test_gradients_go_straight_through_the_rounding_and_stop_outside_of_the_range() -> None:
    link, x = L.Linear(6, 3), numbers(7, 6)
    with quantization_aware(link, 4):
        link(x)
        codes, scales = oracle.weight_codes(link.W.array, 7)
        weight = codes.astype("f") * scales[:, None]
        low, high = min(x.min(), 0), max(x.max(), 0)
        given = chainer.Variable(2 * x)
        with chainer.using_config("train", False):  # the range stays
            y = link(given)
        gradient = y.grad = numbers(7, 3, seed=4)
        link.cleargrads()
        y.backward()
        scale, zero = oracle.range_of(low, high, 255)
        is_inside = (given.array >= low - scale / 2) & (given.array <= high + scale / 2)
        assert 0 < is_inside.sum() < is_inside.size
        rounded = ((oracle.input_codes(2 * x, scale, zero, 255) - zero) * scale).astype("f")
        assert np.allclose(given.grad, (gradient @ weight) * is_inside, rtol=1e-5, atol=1e-6)
        assert np.allclose(link.W.grad, gradient.T @ rounded, rtol=1e-5, atol=1e-5)
        assert np.allclose(link.b.grad, gradient.sum(axis=0), rtol=1e-5)


def test_ranges_follow_the_batches_of_training_alone() -> None:
    link = L.Linear(4, 2)
    quantization_aware(link)
    batches = [numbers(5, 4, seed=seed) * (seed + 1) for seed in range(3)]
    expected = np.zeros(2)
    for number, x in enumerate(batches):
        link(x)
        seen = np.array([min(x.min(), 0), max(x.max(), 0)])
        expected = seen if number == 0 else 0.95 * expected + 0.05 * seen
    called(link, 100 * batches[0])
    bad = batches[0].copy()
    bad[0, 0] = np.nan
    link(bad)
    assert np.allclose(link.input_range, expected, rtol=1e-6)


def test_what_runs_again_widens_a_range_once() -> None:
    plain, again = L.Linear(4, 2, initialW=numbers(2, 4)), L.Linear(4, 2, initialW=numbers(2, 4))
    for link, call in ((plain, plain), (again, lambda x: F.forget(again, x))):
        quantization_aware(link)
        for seed in range(2):
            y = call(chainer.Variable(numbers(5, 4, seed=seed) * (seed + 1)))
            link.cleargrads()
            F.sum(y**2).backward()
    assert (plain.input_range == again.input_range).all()
    assert (plain.W.grad == again.W.grad).all()


def test_parameters_names_and_the_optimizer_stay_and_undo_gives_the_links_back() -> None:
    model = network()
    train(model, 1)
    optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
    parameters = dict(model.namedparams())
    links = [type(link) for link in model.links()]
    persistents = [sorted(link._persistent) for link in model.links()]
    before = called(model, WORDS)
    aware = quantization_aware(model, keep="/score")
    assert dict(model.namedparams()) == parameters
    assert type(model.score) is L.Linear and isinstance(model.conv, L.Convolution2D)
    assert type(model.conv) is not L.Convolution2D
    aware.undo()
    assert (called(model, WORDS) == before).all()
    with quantization_aware(model):
        train(model, 3, optimizer)
    assert [type(link) for link in model.links()] == links
    assert [sorted(link._persistent) for link in model.links()] == persistents
    assert optimizer.t == 3 and (called(model, WORDS) != before).any()
    with pytest.raises(StateError, match="undone already"):
        aware.undo()


def test_copies_and_files_have_the_ranges() -> None:
    model = network()
    quantization_aware(model)
    train(model, 3)
    expected = called(model, WORDS)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, model)
    file.seek(0)
    other = network(5)
    quantization_aware(other)
    chainer.serializers.load_npz(file, other)
    for each in (other, copy.deepcopy(model), model.copy(), model.copy(mode="copy")):
        assert (called(each, WORDS) == expected).all()
        assert (called(quantize(each), WORDS) == expected).all()


def test_other_ways_to_save_memory_go_with_it() -> None:
    x = numbers(64, 16)
    labels = (np.arange(64) % 5).astype("i")
    found: dict[str, tuple[list[float], Array]] = {}
    for name in ("plain", "recompute", "half", "saved"):
        np.random.seed(0)
        sizes = [16, *[32] * 6]
        layers = [part for a, b in pairwise(sizes) for part in (L.Linear(a, b), F.tanh)]
        model = chainer.Sequential(*layers, L.Linear(32, 5))
        optimizer = chainer.optimizers.Adam(0.01).setup(model)
        losses: list[float] = []
        with ExitStack() as stack:
            stack.enter_context(quantization_aware(model))
            if name == "recompute":
                stack.enter_context(umem.chainer.Recompute("85%"))
            if name == "half":
                stack.enter_context(umem.chainer.half_precision(model, optimizer))
            if name == "saved":
                stack.enter_context(umem.chainer.saved_in("bfloat16"))
            for _ in range(8):
                loss = F.softmax_cross_entropy(model(x), labels)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses.append(float(loss.array))
                del loss
            small = quantize(model)
            assert (called(small, x) == called(model, x)).all()
        found[name] = losses, model[0].W.array
    assert found["recompute"][0] == found["plain"][0]
    assert (found["recompute"][1] == found["plain"][1]).all()
    for name in ("half", "saved"):
        assert np.allclose(found[name][0], found["plain"][0], rtol=0.02)


def test_parts_of_a_batch_are_refused_since_each_would_move_the_ranges() -> None:
    model = L.Linear(4, 3)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    quantization_aware(model)
    x, labels = numbers(8, 4), (np.arange(8) % 3).astype("i")
    with umem.chainer.accumulate(optimizer, micro_batch=2):
        with pytest.raises(AccumulationError, match="its state from part to part"):
            optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, labels)


def test_a_layer_without_a_range_computes_in_floats_and_stays_so() -> None:
    model = chainer.Sequential(L.Linear(4, 3), L.Linear(3, 2))
    x, plain = numbers(5, 4), copy.deepcopy(model)
    quantization_aware(model)
    assert (called(model, x) == called(plain, x)).all()
    model[0](x)
    small = quantize(model)
    assert small.quantization_report.stays == {"/1": "never called in training"}
    assert type(small[1]) is L.Linear and type(model[1]) is not L.Linear
    model[1](numbers(5, 3))
    kept = quantize(model, keep=["1"])
    assert type(kept[1]) is L.Linear and not hasattr(kept[1], "input_range")
    assert (called(kept, x) == called(plain[1], called(kept[0], x))).all()


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = network()
    for how, match in (({"bits": 2}, "8 or 4"), ({"keep": ["none"]}, "keep names /none")):
        with pytest.raises(QuantizationError, match=match):
            quantization_aware(model, **how)  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match="no layer can train so"):
        quantization_aware(L.BatchNormalization(3))
    assert type(model.conv) is L.Convolution2D
    aware = quantization_aware(model)
    with pytest.raises(StateError, match="undo"):
        quantization_aware(model)
    train(model, 1)
    with pytest.raises(QuantizationError, match=r"was trained for .*bits=4.* but .*bits=8"):
        quantize(model, bits=8)
    small = quantize(model, bits=4)
    with pytest.raises(StateError, match="is quantised"):
        quantization_aware(small)
    aware.undo()
    with pytest.raises(QuantizationError, match="calibration is needed"):
        quantize(model)
    assert umem.chainer.quantize(model, WORDS).conv.scheme.bits == 8


# -- link hooks ------------------------------------------------------------------------------------


HOOKS = {
    "spectral normalisation": chainer.link_hooks.SpectralNormalization,
    "weight standardisation": chainer.link_hooks.WeightStandardization,
}


@pytest.mark.parametrize("when", ["before", "while it is on"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_layer_with_link_hooks_stays_in_floats_here_and_in_quantize(kind: str, when: str) -> None:
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 4))
    x = numbers(6, 8)
    if when == "before":
        model[0].add_hook(HOOKS[kind]())
    with quantization_aware(model):
        if when != "before":
            model[0].add_hook(HOOKS[kind]())
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        for _ in range(2):
            optimizer.update(lambda: F.mean(model(x) ** 2))
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            evaluated = model(x).array
            few = quantize(model)
            assert type(few[0]) is L.Linear and type(few[2]) is not L.Linear
            assert "it has link hooks" in str(few.quantization_report)
            np.testing.assert_array_equal(few(x).array, evaluated)
    assert type(model[0].W) is chainer.Parameter
