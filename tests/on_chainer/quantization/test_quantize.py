"""Quantised models compute what the papers say, to the bit, and what cannot be is said."""

from __future__ import annotations

import copy
import io
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import quantization_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer import quantize
from umem.chainer.quantization.integer_products import integer_product
from umem.chainer.quantization.quantized_links import (
    QuantizedConvolution2D,
    QuantizedEmbedID,
    QuantizedLinear,
)
from umem.chainer.quantization.quantized_weight import QuantizedWeight
from umem.chainer.quantization.scheme import Scheme
from umem.errors import QuantizationError, StateError, UnsupportedError

Array = np.ndarray[Any, Any]


def numbers(*shape: int, seed: int = 0, dtype: str = "f") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def called(model: Any, *args: Any) -> Array:
    """What a model computes for a test."""
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        y: Array = model(*args).array
        return y


class Network(chainer.Chain):  # type: ignore[misc]
    """Every kind of link that is exchanged, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(20, 6)
            self.conv = L.Convolution2D(1, 4, 3, pad=1)
            self.norm = L.BatchNormalization(4)
            self.score = L.Linear(4 * 4 * 6, 5)

    def forward(self, x: Any) -> Any:
        y = F.expand_dims(self.embed(x), 1)
        return self.score(F.relu(self.norm(self.conv(y))))


def network(seed: int = 0) -> Network:
    np.random.seed(seed)
    return Network()


WORDS = np.random.default_rng(1).integers(0, 20, (8, 4)).astype("i")


# -- products ------------------------------------------------------------------------------------


class Whole:
    """A matrix of whole numbers, as `integer_product` takes it."""

    def __init__(self, weight: Array) -> None:
        self.weight = weight

    def part(self, rows: slice, columns: slice) -> Array:
        return self.weight[rows, columns].astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(1, 1500), st.integers(1, 5), st.integers(0, 9))
def test_products_are_those_of_integers_to_the_bit(m: int, k: int, n: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    codes, weight = generator.integers(-255, 256, (m, k)), generator.integers(-127, 128, (n, k))
    found = integer_product(codes.astype(np.float32), Whole(weight), slice(0, n))
    assert found.dtype == np.int32
    assert (found == codes @ weight.T).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("depth", [511, 512, 513, 1025, 60_000])
def test_the_largest_products_are_exact(depth: int, sign: int) -> None:
    """255 * 127 in every place is odd, so that a sum that float32 rounds would be even."""
    weight = np.full((600, depth), 127 * sign) if depth < 2000 else np.full((3, depth), 127 * sign)
    weight[1, -1] = 126 * sign
    codes = np.full((2, depth), 255)
    found = integer_product(codes.astype(np.float32), Whole(weight), slice(0, len(weight)))
    assert (found == (codes @ weight.T).astype(np.int32)).all()
    assert found[0, 0] == 255 * 127 * depth * sign


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.one_of(st.integers(1, 40), st.sampled_from([511, 513])),
       st.integers(1, 6), st.booleans(), st.sampled_from([-1, 0, 1]),
       st.sampled_from([4, 8]), st.sampled_from([4, 8]), st.integers(0, 99))  # fmt: skip
def test_a_linear_layer_is_the_papers_to_the_bit(
    m: int, k: int, n: int, has_bias: bool, sign: int, bits: int, activation: int, seed: int
) -> None:
    x = numbers(m, k, seed=seed)
    x = sign * np.abs(x) if sign else x
    link = L.Linear(k, n, nobias=not has_bias, initialW=numbers(n, k, seed=seed + 1),
                    initial_bias=numbers(n, seed=seed + 2))  # fmt: skip
    small = quantize(link, x, bits, activation_bits=activation)
    more = 2 * numbers(5, k, seed=seed + 3)  # beyond the range, too: clipped
    bias = link.b.array if has_bias else None
    largest, levels = {8: 127, 4: 7}[bits], 2**activation - 1
    expected = oracle.linear(more, link.W.array, bias, x.min(), x.max(), largest, levels)
    found = called(small, more)
    assert found.dtype == np.float32 and found.flags.c_contiguous
    assert (found == expected).all()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_convolution_is_the_papers_to_the_bit(data: Any) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    groups = data.draw(st.sampled_from([1, 2, 3]))
    ins, outs = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    kernel, stride, pad, dilate = pair(1, 3), pair(1, 3), pair(0, 4), pair(1, 3)
    sizes = [dilate[a] * (kernel[a] - 1) + 1 + data.draw(st.integers(0, 3)) for a in (0, 1)]
    bits, has_bias = data.draw(st.sampled_from([4, 8])), data.draw(st.booleans())
    x = numbers(2, ins, *sizes, seed=data.draw(st.integers(0, 99)))
    link = L.Convolution2D(ins, outs, kernel, stride, pad, nobias=not has_bias, dilate=dilate,
                           groups=groups, initial_bias=numbers(outs))  # fmt: skip
    bias = link.b.array if has_bias else None
    expected = oracle.convolution(x, link.W.array, bias, x.min(), x.max(), stride, pad, dilate,
                                  groups, {8: 127, 4: 7}[bits])  # fmt: skip
    found = called(quantize(link, x, bits), x)
    assert found.shape == called(link, x).shape and found.flags.c_contiguous
    assert (found == expected).all()


def test_a_large_batch_goes_through_a_convolution_in_parts_of_it() -> None:
    """Columns of 64 * 9 * 32 * 32 floats are 2.25 MiB a sample, so that parts are of one."""
    link = L.Convolution2D(64, 3, 3, pad=1)
    x = numbers(3, 64, 32, 32)
    small = quantize(link, x)
    assert (called(small, x) == np.concatenate([called(small, each[None]) for each in x])).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_an_embedding_are_their_codes_times_their_scale(bits: int) -> None:
    link = L.EmbedID(7, 5, initialW=numbers(7, 5), ignore_label=-1)
    small = quantize(link, np.zeros((1, 2), "i"), bits)
    words = np.array([[3, -1], [6, 0]], "i")
    codes, scales = oracle.weight_codes(link.W.array, {8: 127, 4: 7}[bits])
    expected = codes[words].astype("f") * scales[words][..., None]
    expected[0, 1] = 0
    assert (called(small, words) == expected).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 1100), st.sampled_from([None, 8, 32, 512]),
       st.integers(0, 99))  # fmt: skip
def test_four_bits_come_back_from_their_bytes(
    rows: int, columns: int, group: int | None, seed: int
) -> None:
    weight = numbers(rows, columns, seed=seed) * numbers(rows, 1, seed=seed + 1)
    made = QuantizedWeight.of(weight, Scheme(4, 8, group))
    parts = [made.part(slice(0, rows), slice(at, min(at + 512, columns)))
             for at in range(0, columns, 512)]  # fmt: skip
    found = np.concatenate(parts, axis=1) * made.scales[:, None]
    if group is None:
        codes, scales = oracle.weight_codes(weight, 7)
        expected = codes.astype("f") * scales[:, None]
    else:
        expected = oracle.group_weight(weight, group)
    assert made.codes.shape == (rows, -(-columns // 2)) and made.codes.dtype == np.uint8
    assert (found == expected).all()
    assert (made.rows_at(np.arange(rows)) == expected).all()


@pytest.mark.parametrize("axes", [1, 2])
def test_batch_axes_are_those_of_the_link(axes: int) -> None:
    link, x = L.Linear(12, 5), numbers(2, 3, 4) if axes == 1 else numbers(2, 3, 12)
    small = quantize(link, [{"x": x, "n_batch_axes": axes}])
    with chainer.no_backprop_mode():
        found, like = small(x, n_batch_axes=axes), link(x, n_batch_axes=axes)
    assert found.shape == like.shape
    assert np.abs(found.array - like.array).max() < 0.05


# -- a model ---------------------------------------------------------------------------------------


def test_a_model_is_exchanged_and_the_one_in_floats_stays() -> None:
    model = network()
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.update(lambda: F.sum(model(WORDS) ** 2))
    arrays = {name: each.array.copy() for name, each in model.namedparams()}
    before, mean = called(model, WORDS), model.norm.avg_mean.copy()
    small = quantize(model, WORDS)
    assert type(small) is Network and small is not model
    kinds = [type(small.embed), type(small.conv), type(small.norm), type(small.score)]
    assert kinds == [
        QuantizedEmbedID, QuantizedConvolution2D, L.BatchNormalization, QuantizedLinear
    ]  # fmt: skip
    assert (called(model, WORDS) == before).all() and (model.norm.avg_mean == mean).all()
    assert all((arrays[name] == each.array).all() for name, each in model.namedparams())
    assert all(each.update_rule is not None for each in model.params())
    assert all(each.update_rule is None for each in small.params())
    assert np.abs(called(small, WORDS) - before).max() < 0.05 * np.abs(before).max()
    model.norm.avg_mean[...] = 9
    assert (small.norm.avg_mean == mean).all()


def test_the_report_has_bytes_and_what_stays() -> None:
    model = network()
    report = quantize(model, WORDS, keep=["score"]).quantization_report
    rows = {layer.path: layer for layer in report.layers}
    assert rows["/conv"].float_bytes == 4 * (36 + 4)
    assert rows["/conv"].quantized_bytes == 36 + 4 * 4 + 4 * 4 + 2 * 4
    assert rows["/embed"].quantized_bytes == 20 * 6 + 4 * 20
    assert report.stays == {
        "/norm": "no Linear, Convolution2D or EmbedID", "/score": "named in keep"
    }  # fmt: skip
    assert "/norm" in str(report) and "named in keep" in str(report)


class Tied(chainer.Chain):  # type: ignore[misc]
    """Words in and out by one matrix, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed, self.twice = L.EmbedID(50, 8), L.Linear(8, 8)
            self.out = L.Linear(8, 50, nobias=True)
            self.out.W = self.embed.W
        self.same = [self.twice]

    def forward(self, x: Any) -> Any:
        y = F.reshape(self.embed(x), (-1, 8))
        return self.out(self.same[0](F.tanh(self.twice(y))))


