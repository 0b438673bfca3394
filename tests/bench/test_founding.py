"""bench/founding_table.py: the network has the published parameters, its parts do as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_scripts import module, written
from click.testing import CliRunner

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from chainer import gradient_check
from umem.predict.techniques import small_states as states

from umem.trace import Access, Alloc, Mark, Op, Trace

pytestmark = pytest.mark.thorough

assert umem.chainer
founding_table = module("founding_table")
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


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
def test_products_that_are_left_out_have_the_shape_of_those_that_are_not(trans: Any) -> None:
    a = np.zeros((2, 4, 3) if trans[0] else (2, 3, 4), np.float16)
    b = np.zeros((2, 5, 4) if trans[1] else (2, 4, 5), np.float16)
    expected = F.matmul(a, b, *trans)
    with roberta.half_products_left_out():
        found = F.matmul(a + 1, b + 1, *trans)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert not found.array.any() and F.matmul(a + 1, b + 1, *trans).array.all()


def test_linear_that_is_left_out_has_its_gradients_shapes() -> None:
    made = [chainer.Variable(np.ones(s, np.float16)) for s in ((3, 4), (5, 4), (5,))]
    with roberta.half_products_left_out():
        y = F.linear(*made)
        y.grad = np.ones((3, 5), np.float16)
        y.backward()
    assert [v.grad.shape for v in made] == [(3, 4), (5, 4), (5,)]
    assert [v.grad.any() for v in made] == [False, False, True]


def test_small_states_are_a_byte_a_value_and_a_scale_a_block() -> None:
    values = 10_000
    embedded = [Alloc(0, 4 * values, "parameter", "W"), Alloc(1, 4 * values, "state", "Adam.m")]
    other = [
        Alloc(2, 4 * values, "parameter", "W"),
        Alloc(3, 4 * values, "state", "Adam.m"),
        Alloc(4, 400, "parameter", "b"),
        Alloc(5, 400, "state", "Adam.v"),
    ]
    whole = [Access(n, 0, size) for n, size in enumerate([4 * values] * 4 + [400] * 2)]
    ops = [Op("EmbedIDFunction", "forward", (whole[0],), ())]
    ops += [
        Op("Adam", "update", (whole[n], whole[n + 1]), (whole[n], whole[n + 1])) for n in (0, 2, 4)
    ]
    trace = states.with_small_states(Trace([*embedded, *other, *ops, Mark("step")]))
    sizes = {e.tensor: e.nbytes for e in trace.events if isinstance(e, Alloc)}
    blocks = -(-values // states.BLOCK)
    scales = {6: 4 * blocks}
    assert sizes == {0: 40_000, 1: 40_000, 2: 40_000, 3: values, 4: 400, 5: 400, **scales}
    assert [access.stop for access in list(trace.ops)[2].writes][:2] == [40_000, sizes[3]]


def test_the_states_of_an_embedding_stay_as_they_are() -> None:
    big, small = (
        founding_table.trace_of(
            founding_table.Technique("x", None, small_states=each), founding_table.SMALL, (2, 3), 4
        )
        for each in (False, True)
    )
    found = [
        [e.nbytes for e in t.events if isinstance(e, Alloc) and e.kind == "state"]
        for t in (big, small)
    ]
    wide, narrow = found
    assert narrow.count(4 * 300 * 32) == wide.count(4 * 300 * 32) == 2  # Adam's two of the words
    small_ones = [n for n in wide if n < 4 * states.LEAST_VALUES]
    assert all(narrow.count(n) >= wide.count(n) for n in small_ones)
    assert sum(narrow) < sum(wide)


def test_a_small_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        founding_table.main, ["--quick", "--json", str(tmp_path / "x.json")], catch_exceptions=False
    )
    assert done.exit_code == 0 and "simulated" in done.output
    content = json.loads((tmp_path / "x.json").read_text())
    rows = {row["technique"]: row for row in content["rows"]}
    assert content["simulated"] and len(rows) == len(founding_table.TECHNIQUES)
    peaks = {name: row["simulated_tensors_mib"] for name, row in rows.items()}
    for name in ("checkpointing", "accumulation, 4 x 16", "8-bit Adam"):
        assert peaks["all"] < peaks[name] < peaks["base"]
    # parameters, gradients and two states of four bytes a parameter
    model = module("models").build("RoBERTa", founding_table.SMALL)
    lasting = 16 * sum(p.size for p in model.link.params()) / founding_table.MIB
    assert rows["base"]["simulated_lasting_mib"] == pytest.approx(lasting)


def test_what_is_measured_is_of_trainings_that_ran(tmp_path: Path) -> None:
    asked = ["--measure", "--quick", "--repeats", "1"]
    content, printed = written(tmp_path, "founding_table.py", *asked)
    assert not content["simulated"] and "(measured)" in printed
    base, diet, everything = content["rows"]
    assert base["technique"] == "base" and base["time_ratio"] == 1
    for row in (diet, everything):
        assert row["tensor_bytes"] > 0  # on so small a network, above all of the techniques
        assert row["process_bytes"] > 0 and row["time_ratio"] > 0
        assert row["tensors_saved"] == pytest.approx(1 - row["tensor_bytes"] / base["tensor_bytes"])
