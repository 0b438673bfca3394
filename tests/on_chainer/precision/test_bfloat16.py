"""bfloat16 to store saved tensors in."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

import umem
from umem.errors import StateError, UnsupportedError

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from tests.on_chainer.precision.test_half_precision import images, set_up, text, train
from umem.chainer import saved_in
from umem.chainer.precision.words import ROUNDING, from_words, to_words

# -- words -------------------------------------------------------------------------------------


def every_kind_of_float32() -> Any:
    bits = np.random.RandomState(0).randint(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ends = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]
    ends = np.array(ends, np.uint32)
    return np.concatenate([bits, ends, ends | np.uint32(0x80000000)]).view(np.float32)


def test_the_nearest_word_is_nearest_with_ties_to_even() -> None:
    x = every_kind_of_float32()
    x = x[np.abs(x) < 3e38]
    words = to_words(x)
    below = (x.view(np.uint32) >> 16).astype(np.uint16)
    candidates = np.stack([from_words(below), from_words(below + np.uint16(1))]).astype(float)
    away = np.abs(candidates - x.astype(float))
    nearest = np.where(away[0] == away[1], below + (below & 1), below + (away[1] < away[0]))
    assert np.array_equal(words, nearest.astype(np.uint16))


def test_what_is_not_finite_stays_so_and_words_come_back_the_same() -> None:
    x = every_kind_of_float32()
    back = from_words(to_words(x))
    assert np.array_equal(np.isnan(back), np.isnan(x))
    assert np.array_equal(back[np.isinf(x)], x[np.isinf(x)])
    assert np.array_equal(to_words(back), to_words(x))


def test_shapes_and_layouts_are_kept() -> None:
    x = np.random.RandomState(0).randn(4, 5, 6).astype("f").transpose(2, 0, 1)
    for array in (x, x[:, :0], np.float32(0.1).reshape(())):
        back = from_words(to_words(array))
        assert back.shape == array.shape
        np.testing.assert_allclose(back, array, rtol=ROUNDING)


# -- what backward needs -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [images, text])
def test_losses_are_the_same_and_gradients_within_one_percent(make: Any) -> None:
    found = []
    for is_on in (False, True):
        model, batch = make()
        saved = saved_in("bfloat16") if is_on else None
        loss = model(*batch)
        model.cleargrads()
        loss.backward()
        grads = [p.grad for _, p in sorted(model.namedparams())]
        found.append((float(loss.array), np.concatenate([g.ravel() for g in grads])))
        if saved:
            saved.undo()
    (loss, exact), (other, rounded) = found
    assert loss == other
    assert 0 < np.linalg.norm(exact - rounded) < 0.01 * np.linalg.norm(exact)


def test_training_stays_within_one_percent() -> None:
    model, batch = text()
    plain = train(model, set_up(model), batch, 40)
    model, batch = text()
    with saved_in("bfloat16"):
        losses = train(model, set_up(model), batch, 40)
    np.testing.assert_allclose(losses, plain, rtol=1e-2, atol=2e-3)


def test_relu_keeps_its_gradients_to_the_bit() -> None:
    x = chainer.Variable(np.random.RandomState(0).randn(500).astype("f") * 1e-3)
    with saved_in("bfloat16"):
        y = F.sum(F.relu(x + 0))
        y.backward()
    assert np.array_equal(x.grad, (x.array > 0).astype("f"))


def test_what_is_kept_from_forward_takes_half() -> None:
    layers = [L.Linear(256, 256) for _ in range(12)]
    x = np.random.RandomState(0).randn(512, 256).astype("f")

    def kept() -> int:
        gc.collect()
        tracemalloc.start()
        h = chainer.Variable(x)
        for layer in layers:
            h = F.tanh(layer(h))
        loss = F.sum(h)
        del h
        nbytes = tracemalloc.get_traced_memory()[0]
        loss.backward()
        tracemalloc.stop()
        return nbytes

    whole = kept()
    with saved_in("bfloat16"):
        assert kept() < 0.55 * whole


def test_a_graph_that_is_alive_when_it_ends_goes_backward() -> None:
    model, batch = text()
    found = []
    for ends in (False, True):
        saved = saved_in("bfloat16")
        loss = model(*batch)
        if ends:
            saved.undo()
        model.cleargrads()
        loss.backward()
        if not ends:
            saved.undo()
        found.append([p.grad.tobytes() for p in model.params()])
    assert found[0] == found[1]


def test_a_second_backward_and_a_second_derivative_go_through() -> None:
    with saved_in("bfloat16"):
        x = chainer.Variable(np.array([0.5, 0.8], "f"))
        y = F.sum(F.tanh(x * x))
        y.backward(retain_grad=True)
        first = x.grad.copy()
        x.cleargrad()
        y.backward()
        assert np.array_equal(first, x.grad)
        (gx,) = chainer.grad([F.sum(F.tanh(x * x))], [x], enable_double_backprop=True)
        (ggx,) = chainer.grad([F.sum(gx)], [x])
    tanh = np.tanh(x.array**2)
    slope = 1 - tanh**2
    expected = 2 * slope - 8 * x.array**2 * tanh * slope
    np.testing.assert_allclose(ggx.array, expected, rtol=0.03)


def test_checkpoint_goes_with_it() -> None:
    model, _ = text()
    inner = model.predictor.inner
    h = chainer.Variable(np.random.RandomState(0).randn(4, 16).astype("f"))
    with saved_in("bfloat16"):
        loss = F.sum(umem.chainer.checkpoint(lambda x: F.tanh(inner(x)), h) ** 2)
        loss.backward()
    rounded = h.grad.copy()
    h.cleargrad()
    F.sum(F.tanh(inner(h)) ** 2).backward()
    np.testing.assert_allclose(rounded, h.grad, atol=0.02 * np.abs(h.grad).max())


def test_bad_uses_of_saved_in_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="in \"bfloat16\", not in 'float16'"):
        saved_in("float16")
    saved = saved_in("bfloat16")
    with pytest.raises(StateError, match="already"):
        saved_in("bfloat16")
    saved.undo()
    with pytest.raises(StateError, match="undone already"):
        saved.undo()