def test_a_shared_weight_is_quantised_once_and_every_reference_follows() -> None:
    np.random.seed(0)
    model = Tied()
    small = quantize(model, WORDS)
    assert small.out.weight is small.embed.weight
    assert small.same[0] is small.twice and type(small.twice) is QuantizedLinear
    rows = {layer.path: layer for layer in small.quantization_report.layers}
    assert rows["/embed"].quantized_bytes == 50 * 8 + 4 * 50
    assert rows["/out"].quantized_bytes == 2 * 4 and rows["/out"].float_bytes == 0
    assert np.abs(called(small, WORDS) - called(model, WORDS)).max() < 0.3


def test_what_is_tied_by_umem_is_quantised_once_and_comes_apart_where_one_stays() -> None:
    def tied() -> Any:
        np.random.seed(0)
        model = Tied()
        model.out.W = chainer.Parameter(numbers(50, 8))
        umem.chainer.tie(model, "/embed/W", "/out/W")
        return model

    model = tied()
    small = quantize(model, WORDS)
    assert small.out.weight is small.embed.weight
    for each in (small.copy(), small.copy(mode="copy")):
        assert (called(each, WORDS) == called(small, WORDS)).all()
    part = quantize(model, WORDS, keep=["out"])
    assert "/out/W" in dict(part.namedparams())
    rows = {layer.path: layer for layer in part.quantization_report.layers}
    assert rows["/out"].float_bytes == 0 and rows["/out"].quantized_bytes == 4 * 50 * 8
    assert "/out/W" not in dict(model.namedparams())
    assert dict(model.copy().namedparams()).keys() == dict(tied().namedparams()).keys()


