"""A model in half precision: its types, losses and loss scale, what is saved, and the way back."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem
from umem.errors import PrecisionError, StateError, UnsupportedError

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer import half_precision

Array = np.ndarray[Any, Any]
STEPS = 6


class Images(chainer.Chain):  # type: ignore[misc]
    """A small convolutional network with batch normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.second = L.Convolution2D(8, 8, 3, stride=2)
            self.last = L.Linear(None, 5)

    def forward(self, x: Array) -> Any:
        h = F.max_pooling_2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(F.dropout(F.relu(self.second(h)), 0.1))


class Text(chainer.Chain):  # type: ignore[misc]
    """A small language model with attention and layer normalisation; the embedding is tied."""

    def __init__(self, width: int = 16, words: int = 40) -> None:
        super().__init__()
        with self.init_scope():
            self.words = L.EmbedID(words, width, initialW=chainer.initializers.Normal(0.2))
            self.norm = L.LayerNormalization(width)
            self.mixed = L.Linear(width, 3 * width)
            self.inner = L.Linear(width, width)

    def forward(self, x: Array) -> Any:
        count, length = x.shape
        h = self.words(x)
        q, k, v = F.split_axis(self.mixed(self._normal(h), n_batch_axes=2), 3, axis=2)
        scores = F.matmul(q, k, transb=True) * 0.25
        hidden = np.broadcast_to(np.tril(np.ones((length, length), bool)), scores.shape)
        scores = F.where(hidden, scores, np.full(scores.shape, -1e9, "f"))
        h = h + F.matmul(F.softmax(scores, axis=2), v)
        h = h + F.tanh(self.inner(self._normal(h), n_batch_axes=2))
        return F.linear(h.reshape(count * length, -1), self.words.W)

    def _normal(self, h: Any) -> Any:
        return self.norm(h.reshape(-1, h.shape[2])).reshape(h.shape)


def images(seed: int = 0) -> tuple[Any, tuple[Array, Array]]:
    np.random.seed(seed)
    x = np.random.randn(12, 3, 10, 10).astype("f")
    return L.Classifier(Images()), (x, np.random.randint(0, 5, 12).astype("i"))


def text(seed: int = 0) -> tuple[Any, tuple[Array, Array]]:
    np.random.seed(seed)
    model = Text()
    x = np.random.randint(0, 40, (6, 9)).astype("i")
    return L.Classifier(model), (x[:, :-1], x[:, 1:].reshape(-1))


def set_up(model: Any, kind: Any = chainer.optimizers.Adam, rate: float = 3e-3) -> Any:
    return kind(rate).setup(model)


def train(model: Any, optimizer: Any, batch: Any, steps: int = STEPS) -> list[float]:
    """The losses of some steps."""
    losses = []
    for _ in range(steps):
        optimizer.update(model, *batch)
        losses.append(float(model.loss.array))
    return losses


def values(model: Any) -> dict[str, bytes]:
    return {name: p.array.tobytes() for name, p in model.namedparams()}


class Blowing(chainer.Link):  # type: ignore[misc]
    """A weight whose gradient is what is given."""

    def __init__(self, values: Any = (1, 1, 1)) -> None:
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.array(values, "f"))

    def forward(self, factor: float) -> Any:
        return F.sum(self.w * np.full(3, factor, "f"))


# -- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [images, text])
def test_parameters_are_halves_but_for_normalisation_and_states_are_single(make: Any) -> None:
    model, batch = make()
    optimizer = set_up(model)
    with half_precision(model, optimizer):
        train(model, optimizer, batch, 2)
        for name, parameter in model.namedparams():
            kept = "/norm/" in name
            assert parameter.dtype == (np.float32 if kept else np.float16), name
            assert parameter.grad.dtype == parameter.dtype
            assert {v.dtype for v in parameter.update_rule.state.values()} == {np.dtype("f")}
        assert model.loss.dtype == np.float32
        assert model.y.dtype == np.float16


