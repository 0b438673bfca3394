"""8-bit states are saved, loaded and converted, and what does not fit is refused whole."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from tests.on_chainer.optimizers.test_eight_bit import (
    Words,
    assert_same,
    given_gradients,
    pairs,
    state_of,
    train,
    words,
)

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer
from chainer import serializers

from umem.chainer.optimizers import Adam8bit, MomentumSGD8bit, dequantize_states, quantize_states
from umem.errors import DataError, StateError, UnsupportedError


def saved(owner: Any) -> dict[str, Any]:
    target = serializers.DictionarySerializer()
    target.save(owner)
    return {name: np.array(value) for name, value in target.target.items()}


def load(content: dict[str, Any], owner: Any, strict: bool = True) -> None:
    file = io.BytesIO()
    np.savez(file, **content)
    file.seek(0)
    serializers.load_npz(file, owner, strict=strict)


# -- saving and loading ------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@pairs
def test_a_run_goes_on_from_a_file_to_the_same_bits(small: Any, whole: Any, fresh: bool) -> None:
    model = words()
    optimizer = small().setup(model)
    train(model, optimizer, 3)
    other = words(seed=7)
    again = small().setup(other)
    if not fresh:
        train(other, again, 2)
    load(saved(model), other)
    load(saved(optimizer), again)
    train(model, optimizer, 3)
    train(other, again, 3)
    assert_same(state_of(model), state_of(other))
    assert optimizer.t == again.t == 6


def test_hdf5_too(tmp_path: Any) -> None:
    pytest.importorskip("h5py")
    model, other = words(), words()
    optimizer, again = Adam8bit().setup(model), Adam8bit().setup(other)
    train(model, optimizer, 3)
    serializers.save_hdf5(str(tmp_path / "optimizer.h5"), optimizer)
    serializers.load_hdf5(str(tmp_path / "optimizer.h5"), again)
    one, two = state_of(model), state_of(other)
    parameters = {name for name, _ in model.namedparams()}
    assert_same(*({k: v for k, v in found.items() if k not in parameters} for found in (one, two)))


def test_an_optimizer_that_has_not_begun() -> None:
    optimizer = Adam8bit(embeddings=True).setup(words(lazy=True))
    again = Adam8bit(embeddings=True).setup(words(lazy=True))
    load(saved(optimizer), again)  # Chainer's own rules cannot: they miss their states
    assert again.t == 0
    train(again.target, again, 2)
    assert again.t == 2


def test_a_file_from_before_the_first_update_begins_anew() -> None:
    optimizer = Adam8bit(embeddings=True).setup(words())
    content = saved(optimizer)
    train(optimizer.target, optimizer, 3)
    expected = state_of(optimizer.target)
    again = Adam8bit(embeddings=True).setup(words())
    train(again.target, again, 5)
    load(content, again)
    again.target.copyparams(words())
    train(again.target, again, 3)
    assert_same(state_of(again.target), expected)


def test_a_file_without_the_state_is_refused_as_by_chainer() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    train(model, optimizer, 2)
    content = {k: v for k, v in saved(optimizer).items() if not k.startswith("out/W/m")}
    content = {k: v for k, v in content.items() if not k.startswith("out/W/v")}
    again = Adam8bit().setup(words())
    with pytest.raises(KeyError, match="no state m, v after 2 updates"):
        load(content, again)
    load(content, again, strict=False)
    assert again.target.out.W.update_rule.state is None


@pytest.mark.parametrize(("key", "value"), [("block", 2048), ("version", 9)])
def test_blocks_of_another_size_and_another_map_are_refused(key: str, value: int) -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    train(model, optimizer, 2)
    content = saved(optimizer) | {f"out/W/quantization_{key}": np.array(value)}
    again = Adam8bit().setup(words())
    train(again.target, again, 1)
    before = state_of(again.target)
    with pytest.raises(DataError, match=f"{value}.*blocks of 256 and version 1") as error:
        load(content, again)
    assert "dequantize_states" in str(error.value)
    after = state_of(again.target)
    for name in before:
        if name.startswith("/out/W"):
            np.testing.assert_array_equal(before[name], after[name])


def test_a_file_that_does_not_say_its_format_is_refused() -> None:
    optimizer = Adam8bit().setup(words())
    train(optimizer.target, optimizer, 1)
    content = saved(optimizer)
    del content["out/W/quantization_block"]
    with pytest.raises(DataError, match="blocks of None values"):
        load(content, Adam8bit().setup(words()))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"m_scales": np.zeros(7, "f")}, "7 scales of float32; it needs 125 of float32"),
        ({"m_codes": np.zeros((200, 160), "f")}, "codes are float32"),
        ({"m_scales": np.zeros(125)}, "125 scales of float64"),
        ({"v_scales": np.full(125, np.nan, "f")}, "not finite, or negative"),
        ({"v_codes": None}, "incomplete: it has .*v_scales"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(change: Any, what: str) -> None:
    optimizer = Adam8bit().setup(words())
    train(optimizer.target, optimizer, 1)
    content = saved(optimizer) | {f"out/W/{key}": value for key, value in change.items()}
    content = {key: value for key, value in content.items() if value is not None}
    again = Adam8bit().setup(words())
    with pytest.raises(DataError, match=what):
        load(content, again)
    assert again.target.out.W.update_rule.state is None and not again.target.out.W.update_rule.t


def test_the_state_of_another_models_parameter_is_refused_by_the_update() -> None:
    optimizer = Adam8bit().setup(words())
    train(optimizer.target, optimizer, 1)
    content = saved(optimizer)
    content["out/W/m_codes"] = content["out/W/m_codes"].reshape(160, 200)
    content["out/W/v_codes"] = content["out/W/v_codes"].reshape(160, 200)
    again = Adam8bit().setup(words())
    load(content, again)
    given_gradients(again.target)
    before = state_of(again.target)
    with pytest.raises(StateError, match=r"shape \(160, 200\), but the parameter has \(200, 160\)"):
        again.update()
    assert_same(before, state_of(again.target))


def test_whole_states_are_quantised_as_they_are_loaded() -> None:
    model, other = words(), words()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 3)
    again = Adam8bit().setup(other)
    load(saved(model), other)
    load(saved(optimizer), again)
    quantize_states(optimizer)
    assert_same(state_of(model), state_of(other))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_whole_states_that_8_bits_cannot_hold_are_refused(value: float) -> None:
    optimizer = chainer.optimizers.Adam().setup(words())
    train(optimizer.target, optimizer, 1)
    content = saved(optimizer)
    content["out/W/v"] = content["out/W/v"].astype("d")
    content["out/W/v"][0, 3] = value
    again = Adam8bit().setup(words())
    with pytest.raises(DataError, match=r"'v': 1 of 32000 values .*first at \(0, 3\)"):
        load(content, again)
    assert again.target.out.W.update_rule.state is None


@pytest.mark.parametrize("kinds", [(Adam8bit, MomentumSGD8bit), (MomentumSGD8bit, Adam8bit)])
def test_the_state_of_another_optimizer_is_refused(kinds: Any) -> None:
    saver, loader = kinds
    optimizer = saver(embeddings=True).setup(words())
    train(optimizer.target, optimizer, 1)
    with pytest.raises(DataError, match="not this optimizer's"):
        load(saved(optimizer), loader(embeddings=True).setup(words()))


def test_chainers_optimizer_does_not_take_codes_for_values() -> None:
    optimizer = Adam8bit().setup(words())
    train(optimizer.target, optimizer, 1)
    with pytest.raises(KeyError):
        load(saved(optimizer), chainer.optimizers.Adam().setup(words()))


# -- converting --------------------------------------------------------------------------------


@pairs
def test_an_optimizer_is_converted_and_back_in_place(small: Any, whole: Any) -> None:
    model = words()
    optimizer = whole().setup(model)
    hook = chainer.optimizer_hooks.WeightDecay(1e-4)
    optimizer.add_hook(hook)
    train(model, optimizer, 3)
    rule, before = model.out.W.update_rule, state_of(model)
    freed = quantize_states(optimizer)
    assert type(optimizer) is small and model.out.W.update_rule is rule and rule.t == 3
    elements = model.hidden.W.size + model.out.W.size
    count = len(before.keys() & {"/out/W.m", "/out/W.v"})
    assert freed == count * (3 * elements - 4 * elements // 256)
    train(model, optimizer, 1)
    assert dequantize_states(optimizer) == freed
    assert type(optimizer) is whole and type(rule) is type(whole().create_update_rule())
    after = state_of(model)
    assert after.keys() == before.keys()
    train(model, optimizer, 1)
    assert optimizer.t == rule.t == 5
    with pytest.raises(KeyError, match="already exists"):
        optimizer.add_hook(hook)


def test_states_come_back_within_half_a_step_of_the_map() -> None:
    model = words()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 3)
    before = state_of(model)
    quantize_states(optimizer)
    dequantize_states(optimizer)
    after = state_of(model)
    for name in ("/hidden/W", "/out/W"):
        for key, most in (("m", 0.02), ("v", 0.02)):
            x, y = before[f"{name}.{key}"], after[f"{name}.{key}"]
            assert 0 < np.linalg.norm(x - y) < most * np.linalg.norm(x)
            assert y.dtype == np.float32 and y.shape == x.shape
    np.testing.assert_array_equal(before["/embed/W.m"], after["/embed/W.m"])


def test_converting_before_the_first_update_is_setting_up() -> None:
    one, two = words(), words()
    first, second = chainer.optimizers.Adam().setup(one), Adam8bit().setup(two)
    assert quantize_states(first) == 0
    train(one, first, 3)
    train(two, second, 3)
    assert_same(state_of(one), state_of(two))


def test_what_is_kept_in_32_bits_may_be_said() -> None:
    model = words()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 1)
    quantize_states(optimizer, keep=["/out/*"], embeddings=True, least_size=100)
    has_codes = {n: "m_codes" in p.update_rule.state for n, p in model.namedparams()}
    kept = {"/out/W", "/out/b"}
    assert has_codes == {name: name not in kept for name in has_codes}


def test_master_copies_keep_their_precision() -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        model = chainer.links.Linear(80, 80, nobias=True)
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.use_fp32_update()
    given_gradients(model)
    optimizer.update()
    quantize_states(optimizer)
    dequantize_states(optimizer)
    assert model.W.update_rule.state["m"].dtype == np.float32
    given_gradients(model)
    optimizer.update()


def test_what_cannot_be_converted_is_as_before() -> None:
    class Own(chainer.optimizers.Adam):  # type: ignore[misc]
        pass

    with pytest.raises(StateError, match="not set up"):
        quantize_states(chainer.optimizers.Adam())
    with pytest.raises(StateError, match="not set up"):
        dequantize_states(Adam8bit())
    for other in (Own(), chainer.optimizers.SGD(), chainer.optimizers.AMSGrad()):
        kind = type(other)
        with pytest.raises(
            UnsupportedError, match=f"{kind.__name__} has no known 8-bit form; .* Adam, AdamW"
        ):
            quantize_states(other.setup(words()))
        assert type(other) is kind
    with pytest.raises(UnsupportedError, match="amsgrad"):
        quantize_states(chainer.optimizers.Adam(amsgrad=True).setup(words()))
    with pytest.raises(StateError, match="already"):
        quantize_states(Adam8bit().setup(words()))
    with pytest.raises(StateError, match="no 8-bit states: it is Adam"):
        dequantize_states(chainer.optimizers.Adam().setup(words()))
    with pytest.raises(ValueError, match="'/nothing'"):
        quantize_states(chainer.optimizers.Adam().setup(words()), keep=["/nothing"])


def test_a_state_that_is_spoilt_already_is_not_converted() -> None:
    model: Words = words()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 1)
    model.out.W.update_rule.state["v"][0, 3] = np.inf
    with pytest.raises(StateError, match=r"v of /out/W.*first at \(0, 3\)"):
        quantize_states(optimizer)
    assert type(optimizer) is chainer.optimizers.Adam
    assert set(model.hidden.W.update_rule.state) == {"m", "v"}