def test_smaller_layers_are_made_of_layers_that_are_exchanged() -> None:
    np.random.seed(0)
    model = chainer.Sequential(L.Convolution2D(4, 8, 3, pad=1), F.relu, L.Linear(8 * 36, 64))
    x = numbers(5, 4, 6, 6)
    rules = {"/0": umem.chainer.layers.Separable(), "/1": umem.chainer.layers.LowRank(rank=8)}
    umem.chainer.slimmer(model, rules, x, quiet=True)
    small = quantize(model, x)
    assert not small.quantization_report.stays and len(small.quantization_report.layers) == 4
    assert np.abs(called(small, x) - called(model, x)).max() < 0.05


def test_a_layer_whose_weight_others_read_stays_in_floats() -> None:
    class Decoding(chainer.Chain):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.embed, self.rnn = L.EmbedID(20, 6), L.LSTM(6, 6)
                self.last = L.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            self.rnn.reset_state()
            y = self.last(self.rnn(F.sum(self.embed(x), axis=1)))
            return F.linear(y, self.embed.W)

    np.random.seed(0)
    model = Decoding()
    called(model, WORDS)
    small = quantize(model, WORDS)
    assert small.quantization_report.stays["/embed"] == "its W is read from outside"
    assert type(small.last) is QuantizedLinear and type(small.embed) is L.EmbedID
    assert np.abs(called(small, WORDS) - called(model, WORDS)).max() < 0.1