def test_statistics_of_batch_normalisation_stay_float32() -> None:
    model, batch = images()
    optimizer = set_up(model)
    with half_precision(model, optimizer):
        train(model, optimizer, batch, 1)
        norm = model.predictor.norm
        assert norm.avg_mean.dtype == norm.avg_var.dtype == np.float32
        assert norm.avg_mean.any()


def test_undo_gives_back_the_arrays_that_were_there_with_their_further_digits() -> None:
    model, batch = text()
    optimizer = set_up(model)
    arrays = {name: p.array for name, p in model.namedparams()}
    half = half_precision(model, optimizer)
    before = values(model)
    train(model, optimizer, batch, 2)
    halves = {name: p.array.copy() for name, p in model.namedparams()}
    half.undo()
    for name, parameter in model.namedparams():
        assert parameter.array is arrays[name]
        assert (parameter.array.dtype == np.float32 and parameter.grad is None) or "norm" in name
        assert np.array_equal(parameter.array.astype(halves[name].dtype), halves[name])
        assert parameter.update_rule._fp32_param is None
    assert values(model) != before
    assert train(model, optimizer, batch, 1)


def test_half_precision_without_a_step_changes_nothing() -> None:
    model, _ = text()
    optimizer, before = set_up(model), values(model)
    with half_precision(model, optimizer):
        assert values(model) != before
    assert values(model) == before


def test_names_in_keep_stay_float32() -> None:
    model, batch = text()
    optimizer = set_up(model)
    with half_precision(model, optimizer, keep=["predictor/words", "/predictor/inner/b"]):
        train(model, optimizer, batch, 2)
        single = {name for name, p in model.namedparams() if p.dtype == np.float32}
    assert single == {
        "/predictor/words/W", "/predictor/inner/b", "/predictor/norm/gamma", "/predictor/norm/beta",
    }  # fmt: skip


def test_parameters_that_get_their_array_later_start_as_in_float32() -> None:
    first, single = [], []
    for is_half in (False, True):
        np.random.seed(3)
        model = L.Classifier(chainer.Sequential(L.Linear(None, 7), F.relu, L.Linear(None, 5)))
        optimizer = set_up(model)
        half = half_precision(model, optimizer) if is_half else None
        x = np.random.randn(4, 6).astype("f")
        model.predictor(x)
        if half:
            assert {p.dtype for p in model.params()} == {np.dtype("e")}
            half.undo()
        (single if is_half else first).append(values(model))
    assert first == single


def test_a_model_in_float32_beside_it_computes_as_ever() -> None:
    other, batch = images(1)
    plain = train(other, set_up(other), batch)
    model, _ = text()
    other, batch = images(1)
    with half_precision(model, set_up(model)):
        assert train(other, set_up(other), batch) == plain


def test_a_recorded_step_shows_halves() -> None:
    model, batch = text()
    optimizer = set_up(model)
    with half_precision(model, optimizer):
        train(model, optimizer, batch, 1)
        with umem.record() as recorder:
            train(model, optimizer, batch, 1)
    lives = recorder.trace.lifetimes()
    found = {(life.alloc.kind, life.alloc.label): life.alloc.nbytes for life in lives.values()}
    assert found["parameter", "W"] in {2 * 40 * 16, 2 * 48 * 16, 2 * 16 * 16}
    assert found["activation", "Softmax"] == 2 * 6 * 8 * 8
    assert any(label == "Adam.fp32" for _, label in found)


# -- losses ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [images, text])
def test_losses_are_those_of_float32_within_two_percent(make: Any, seed: int) -> None:
    model, batch = make(seed)
    plain = train(model, set_up(model), batch, 20)
    model, batch = make(seed)
    optimizer = set_up(model)
    with half_precision(model, optimizer) as half:
        halves = train(model, optimizer, batch, 20)
        assert half.skipped_steps == 0
    assert halves != plain
    np.testing.assert_allclose(halves, plain, rtol=2e-2, atol=2e-3)


