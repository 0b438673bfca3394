"""bench/founding_table.py trains and measures; the published network has its parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_scripts import module, written

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from chainer import gradient_check

pytestmark = pytest.mark.thorough

assert umem.chainer
roberta = module("models.roberta")


def test_the_network_has_84_million_parameters() -> None:
    with chainer.using_config("dtype", np.float32):
        model = roberta.Roberta(roberta.Sizes())
    assert sum(p.size for p in model.params()) == pytest.approx(84e6, rel=0.01)


def test_the_loss_is_chainers() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 9))
    t = rng.integers(0, 9, 70)
    ours, theirs = chainer.Variable(x.copy()), chainer.Variable(x.copy())
    loss, expected = roberta.cross_entropy(ours, t), F.softmax_cross_entropy(theirs, t)
    loss.backward()
    expected.backward()
    assert loss.array == pytest.approx(expected.array)
    np.testing.assert_allclose(ours.grad, theirs.grad, atol=1e-12)


def test_gelu_has_its_own_gradient() -> None:
    x = np.random.default_rng(0).standard_normal((70, 3))
    gradient_check.check_backward(roberta.gelu, x, np.ones_like(x), dtype=np.float64)
    assert roberta.gelu(np.array([[0.0, 1.0, -1.0]])).array == pytest.approx(
        np.array([[0.0, 0.8413447, -0.1586553]])  # x times the normal distribution below x
    )


def test_what_is_measured_is_of_trainings_that_ran(tmp_path: Path) -> None:
    asked = ["--quick", "--repeats", "1"]
    content, printed = written(tmp_path, "founding_table.py", *asked)
    assert not content["simulated"] and "(measured)" in printed
    base, diet, everything = content["rows"]
    assert base["technique"] == "base" and base["time_ratio"] == 1
    for row in (diet, everything):
        assert row["tensor_bytes"] > 0  # on so small a network, above all of the techniques
        assert row["process_bytes"] > 0 and row["time_ratio"] > 0
        assert row["tensors_saved"] == pytest.approx(1 - row["tensor_bytes"] / base["tensor_bytes"])