class Reading(chainer.Chain):  # type: ignore[misc]
    """A recurrent network with a state, one word a call."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.embed, self.rnn, self.out = L.EmbedID(20, 6), kind(6, 6), L.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.rnn(self.embed(x)))


@pytest.mark.parametrize("kind", [L.LSTM, L.StatefulGRU, L.StatefulPeepholeLSTM])
def test_states_of_recurrent_links_are_not_those_of_the_calibration(kind: Any) -> None:
    np.random.seed(0)
    model, words = Reading(kind), WORDS[:, :3].T
    small = quantize(model, list(words))
    assert not small.quantization_report.stays
    assert model.rnn.h is None and small.rnn.h is None
    with pytest.raises(QuantizationError, match="batch 2"):
        quantize(model, [words[0], words[1], numbers(3)])
    assert model.rnn.h is None
    for _ in range(2):
        for word in words[:, :2]:
            assert np.abs(called(small, word) - called(model, word)).max() < 0.05
        small.rnn.reset_state()
        model.rnn.reset_state()
    loaded = pickle.loads(pickle.dumps(small))
    assert (called(loaded, words[0]) == called(small, words[0])).all()


def test_lists_of_arrays_are_arguments_in_a_tuple() -> None:
    class Lines(chainer.Chain):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.embed, self.rnn = L.EmbedID(20, 6), L.NStepLSTM(1, 6, 5, 0.1)
                self.out = L.Linear(5, 3)

        def forward(self, lines: Any) -> Any:
            return self.out(self.rnn(None, None, [self.embed(line) for line in lines])[0][0])

    np.random.seed(0)
    model, lines = Lines(), [WORDS[0], WORDS[1, :3]]
    small = quantize(model, [(lines,)])
    assert np.abs(called(small, lines) - called(model, lines)).max() < 0.05


def test_what_a_classifier_notes_stays_and_an_evaluator_takes_the_copy() -> None:
    np.random.seed(0)
    model = L.Classifier(chainer.Sequential(L.Linear(6, 5), F.relu, F.dropout, L.Linear(5, 3)))
    optimizer = chainer.optimizers.Adam().setup(model)
    x, t = numbers(8, 6), np.arange(8, dtype="i") % 3
    optimizer.update(model, x, t)
    noted = model.y, model.loss, model.accuracy
    small = quantize(model, [(x, t)])
    assert all(a is b for a, b in zip(noted, (model.y, model.loss, model.accuracy), strict=True))
    asked = chainer.datasets.TupleDataset(x, t)
    iterator = chainer.iterators.SerialIterator(asked, 4, repeat=False, shuffle=False)
    found = chainer.training.extensions.Evaluator(iterator, small)()
    log = F.softmax_cross_entropy(called(small.predictor, x), t).array
    assert abs(found["main/loss"] - log) < 1e-6


def test_a_layer_whose_inputs_float32_has_not_stays() -> None:
    with chainer.using_config("dtype", np.dtype("d")):
        model = chainer.Sequential(L.Linear(3, 3), lambda y: y * 1e-200, L.Linear(3, 2))
    x = numbers(4, 3, dtype="d") * 1e200
    stays = quantize(model, x).quantization_report.stays
    assert stays == {"/0": "its input had numbers beyond float32"}


def test_sequences_with_functions_and_single_links_are_models_too() -> None:
    np.random.seed(0)
    inner = chainer.Sequential(L.Linear(5, 4), lambda y: F.relu(y))
    model = chainer.Sequential(inner, F.tanh, L.Linear(4, 3))
    x = numbers(6, 5)
    small = quantize(model, [x[:3], x[3:]])
    assert type(small[0][0]) is QuantizedLinear and type(model[0][0]) is L.Linear
    assert np.abs(called(small, x) - called(model, x)).max() < 0.05
    assert type(quantize(model[2], numbers(2, 4))) is QuantizedLinear


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_results_have_the_type_of_the_model_in_floats(dtype: str) -> None:
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = network()
    small = quantize(model, WORDS, 8)
    found, like = called(small, WORDS), called(model, WORDS)
    assert found.dtype == like.dtype == np.dtype(dtype)
    assert np.abs(found - like).max() < 0.05 * np.abs(like).max()
    assert small.score.weight.scales.dtype == np.float32


def test_a_model_in_half_precision_is_quantised_from_its_halves() -> None:
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(6, 5), F.relu, L.Linear(5, 3))
    optimizer = chainer.optimizers.Adam().setup(model)
    x = numbers(8, 6)
    with umem.chainer.half_precision(model, optimizer):
        assert model[0].W.dtype == np.float16
        small = quantize(model, x)
        found, like = called(small, x), called(model, x)
    codes, scales = oracle.weight_codes(model[0].W.array.astype(np.float16), 127)
    assert (small[0].weight.codes == codes).all() and (small[0].weight.scales == scales).all()
    assert np.abs(found - like).max() < 0.05 and type(model[0]) is L.Linear


def test_copies_pickles_and_chainers_files_compute_the_same() -> None:
    small = quantize(network(), WORDS, 4, group=8)
    expected, other = called(small, WORDS), quantize(network(3), WORDS, 4, group=8)
    assert (called(other, WORDS) != expected).any()
    file = io.BytesIO()
    chainer.serializers.save_npz(file, small)
    file.seek(0)
    chainer.serializers.load_npz(file, other)
    copies = [small.copy(mode="copy"), small.copy(), copy.deepcopy(small),
              pickle.loads(pickle.dumps(small)), other]  # fmt: skip
    assert all((called(each, WORDS) == expected).all() for each in copies)


def test_a_weight_is_never_in_floats_as_a_whole() -> None:
    """16 MiB in floats, 4 in codes; a chunk is 1 MiB, and what is made of one a few."""
    link = L.Linear(2048, 2048)
    x = numbers(4, 2048)
    tracemalloc.start()
    try:
        small = quantize(link, x)
        peak = tracemalloc.get_traced_memory()[1]
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        called(small, x)
        running = tracemalloc.get_traced_memory()[1] - kept
    finally:
        tracemalloc.stop()
    assert 4 << 20 <= kept < 4.2 * (1 << 20)
    assert peak < 10 << 20
    assert running < 2 << 20


@pytest.mark.parametrize("group", [None, 32])
def test_a_row_that_is_longer_than_a_chunk_is_not_in_floats_as_a_whole_either(
    group: int | None,
) -> None:
    """A row is 16 MiB in floats; the codes are 4, and of a row 4 in int8 and 8 while it is packed.

    A float32 copy of a row beside both kinds of codes were 24.
    """
    weight = numbers(2, 4 << 20)
    tracemalloc.start()
    try:
        made = QuantizedWeight.of(weight, Scheme(4, 8, group))
        made.largest_sum()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (19 if group is None else 23) << 20
    for columns in (slice(0, 512), slice(2 << 20, (2 << 20) + 512)):
        if group is None:
            codes, _ = oracle.weight_codes(np.c_[weight[:, columns], abs(weight).max(axis=1)], 7)
            assert (made.part(slice(0, 2), columns) == codes[:, :-1]).all()
    assert made.largest_sum() == 255 * max(
        sum(int(abs(made.part(slice(row, row + 1), slice(at, at + 512))).sum())
            for at in range(0, 4 << 20, 512))
        for row in (0, 1)
    )  # fmt: skip


def test_inputs_in_one_range_have_the_codes_that_the_range_has() -> None:
    """A relu's output: nothing is below zero, and the zero point is 0."""
    small = quantize(L.Linear(3, 2), np.array([[0, 0.5, 2.55]], "f"))
    assert small.step[1] == 0 and small.step[0] == np.float32(2.55 / 255)
    small = quantize(L.Linear(3, 2), np.array([[-1, 0.5, -3]], "f"))
    assert 0 < small.step[1] < 255


