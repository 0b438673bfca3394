"""Optimizers with 8-bit states beside the other techniques: each pair gives what either would."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.on_chainer.optimizers.test_eight_bit import (
    assert_same,
    batches,
    given_gradients,
    state_of,
    train,
    words,
)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.optimizers import Adam8bit, dequantize_states, quantize_states
from umem.errors import GradientError, PrecisionError

Array = np.ndarray[Any, Any]


class Deep(chainer.Chain):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(64, 64) for _ in range(6)))

    def __call__(self, x: Array) -> Any:
        for layer in self.layers:
            x = F.tanh(layer(x))
        return F.mean(x * x)


def deep() -> Deep:
    np.random.seed(0)
    return Deep()


# -- recording and recomputation ---------------------------------------------------------------


def test_a_trace_has_the_states_in_their_eight_bits() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    train(model, optimizer, 1)
    with umem.record() as recorder:
        train(model, optimizer, 1)
    trace = recorder.trace
    lives = trace.lifetimes()
    updates = [op for op in trace.ops if op.phase == "update"]
    assert {op.name for op in updates} == {"Adam", "Adam8bit"}
    written = {lives[access.tensor].alloc for op in updates for access in op.writes}
    state = {(each.label, each.nbytes) for each in written if each.kind == "state"}
    assert {("Adam8bit.m_codes", 32000), ("Adam8bit.v_scales", 500)} <= state
    held = sum(v.nbytes for p in model.params() for v in p.update_rule.state.values())
    assert sum(each.nbytes for each in written if each.kind == "state") == held


def test_recompute_keeps_to_its_budget_and_to_the_bits() -> None:
    model, other = deep(), deep()
    one, two = Adam8bit().setup(model), Adam8bit().setup(other)
    xs = [np.random.default_rng(seed).standard_normal((512, 64)).astype("f") for seed in range(6)]
    for x in xs:
        one.update(model, x)
    with umem.chainer.Recompute("1100KiB"):
        for x in xs[:3]:  # it plans in the second and the third
            two.update(other, x)
        held = xs[0].nbytes + sum(
            array.nbytes
            for param in other.params()
            for array in (param.array, *param.update_rule.state.values())
        )
        other.cleargrads()
        tracemalloc.start(1)
        for x in xs[3:]:
            two.update(other, x)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert_same(state_of(model), state_of(other))
    of_python = 64 << 10  # functions, nodes and variables, which are no arrays
    assert 900 << 10 < held + peak <= (1100 << 10) + of_python


# -- accumulation ------------------------------------------------------------------------------


def test_a_gradient_that_would_spoil_a_state_is_refused_after_its_parts() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    x, t = batches(1)[0]
    train(model, optimizer, 1)
    before = state_of(model)

    def spoilt(x: Array, t: Array) -> Any:
        return F.sum(model(x, t) * np.float32(np.inf))

    with np.errstate(invalid="ignore"), pytest.raises(GradientError):
        with umem.chainer.accumulate(optimizer, micro_batch=16, weight=1.0, check=False):
            optimizer.update(spoilt, x, t)
    assert_same(before, state_of(model))


# -- half precision ----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["half", "states"])
def test_half_precision_updates_masters_with_states_of_eight_bits(first: str) -> None:
    model, whole = words(), words()
    optimizer = chainer.optimizers.Adam(alpha=3e-3).setup(model)
    if first == "states":
        quantize_states(optimizer)
    half = umem.chainer.half_precision(model, optimizer)
    if first == "half":
        quantize_states(optimizer)
    found = train(model, optimizer, 150)
    expected = train(whole, Adam8bit(alpha=3e-3).setup(whole), 150)
    assert model.out.W.dtype == np.float16 and half.skipped_steps <= 2
    assert "m_codes" in model.out.W.update_rule.state
    assert found == pytest.approx(expected, rel=0.2, abs=0.02)
    dequantize_states(optimizer)
    assert model.out.W.update_rule.state["m"].dtype == np.float32
    half.undo()
    assert model.out.W.dtype == np.float32
    train(model, optimizer, 1)


@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_half_precision_skips_what_overflows(hooks: bool) -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    if hooks:
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    half = umem.chainer.half_precision(model, optimizer)
    train(model, optimizer, 3)
    steps, skipped = optimizer.t, half.skipped_steps
    before = state_of(model)
    given_gradients(model)
    model.out.W.grad[2, 3] = np.inf
    optimizer.update()
    assert (optimizer.t, half.skipped_steps) == (steps, skipped + 1)
    assert_same(before, state_of(model))
    train(model, optimizer, 1)
    assert optimizer.t == steps + 1
    half.undo()


def test_half_precision_says_so_where_it_is_no_overflow() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    with umem.chainer.half_precision(model, optimizer, scale=1.0):
        train(model, optimizer, 2)
        before = state_of(model)
        given_gradients(model)
        model.out.W.grad[2, 3] = np.nan
        with pytest.raises(PrecisionError):
            optimizer.update()
        assert_same(before, state_of(model))


# -- snapshots ---------------------------------------------------------------------------------
