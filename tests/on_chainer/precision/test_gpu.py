"""Half precision and bfloat16 words on a GPU: the same as on NumPy, or close to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def losses(device: str, is_half: bool) -> list[float]:
    """Of some steps of a small network with hooks."""
    import umem.chainer  # isort: skip  (before chainer)
    import chainer
    import chainer.functions as F
    import chainer.links as L

    np.random.seed(0)
    net = chainer.Sequential(
        L.Linear(6, 64),
        F.relu,
        L.LayerNormalization(64),
        L.Linear(64, 64),
        F.tanh,
        L.Linear(64, 10),
    )
    model = L.Classifier(net)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(1e-3).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5.0))
    send = chainer.get_device(device).send
    x, t = send(np.random.randn(16, 6).astype("f")), send(np.random.randint(0, 10, 16).astype("i"))
    half = umem.chainer.half_precision(model, optimizer) if is_half else None
    found = []
    for _ in range(3):
        optimizer.update(model, x, t)
        found.append(float(model.loss.array))
    if half:
        assert half.skipped_steps == 0
        half.undo()
    assert {p.dtype for p in model.params()} == {np.dtype("f")}
    return found


def test_losses_are_those_of_float32_on_numpy_within_one_percent() -> None:
    np.testing.assert_allclose(losses("@cupy:0", True), losses("@numpy", False), rtol=1e-2)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_is_found_by_one_kernel(bad: float) -> None:
    import cupy

    from umem.chainer.finite import all_finite

    arrays: list[Any] = [cupy.ones((7, 5), "e"), cupy.ones(40_000, "f"), cupy.ones(0, "f")]
    assert all_finite(arrays)
    for array in arrays[:2]:
        array.reshape(-1)[-1] = bad
        assert not all_finite(arrays)
        array.reshape(-1)[-1] = 1


def test_words_are_those_of_numpy() -> None:
    import cupy

    from umem.chainer.precision.words import from_words, to_words

    x = np.random.RandomState(0).randn(1000).astype("f")
    x[:3] = np.inf, -np.inf, np.nan
    words = to_words(cupy.asarray(x))
    assert np.array_equal(words.get(), to_words(x))
    assert np.array_equal(from_words(words).get(), from_words(to_words(x)), equal_nan=True)