def test_a_channel_of_zeros_gives_its_bias() -> None:
    link = L.Linear(4, 3, initial_bias=numbers(3))
    link.W.array[1] = 0
    small = quantize(link, numbers(5, 4))
    assert (called(small, numbers(2, 4, seed=5))[:, 1] == link.b.array[1]).all()


def test_there_are_no_gradients_and_a_sentence_says_so() -> None:
    small = quantize(network(), WORDS)
    loss = F.sum(small(WORDS))
    with pytest.raises(UnsupportedError, match=r"'score' is quantised .* has no gradient"):
        loss.backward()
    optimizer = chainer.optimizers.SGD(1.0).setup(small)
    gamma = small.norm.gamma.array.copy()
    with pytest.raises(UnsupportedError, match="has no gradient"):
        optimizer.update(lambda: F.sum(small(WORDS)))
    assert (small.norm.gamma.array == gamma).all()
    link = quantize(L.Linear(3, 2), numbers(2, 3))
    with pytest.raises(UnsupportedError, match="quantization_aware"):
        F.sum(link(numbers(2, 3))).backward()


# -- what cannot be ----------------------------------------------------------------------------


def refused(match: str, *args: Any, error: type[Exception] = QuantizationError, **how: Any) -> None:
    """See that a model is refused, and stays as it was."""
    model = args[0]
    links = [type(each) for each in model.links()]
    arrays = {name: None if each.array is None else each.array.copy()
              for name, each in model.namedparams()}  # fmt: skip
    with pytest.raises(error, match=match):
        quantize(*args, **how)
    assert [type(each) for each in model.links()] == links
    for name, each in model.namedparams():
        was = arrays[name]
        assert (each.array is None) == (was is None)
        assert was is None or np.array_equal(each.array, was, equal_nan=True)