def by_hand(model: Any, optimizer: Any, batch: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(*batch)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    return losses


def test_backward_by_hand_is_scaled_as_an_update_with_a_loss_function() -> None:
    found = []
    for run in (train, by_hand):
        model, batch = text()
        optimizer = set_up(model)
        with half_precision(model, optimizer):
            found.append((run(model, optimizer, batch, STEPS), values(model)))
    assert found[0] == found[1]


def test_an_update_of_sgd_is_that_of_the_masters_by_the_gradients_in_float32() -> None:
    model, batch = text()
    optimizer = set_up(model, chainer.optimizers.SGD, 0.1)
    masters = {name: p.array.copy() for name, p in model.namedparams()}
    with half_precision(model, optimizer, scale=256):
        train(model, optimizer, batch, 1)
        for name, parameter in model.namedparams():
            expected = masters[name] - np.float32(0.1) * (parameter.grad.astype("f") / 256)
            masters[name] = expected.astype("f")
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(parameter.array, masters[name], rtol=1e-6, atol=1e-9)


def test_parameters_may_be_updated_one_by_one_without_the_optimizer() -> None:
    def trained(one_by_one: bool) -> dict[str, bytes]:
        model, batch = images()
        optimizer = set_up(model, chainer.optimizers.SGD)
        with half_precision(model, optimizer):
            model.cleargrads()
            model(*batch).backward()
            for update in [p.update for p in model.params()] if one_by_one else [optimizer.update]:
                update()
        return values(model)

    assert trained(True) == trained(False)


def test_small_updates_add_up_in_the_masters_where_halves_would_not_move() -> None:
    model = Blowing(np.ones(4))
    optimizer = set_up(model, chainer.optimizers.SGD, 1e-4)
    with half_precision(model, optimizer, scale=1024):
        for _ in range(20):
            optimizer.update(lambda: F.sum(model.w))
        assert (model.w.array == np.float16(1 - 20e-4)).all()
    np.testing.assert_allclose(model.w.array, 1 - 20e-4, rtol=1e-6)


def test_sums_beyond_what_a_half_can_hold_are_float32() -> None:
    model = Blowing(np.ones(70_000))
    with half_precision(model, set_up(model)):
        assert float(F.sum(model.w).array) == 70_000
        assert float(F.mean(model.w * 2).array) == 2


def test_constants_take_the_type_of_what_they_meet_and_are_cut_to_halves() -> None:
    model = Blowing()
    with half_precision(model, set_up(model)):
        y = model.w + np.array([1e9, -1e9, 0.5], "f")
        assert y.dtype == np.float16
        assert y.array.tolist() == [65504, -65504, 1.5]
        assert (y + F.sum(y)).dtype == np.float32


# -- the loss scale ----------------------------------------------------------------------------


def test_an_overflow_skips_the_step_with_hooks_and_count_and_halves_the_scale() -> None:
    model, calls = Blowing(), list[float]()
    optimizer = set_up(model, chainer.optimizers.MomentumSGD, 0.1)
    optimizer.add_hook(lambda method: calls.append(float(method.target.w.grad[0])), "hook")
    with half_precision(model, optimizer) as half:
        before = values(model)
        optimizer.update(model, 3.0)  # 3 * 65536 is beyond 65504
        assert (half.scale, half.skipped_steps, optimizer.t) == (32768, 1, 0)
        assert values(model) == before and not calls
        assert model.w.update_rule.t == 0
        optimizer.update(model, 0.5)
        assert (half.scale, half.skipped_steps, optimizer.t) == (32768, 1, 1)
        assert calls == [0.5] and values(model) != before


def test_the_scale_doubles_after_many_good_steps_in_a_row() -> None:
    model = Blowing()
    optimizer = set_up(model)
    with half_precision(model, optimizer, scale=4, interval=3) as half:
        scales = []
        for factor in (1.0, 1.0, 6e4, 1.0, 1.0, 1.0, 1.0):
            optimizer.update(model, factor)
            scales.append(half.scale)
    assert scales == [4, 4, 2, 2, 2, 4, 4]


def test_gradients_that_are_never_finite_are_an_error_that_says_so() -> None:
    model = Blowing()
    optimizer = set_up(model)
    with half_precision(model, optimizer) as half:
        before = values(model)
        for _ in range(16):
            optimizer.update(model, np.nan)
        assert half.scale == 1
        with pytest.raises(PrecisionError, match=r"/w is not finite at a loss scale of 1.*17 skip"):
            optimizer.update(model, np.nan)
        assert values(model) == before and optimizer.t == 0
        optimizer.update(model, 1.0)
        assert optimizer.t == 1


def test_a_loss_in_halves_is_scaled_by_what_a_half_can_hold() -> None:
    model = Blowing()
    optimizer = set_up(model, chainer.optimizers.SGD, 1.0)
    with half_precision(model, optimizer) as half:
        optimizer.update(lambda: (model.w * 1.0)[0])
        assert half.skipped_steps == 0
    np.testing.assert_array_equal(model.w.array, [0, 1, 1])


def against_each_other(*scales: float, anew: bool = False) -> list[Array]:
    """Two models that share a loss, the first of them in halves of these scales."""
    models = Blowing(), Blowing((2, 2, 2))
    optimizers = [set_up(model, chainer.optimizers.SGD, 0.25) for model in models]
    with ExitStack() as stack:
        halves = [
            stack.enter_context(half_precision(model, optimizer, scale=scale))
            for model, optimizer, scale in zip(models, optimizers, scales, strict=False)
        ]
        for _ in range(2):
            loss = F.sum(models[0].w * models[1].w)
            for model, optimizer in zip(models, optimizers, strict=True):
                if anew:
                    loss = F.sum(models[0].w * models[1].w)
                model.cleargrads()
                loss.backward()
                optimizer.update()
        assert not any(half.skipped_steps for half in halves)
    return [model.w.array for model in models]


def test_two_models_may_be_trained_against_each_other() -> None:
    np.testing.assert_allclose(against_each_other(512, 64), against_each_other(), rtol=2e-3)


def test_a_model_in_float32_may_be_trained_against_one_of_halves() -> None:
    plain = against_each_other(anew=True)
    np.testing.assert_allclose(against_each_other(512, anew=True), plain, rtol=2e-3)


def test_what_a_program_does_to_parameters_between_steps_is_kept() -> None:
    model, batch = text()
    optimizer = set_up(model)
    source, _ = text(5)
    with half_precision(model, optimizer):
        train(model, optimizer, batch, 2)
        model.predictor.inner.W.array[0] = 0.25
        model.predictor.mixed.copyparams(source.predictor.mixed)
        written = model.predictor.words.W.array.copy()
    assert (model.predictor.inner.W.array[0] == 0.25).all()
    halves = source.predictor.mixed.W.array.astype("e").astype("f")
    assert np.array_equal(model.predictor.mixed.W.array, halves)
    assert not np.array_equal(model.predictor.words.W.array, written.astype("f"))


# -- hooks -------------------------------------------------------------------------------------


def test_hooks_see_masters_and_gradients_without_the_scale() -> None:
    seen: list[Any] = []

    def look(method: Any) -> None:
        for name, parameter in method.target.namedparams():
            seen.append(
                (name, parameter.dtype, parameter.grad.copy(), method.target.compute_accuracy)
            )

    found = []
    for is_half in (False, True):
        model, batch = text()
        optimizer = set_up(model, chainer.optimizers.SGD, 0.1)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
        optimizer.add_hook(look, "look")
        half = half_precision(model, optimizer) if is_half else None
        train(model, optimizer, batch, 1)
        if half:
            half.undo()
        found.append(values(model))
    assert {kind for _, kind, _, _ in seen} == {np.dtype("f")}
    plain, halves = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    norm = np.sqrt(sum(float((grad**2).sum()) for _, _, grad, _ in halves))
    assert norm == pytest.approx(0.5, rel=1e-5)
    for (_, _, a, _), (_, _, b, _) in zip(plain, halves, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3)


def test_a_hook_after_the_update_clips_masters_and_parameters() -> None:
    model = Blowing()
    optimizer = set_up(model, chainer.optimizers.SGD, 0.25)

    def clip(method: Any) -> None:
        for parameter in method.target.params():
            parameter.array.clip(0.9, 1.1, out=parameter.array)

    optimizer.add_hook(clip, "clip", timing="post")
    with half_precision(model, optimizer, scale=1024):
        optimizer.update(model, 0.5)
        assert (model.w.array == np.float16(0.9)).all()
    assert (model.w.array == np.float32(0.9)).all()


def test_an_error_in_a_hook_leaves_everything_in_its_place() -> None:
    model, batch = text()
    optimizer = set_up(model)
    optimizer.add_hook(lambda method: 1 / 0, "hook")
    with half_precision(model, optimizer) as half:
        before = values(model)
        with pytest.raises(ZeroDivisionError):
            optimizer.update(model, *batch)
        assert optimizer.target is model and values(model) == before
        optimizer.remove_hook("hook")
        train(model, optimizer, batch, 1)
        assert half.state()["good_steps"] == 1


def test_a_parameter_that_is_not_updated_stays_and_is_not_judged() -> None:
    model, batch = text()
    optimizer = set_up(model)
    model.predictor.inner.disable_update()
    with half_precision(model, optimizer):
        before = values(model)
        train(model, optimizer, batch, 2)
        same = {name for name, value in values(model).items() if value == before[name]}
    assert same == {"/predictor/inner/W", "/predictor/inner/b"}


# -- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_a_saved_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    if kind == "hdf5":
        pytest.importorskip("h5py")
    save, load = (
        getattr(chainer.serializers, f"save_{kind}"),
        getattr(chainer.serializers, f"load_{kind}"),
    )
    model, batch = text()
    optimizer = set_up(model)
    with half_precision(model, optimizer, interval=4) as half:
        half.restore({"scale": 2.0**24, "good_steps": 0, "skipped_steps": 0})
        train(model, optimizer, batch, 8)
        assert half.skipped_steps
        save(str(tmp_path / "model.npz"), model)
        save(str(tmp_path / "optimizer.npz"), optimizer)
        state = half.state()
        expected = train(model, optimizer, batch, 6), half.state()
    expected = *expected, values(model)
    model, _ = text(9)
    optimizer = set_up(model)
    with half_precision(model, optimizer, interval=4) as half:
        load(str(tmp_path / "model.npz"), model)
        load(str(tmp_path / "optimizer.npz"), optimizer)
        assert half.state() == state
        found = train(model, optimizer, batch, 6), half.state()
    assert (*found, values(model)) == expected


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
@pytest.mark.parametrize("undone", [False, True])
def test_the_optimizer_may_be_loaded_before_a_model_without_arrays(
    undone: bool, kind: str, tmp_path: Path
) -> None:  # the order of Chainer's own snapshots
    if kind == "hdf5":
        pytest.importorskip("h5py")

    def begin(seed: int) -> Any:
        np.random.seed(seed)
        model = L.Classifier(chainer.Sequential(L.Linear(None, 40), F.relu, L.Linear(None, 5)))
        optimizer = chainer.optimizers.Adam(1e-2).setup(model)
        return model, optimizer, half_precision(model, optimizer)

    batch = images()[1][0].reshape(len(images()[1][0]), -1), images()[1][1]
    model, optimizer, half = begin(0)
    with half:
        train(model, optimizer, batch, 3)
        getattr(chainer.serializers, f"save_{kind}")(str(tmp_path / "model"), model)
        getattr(chainer.serializers, f"save_{kind}")(str(tmp_path / "optimizer"), optimizer)
        train(model, optimizer, batch, 0 if undone else 3)
    expected = values(model)
    model, optimizer, half = begin(4)
    with half:
        getattr(chainer.serializers, f"load_{kind}")(str(tmp_path / "optimizer"), optimizer)
        getattr(chainer.serializers, f"load_{kind}")(str(tmp_path / "model"), model)
        train(model, optimizer, batch, 0 if undone else 3)
    assert values(model) == expected


def test_a_snapshot_of_umem_goes_on_to_the_bit(tmp_path: Path) -> None:
    def begin(seed: int) -> Any:
        model, batch = images(seed)
        optimizer = set_up(model)
        return model, optimizer, batch, half_precision(model, optimizer, scale=2.0**18)

    model, optimizer, batch, half = begin(0)
    train(model, optimizer, batch, 4)
    with half:
        umem.chainer.save_run(tmp_path, wait=True, model=model, optimizer=optimizer)
        expected = train(model, optimizer, batch, 4), half.state()
    expected = *expected, values(model)
    model, optimizer, _, half = begin(4)
    with half:
        umem.chainer.resume_run(tmp_path, model=model, optimizer=optimizer)
        found = train(model, optimizer, batch, 4), half.state()
    assert (*found, values(model)) == expected


def test_files_of_a_float32_run_load_and_the_other_way_round(tmp_path: Path) -> None:
    model, batch = text()
    optimizer = set_up(model)
    train(model, optimizer, batch, 3)
    chainer.serializers.save_npz(str(tmp_path / "model.npz"), model)
    chainer.serializers.save_npz(str(tmp_path / "optimizer.npz"), optimizer)
    saved = {name: p.array.copy() for name, p in model.namedparams()}
    model, _ = text(2)
    optimizer = set_up(model)
    with half_precision(model, optimizer) as half:
        chainer.serializers.load_npz(str(tmp_path / "model.npz"), model)
        chainer.serializers.load_npz(str(tmp_path / "optimizer.npz"), optimizer)
        assert optimizer.t == 3 and half.scale == 65536
        train(model, optimizer, batch, 1)
        chainer.serializers.save_npz(str(tmp_path / "halves.npz"), model)
        chainer.serializers.save_npz(str(tmp_path / "masters.npz"), optimizer)
    model, _ = text(3)
    optimizer = set_up(model)
    chainer.serializers.load_npz(str(tmp_path / "halves.npz"), model)
    chainer.serializers.load_npz(str(tmp_path / "masters.npz"), optimizer)
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(parameter.array, saved[name], rtol=1e-3, atol=1e-2)
    train(model, optimizer, batch, 1)


def test_the_state_of_the_scale_can_be_said_in_json() -> None:
    model, batch = text()
    optimizer = set_up(model)
    with half_precision(model, optimizer, scale=2.0**20) as half:
        train(model, optimizer, batch, 3)
        state = json.loads(json.dumps(half.state()))
        half.restore({"scale": 1.0, "good_steps": 5, "skipped_steps": 7})
        assert half.scale == 1.0 and half.skipped_steps == 7
        half.restore(state)
        assert half.state() == state and state["skipped_steps"] > 0


# -- beside the other techniques ---------------------------------------------------------------


def test_checkpoint_and_forget_change_no_bit() -> None:
    found = []
    for around in (lambda f, x: f(x), umem.chainer.checkpoint, F.forget):
        model, batch = text()

        def forward(x: Any, model: Any = model.predictor, around: Any = around) -> Any:
            h = model.words(x)
            h = around(lambda h: F.tanh(model.inner(h, n_batch_axes=2)), h)
            return F.linear(h.reshape(-1, 16), model.words.W)

        optimizer = set_up(model)
        with half_precision(model, optimizer):
            losses = []
            for _ in range(3):
                optimizer.update(lambda x, t, f=forward: F.softmax_cross_entropy(f(x), t), *batch)
                losses.append(values(model))
        found.append(losses)
    assert found[0] == found[1] == found[2]


def test_an_8_bit_optimizer_keeps_float32_masters() -> None:
    np.random.seed(0)
    model = L.Classifier(chainer.Sequential(L.Linear(64, 96), F.relu, L.Linear(96, 5)))
    batch = np.random.randn(8, 64).astype("f"), np.random.randint(0, 5, 8).astype("i")
    optimizer = umem.chainer.optimizers.Adam8bit(3e-3).setup(model)
    with half_precision(model, optimizer):
        losses = train(model, optimizer, batch, 10)
        assert np.dtype("u1") in {v.dtype for v in model.predictor[0].W.update_rule.state.values()}
    assert losses[-1] < losses[0] / 2


def test_gradients_of_gradients_go_by_chainer_grad() -> None:
    model = Blowing((2, 2, 2))
    optimizer = set_up(model, chainer.optimizers.SGD, 0.125)
    with half_precision(model, optimizer) as half:
        x = chainer.Variable(np.array([1, 2, 3], "f"))
        (gx,) = chainer.grad([F.sum(model.w * x * x)], [x], enable_double_backprop=True)
        loss = F.sum(gx)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        assert half.skipped_steps == 0
        with pytest.raises(StateError, match=r"chainer\.grad"):
            F.sum(model.w).backward(enable_double_backprop=True)
    np.testing.assert_allclose(model.w.array, 2 - 0.125 * np.array([2, 4, 6]))


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (chainer.optimizers.Adam, r"call optimizer.setup\(model\) first"),
        (lambda: set_up(text()[0]), "set up with another model"),
    ],
)
def test_an_optimizer_of_no_or_another_model_is_refused(optimizer: Any, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        half_precision(text()[0], optimizer())


def test_an_optimizer_that_is_no_gradient_method_is_refused() -> None:
    class Other(chainer.Optimizer):  # type: ignore[misc]
        pass

    model, _ = text()
    with pytest.raises(UnsupportedError, match=r"Other is not a chainer\.GradientMethod"):
        half_precision(model, Other().setup(model))


def test_an_optimizer_that_scales_losses_itself_is_refused() -> None:
    model, _ = text()
    optimizer = set_up(model)
    optimizer.loss_scaling()
    with pytest.raises(StateError, match="leave out loss_scaling"):
        half_precision(model, optimizer)


def test_a_model_that_is_half_already_is_refused() -> None:
    model, _ = text()
    optimizer = set_up(model)
    with half_precision(model, optimizer):
        with pytest.raises(StateError, match=r"float16 already.*undo\(\) the one before"):
            half_precision(model, optimizer)
        assert values(model)


def test_a_second_undo_is_refused() -> None:
    model, _ = text()
    half = half_precision(model, set_up(model))
    half.undo()
    with pytest.raises(StateError, match="undone already"):
        half.undo()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "float32", "nonsense", None, int])
def test_other_types_are_refused_with_the_reason(dtype: Any) -> None:
    model, _ = text()
    reason = "dtype.kind" if dtype == "bfloat16" else 'computes in "float16"'
    with pytest.raises(UnsupportedError, match=reason):
        half_precision(model, set_up(model), dtype=dtype)
    assert {p.dtype for p in model.params()} == {np.dtype("f")}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale": 0}, "at least 1"),
        ({"scale": float("inf")}, "finite"),
        ({"scale": float("nan")}, "finite"),
        ({"interval": 0}, "at least 1 good step"),
        ({"keep": ["predictor/nothing"]}, "no such parameter or link"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, reason: str) -> None:
    model, _ = text()
    with pytest.raises(StateError, match=reason):
        half_precision(model, set_up(model), **options)
    assert {p.dtype for p in model.params()} == {np.dtype("f")}


def test_a_copy_of_the_optimizer_is_refused_until_it_is_undone() -> None:
    model = chainer.Sequential(L.Linear(3, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    with half_precision(model, optimizer):
        with pytest.raises(StateError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        copy.deepcopy(model)
    assert copy.deepcopy(optimizer).target is not model
    assert "__deepcopy__" not in vars(optimizer)