def test_bad_calibration_is_refused_by_what_is_wrong_with_it() -> None:
    model, x = chainer.Sequential(L.Linear(4, 3), F.relu, L.Linear(3, 2)), numbers(5, 4)
    refused("calibration is needed", model)
    refused("has no batch", model, [])
    batches = (each for each in [x])
    quantize(model, batches)
    refused("was read before", model, batches)
    refused("batch 0 of the calibration is empty", model, x[:0])
    refused("batch 1 of the calibration, float32 of shape .5, 3., cannot run", model, [x, x[:, 1:]])
    refused("batch 0 of the calibration is a list", model, [[(x[0], 1)]])
    refused("not int", model, 3)
    refused("not str", model, "digits")
    bad = x.copy()
    bad[2, 1] = np.nan
    refused("batch 1 of the calibration: the input of /0 has NaN", model, [x, bad])
    bad[2, 1] = np.inf
    refused("the input of /0 has NaN or infinity", model, bad)


def test_bad_models_are_refused_by_name() -> None:
    x = numbers(5, 4)
    model = chainer.Sequential(L.Linear(4, 3), L.Linear(3, 2))
    for bad in (np.nan, np.inf, -np.inf):
        model[1].W.array[0, 1] = bad
        refused("/1/W has NaN", model, x)
    refused("/0/W is not initialised", chainer.Sequential(L.Linear(3)), x)
    refused("no layer can be quantised: /: no Linear", L.BatchNormalization(4), x)
    refused("no layer can be quantised: there is none", chainer.Sequential(F.relu), x)
    refused("keep names /two, which the model has not; it has /, /0", _plain(), x, keep=["two"])
    refused("quantised already", quantize(_plain(), x), x, error=StateError)


def _plain() -> Any:
    return chainer.Sequential(L.Linear(4, 3))


@pytest.mark.parametrize(("how", "match"), [
    ({"bits": 3}, "bits is 8 or 4, not 3"), ({"bits": True}, "not True"),
    ({"bits": "8"}, "not '8'"), ({"bits": 8.0}, "bits is 8 or 4, not 8.0"),
    ({"activation_bits": 16}, "activation_bits is 8 or 4"),
    ({"group": 32}, "groups are for weights of 4 bits"), ({"bits": 4, "group": 33}, "not 33"),
])  # fmt: skip
def test_bits_that_are_not_are_refused(how: dict[str, Any], match: str) -> None:
    refused(match, _plain(), numbers(2, 4), **how)


def test_what_cannot_be_exchanged_stays_and_is_named() -> None:
    class Other(L.Linear):  # type: ignore[misc]
        pass

    class Odd(chainer.Chain):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.one, self.other, self.never = L.Linear(4, 4), Other(4, 4), L.Linear(4, 4)
                self.zero, self.prelu = L.Linear(4, 4), L.PReLU((4,))
                self.wide = L.Linear(70_000, 1)

        def forward(self, x: Any) -> Any:
            wide = self.wide(F.broadcast_to(F.sum(x), (1, 70_000)))
            return self.zero(0 * x) + self.prelu(self.other(self.one(x))) + F.sum(wide)

    np.random.seed(0)
    model = Odd()
    model.wide.W.array[...] = 1
    small = quantize(model, numbers(3, 4))
    assert small.quantization_report.stays == {
        "/never": "never called in calibration",
        "/other": "a subclass of Linear, which may compute something else",
        "/prelu": "no Linear, Convolution2D or EmbedID",
        "/wide": "sums of its products could pass int32",
        "/zero": "its input was zero throughout calibration",
    }
    assert type(small.one) is QuantizedLinear and type(small.wide) is L.Linear


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    import threading

    model = _plain()
    model.lock = threading.Lock()
    with pytest.raises(QuantizationError, match="cannot be copied"):
        quantize(model, numbers(2, 4))


def test_nan_in_an_input_is_refused_when_it_comes() -> None:
    small = quantize(_plain(), numbers(5, 4))
    x = numbers(5, 4)
    x[1, 1] = np.nan
    with pytest.raises(QuantizationError, match="the input of '0' has NaN"):
        called(small, x)
    x[1, 1] = np.inf  # the largest code
    assert np.isfinite(called(small, x)).all()


def test_inputs_of_another_shape_are_refused_as_by_chainer() -> None:
    small = quantize(_plain(), numbers(5, 4))
    with pytest.raises(chainer.utils.type_check.InvalidType):
        called(small, numbers(5, 3))
    conv = quantize(L.Convolution2D(2, 3, 3), numbers(1, 2, 4, 4))
    for shape in ((1, 3, 4, 4), (1, 2, 2, 4), (2, 4, 4)):
        with pytest.raises(chainer.utils.type_check.InvalidType):
            called(conv, numbers(*shape))


def test_a_function_of_its_kind_is_in_a_recording() -> None:
    small = quantize(_plain(), numbers(5, 4))
    with umem.record() as recorder:
        called(small, numbers(5, 4))
    assert "QuantizedLinear" in {op.name for op in recorder.trace.ops}
