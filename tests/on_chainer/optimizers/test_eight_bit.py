"""Optimizers with 8-bit states train as Chainer's do, and refuse what would spoil a state."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.optimizers import Adam8bit, AdamW8bit, MomentumSGD8bit
from umem.chainer.optimizers.paths import update
from umem.chainer.optimizers.steps import MomentumStep
from umem.errors import GradientError, SizeError, StateError, UnsupportedError

PAIRS = [
    (Adam8bit, chainer.optimizers.Adam),
    (AdamW8bit, chainer.optimizers.AdamW),
    (MomentumSGD8bit, chainer.optimizers.MomentumSGD),
]
pairs = pytest.mark.parametrize(("small", "whole"), PAIRS, ids=lambda kind: kind.__name__)
Array = np.ndarray[Any, Any]


class Words(chainer.Chain):  # type: ignore[misc]
    """An embedding, and two layers of which the first may not know its size yet."""

    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(200, 32)
            self.hidden = L.Linear(None if lazy else 32, 160)
            self.out = L.Linear(160, 200)

    def __call__(self, x: Array, t: Array) -> Any:
        return F.softmax_cross_entropy(self.out(F.relu(self.hidden(self.embed(x)))), t)


def words(seed: int = 0, lazy: bool = False) -> Words:
    np.random.seed(seed)
    return Words(lazy)


def batches(count: int) -> list[tuple[Array, Array]]:
    generator = np.random.default_rng(1)
    xs = [generator.integers(0, 200, 64).astype("i") for _ in range(count)]
    return [(x, (x * 7 + 3).astype("i") % np.int32(200)) for x in xs]


def train(model: Words, optimizer: Any, steps: int) -> float:
    """Train, and return the mean loss of the last ten steps."""
    losses = []

    def loss(x: Array, t: Array) -> Any:
        y = model(x, t)
        losses.append(float(y.array))
        return y

    for batch in batches(steps):
        optimizer.update(loss, *batch)
    return float(np.mean(losses[-10:]))


def given_gradients(model: Any, scale: float = 1e-3, seed: int = 5) -> None:
    generator = np.random.default_rng(seed)
    for _, param in sorted(model.namedparams(include_uninit=False)):
        param.grad = np.asarray(scale * generator.standard_normal(param.shape), param.dtype)


def state_of(model: Any) -> dict[str, Array]:
    """Parameters and states by name, copied."""
    found = {}
    for name, param in model.namedparams(include_uninit=False):
        found[name] = param.array.copy()
        rule = param.update_rule
        found[f"{name}.t"] = np.array(rule.t)
        found |= {f"{name}.{key}": value.copy() for key, value in (rule.state or {}).items()}
    return found


def assert_same(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        np.testing.assert_array_equal(value, other[name], err_msg=name)


# -- that it trains ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("lazy", [False, True], ids=["sized", "lazy"])
@pairs
def test_it_trains_as_chainers_does(small: Any, whole: Any, lazy: bool) -> None:
    model, other = words(lazy=lazy), words(lazy=lazy)
    arguments = {"lr": 0.3} if small is MomentumSGD8bit else {"alpha": 3e-3}
    found = train(model, small(**arguments).setup(model), 150)
    expected = train(other, whole(**arguments).setup(other), 150)
    assert expected < 4.0  # of log(200), 5.3
    assert found == pytest.approx(expected, rel=0.15, abs=1e-3)


def test_which_states_have_eight_bits() -> None:
    model = words()
    optimizer = Adam8bit(keep=["/out/*"]).setup(model)
    train(model, optimizer, 1)
    keys = {name: set(param.update_rule.state) for name, param in model.namedparams()}
    eight = {"m_codes", "m_scales", "v_codes", "v_scales"}
    assert keys.pop("/hidden/W") == eight
    assert set(map(frozenset, keys.values())) == {frozenset({"m", "v"})}
    rule = model.hidden.W.update_rule
    assert rule.state["m_codes"].shape == (160, 32) and rule.state["m_codes"].dtype == np.uint8
    assert rule.state["m_scales"].shape == (20,) and rule.state["m_scales"].dtype == np.float32


def test_embeddings_and_small_ones_have_them_where_asked() -> None:
    model = words()
    train(model, Adam8bit(embeddings=True, least_size=0).setup(model), 2)
    assert all("m_codes" in param.update_rule.state for param in model.params())


def test_state_takes_two_bytes_and_a_thirtieth() -> None:
    model = L.Linear(512, 512, nobias=True)
    Adam8bit().setup(model)
    given_gradients(model)
    model.W.update()
    held = sum(value.nbytes for value in model.W.update_rule.state.values())
    assert held == pytest.approx(2.03125 * model.W.size) and held <= 2.05 * model.W.size


# -- what one update computes --------------------------------------------------------------------


def stored(values: Array, signed: bool) -> Array:
    """What is left of a state after 8 bits, by a search in float64 over the paper's values."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        middles = 10.0 ** (exponent - 6) * (0.1 + 0.9 * (np.arange(count) + 0.5) / count)
        found += [*middles, *(-middles if signed else ())]
    map_ = np.sort(np.array(found)).astype(np.float32)
    flat = values.reshape(-1)
    result = np.zeros_like(flat)
    for start in range(0, flat.size, 256):
        part = flat[start : start + 256]
        scale = np.abs(part).max()
        ratio = (part / scale if scale else part).astype(np.float64)
        codes = np.abs(ratio[:, None] - map_.astype(np.float64)).argmin(axis=1)
        result[start : start + 256] = map_[codes] * scale
    return result.reshape(values.shape)


def test_an_update_is_chainers_formula_on_stored_moments() -> None:
    model = L.Linear(60, 90, nobias=True)
    optimizer = AdamW8bit(alpha=0.01, weight_decay_rate=0.02, eta=0.5).setup(model)
    x = model.W.array.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    f = np.float32
    for t in range(1, 6):
        given_gradients(model, seed=t)
        grad = model.W.grad
        optimizer.update()
        m = m + f(1 - 0.9) * (grad - m)
        v = v + f(1 - 0.999) * (grad * grad - v)
        rate = f(0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t))
        x = f(1 - 0.5 * 0.02) * x + f(-0.5) * (rate / (np.sqrt(v) + f(1e-8)) * m)
        m, v = stored(m, True), stored(v, False)
        np.testing.assert_array_equal(model.W.array, x)


def test_an_update_of_momentum_is_chainers_formula_on_a_stored_velocity() -> None:
    model = L.Linear(60, 90, nobias=True)
    optimizer = MomentumSGD8bit(lr=0.1).setup(model)
    x, v = model.W.array.copy(), np.zeros((90, 60), "f")
    for t in range(5):
        given_gradients(model, seed=t)
        optimizer.update()
        v = np.float32(0.9) * v - np.float32(0.1) * model.W.grad
        x = x + v
        v = stored(v, True)
        np.testing.assert_array_equal(model.W.array, x)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_parameters_of_other_precision(dtype: str) -> None:
    """Computed in float32; a parameter of 64 bits keeps what it has beyond."""
    start = np.random.default_rng(0).standard_normal((80, 70)).astype(np.float16)
    found = {}
    for kind in (dtype, "float32"):
        model = L.Linear(70, 80, nobias=True)
        model.W.array = start.astype(kind)
        optimizer = Adam8bit(alpha=0.125).setup(model)
        model.W.grad = (0.01 * start).astype(np.float16).astype(kind)
        optimizer.update()
        found[kind] = model.W.array
        assert model.W.dtype == kind and model.W.update_rule.state["m_codes"].dtype == np.uint8
    if dtype == "float16":
        np.testing.assert_array_equal(found[dtype], found["float32"].astype(dtype))
    else:
        np.testing.assert_allclose(found[dtype], found["float32"], rtol=0, atol=1e-6)


def test_parameters_and_gradients_that_are_not_contiguous() -> None:
    found = []
    for order in ("C", "F", "strided"):
        model = L.Linear(70, 80, nobias=True)
        start = np.random.default_rng(0).standard_normal((80, 70)).astype("f")
        grad = np.random.default_rng(1).standard_normal((80, 70)).astype("f")
        arrays = [np.repeat(a, 2, axis=1)[:, ::2] for a in (start, grad)]
        if order != "strided":
            arrays = [np.array(a, order=order) for a in (start, grad)]
        optimizer = Adam8bit().setup(model)
        model.W.array = arrays[0]
        for _ in range(3):
            model.W.grad = arrays[1]
            optimizer.update()
        assert model.W.array is arrays[0]  # changed in place
        found.append(state_of(model))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize("least", [0, 4096])
def test_parameters_without_elements_and_without_axes(least: int) -> None:
    model = chainer.Chain()
    with model.init_scope():
        model.nothing = chainer.Parameter(np.zeros((0, 5), "f"))
        model.scalar = chainer.Parameter(np.array(2.0, "f"))
    optimizer = Adam8bit(least_size=least).setup(model)
    for _ in range(3):
        given_gradients(model, scale=1.0)
        optimizer.update()
    assert model.scalar.array != 2 and model.nothing.shape == (0, 5)


def test_a_parameter_that_is_not_there_yet_is_left_alone() -> None:
    model = words(lazy=True)
    optimizer = Adam8bit(keep=["/hidden/W"]).setup(model)
    model.cleargrads()
    given_gradients(model)
    optimizer.update()
    assert model.hidden.W.array is None and not model.hidden.W.update_rule.state
    assert "m_codes" in model.out.W.update_rule.state


# -- Chainer's dialect ---------------------------------------------------------------------------


def test_hyperparameters_may_change_at_any_time() -> None:
    model = L.Linear(80, 80, nobias=True)
    optimizer = Adam8bit().setup(model)
    moved = []
    for alpha in (1e-3, 1e-1, 0.0):
        optimizer.alpha = alpha
        before = model.W.array.copy()
        model.W.grad = np.full_like(before, 0.5)
        optimizer.update()
        moved.append(float(np.abs(model.W.array - before).max()))
    assert moved == pytest.approx([1e-3, 1e-1, 0], rel=0.05)
    model.W.update_rule.hyperparam.alpha = 1.0
    before = model.W.array.copy()
    optimizer.update()
    assert np.abs(model.W.array - before).max() == pytest.approx(1.0, rel=0.05)


def test_hooks_act_before_the_update() -> None:
    plain, hooked = words(), words()
    one, two = Adam8bit().setup(plain), Adam8bit().setup(hooked)
    two.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    two.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    for seed in range(3):
        given_gradients(hooked, seed=seed)
        given_gradients(plain, seed=seed)
        for param in plain.params():
            param.grad = param.grad + np.float32(0.1) * param.array
        norm = np.sqrt(sum(float((p.grad**2).sum()) for p in plain.params()))
        for param in plain.params():
            param.grad = param.grad * np.float32(min(1, 0.5 / norm))
        one.update()
        two.update()
    for param, other in zip(plain.params(), hooked.params(), strict=True):
        np.testing.assert_allclose(param.array, other.array, rtol=0, atol=2e-4)


def test_hooks_of_a_single_rule() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    seen = []
    model.out.W.update_rule.add_hook(lambda rule, param: seen.append(param.name), "see")
    given_gradients(model)
    optimizer.update()
    assert seen == ["W"]


def test_rules_of_single_parameters_are_left_as_they_are() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    model.hidden.W.update_rule = chainer.optimizers.SGD(lr=2.0).create_update_rule()
    model.out.W.update_rule.enabled = False
    given_gradients(model)
    before = model.hidden.W.array.copy(), model.out.W.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(model.hidden.W.array, before[0] - 2 * model.hidden.W.grad)
    np.testing.assert_array_equal(model.out.W.array, before[1])


def test_a_rule_of_ours_under_an_optimizer_of_chainers() -> None:
    model = words()
    optimizer = chainer.optimizers.SGD(lr=0).setup(model)
    model.hidden.W.update_rule = Adam8bit().create_update_rule()
    given_gradients(model)
    optimizer.update()
    assert "m_codes" in model.hidden.W.update_rule.state
    model.hidden.W.grad[0, 0] = np.inf
    before = state_of(model)
    with pytest.raises(GradientError, match="gradient of W"):
        model.hidden.W.update()
    assert_same(before, state_of(model))


def test_mixed_precision_updates_a_copy_in_float32() -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        model = L.Linear(80, 80, nobias=True)
    optimizer = Adam8bit(alpha=1e-5).setup(model)
    optimizer.use_fp32_update()
    start = model.W.array.copy()
    assert start.dtype == np.float16
    for _ in range(100):
        model.W.grad = np.full_like(start, 0.01)
        optimizer.update()
    moved = start.astype("f") - model.W.array
    assert np.median(moved) == pytest.approx(1e-3, rel=0.2)  # each step alone is lost in 16 bits
    assert "m_codes" in model.W.update_rule.state


def test_two_optimizers_on_one_model_go_by_the_last_set_up_as_in_chainer() -> None:
    model = words()
    first, second = Adam8bit().setup(model), MomentumSGD8bit().setup(model)
    given_gradients(model)
    first.update()
    second.update()
    assert model.out.W.update_rule.t == 2 and "v_codes" in model.out.W.update_rule.state
    assert "m_codes" not in model.out.W.update_rule.state


def test_optimizers_of_two_parts_of_a_model() -> None:
    model = words()
    first, second = Adam8bit().setup(model.hidden), MomentumSGD8bit().setup(model.out)
    given_gradients(model)
    first.update()
    second.update()
    assert "m_codes" in model.hidden.W.update_rule.state
    assert "m_codes" not in model.out.W.update_rule.state


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_alone_to_the_same_bits(again: Callable[[Any], Any]) -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    train(model, optimizer, 3)
    other = again(optimizer)
    train(model, optimizer, 3)
    assert_same(state_of(model), (train(other.target, other, 3), state_of(other.target))[1])
    assert other.target is not model


# -- gradients that would spoil a state ----------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pairs
def test_a_gradient_that_would_spoil_a_state_changes_nothing(
    small: Any, whole: Any, value: float
) -> None:
    model = words()
    optimizer = small().setup(model)
    train(model, optimizer, 2)
    given_gradients(model)
    model.out.W.grad[7, 9] = value
    before = state_of(model)
    with pytest.raises(GradientError, match=r"/out/W .*update 3: 1 of 32000 .*\(7, 9\)"):
        optimizer.update()
    assert_same(before, state_of(model))
    assert optimizer.t == 2
    given_gradients(model)
    optimizer.update()
    assert optimizer.t == 3 and np.isfinite(model.out.W.array).all()


def test_the_gradient_is_named_that_was_so_before_clipping_spread_it() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    given_gradients(model)
    model.out.b.grad[3] = np.nan
    with pytest.raises(GradientError, match=r"/out/b .*1 of 200 .*\(3,\)"):
        optimizer.update()


def test_a_hook_that_makes_nan_is_seen_before_any_update() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)

    def spoil(optimizer: Any) -> None:
        model.out.W.grad[0, 0] = np.nan

    optimizer.add_hook(spoil, "spoil")
    given_gradients(model)
    before = state_of(model)
    with pytest.raises(GradientError, match="/out/W"):
        optimizer.update()
    assert_same(before, state_of(model))
    assert optimizer.t == 0


def test_a_rules_hook_that_makes_nan_leaves_that_state_whole() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)

    def spoil(rule: Any, param: Any) -> None:
        param.grad[0, 0] = np.nan

    model.out.W.update_rule.add_hook(spoil, "spoil")
    given_gradients(model)
    before = model.out.W.array.copy()
    with pytest.raises(GradientError, match="gradient of W"):
        optimizer.update()
    np.testing.assert_array_equal(model.out.W.array, before)
    assert model.out.W.update_rule.t == 0


@pytest.mark.filterwarnings("ignore:Non finite number")
def test_under_dynamic_loss_scaling_the_step_is_skipped() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    optimizer.loss_scaling()
    optimizer.update(model, *batches(1)[0])
    scale = optimizer._loss_scale
    before = state_of(model)
    for value in (np.nan, 1e30):
        given_gradients(model)
        model.out.W.grad[0, 0] = value
        optimizer.update()
        assert_same(before, state_of(model))
        assert optimizer._loss_scale == max(1, scale / 2)
        scale = optimizer._loss_scale
    optimizer.update(model, *batches(1)[0])
    assert model.out.W.update_rule.t == 2


def test_a_disabled_rule_may_have_any_gradient() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    model.out.disable_update()
    given_gradients(model)
    model.out.W.grad[0, 0] = np.nan
    optimizer.update()
    assert optimizer.t == 1


# -- other bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["amsgrad", "adabound"])
def test_variants_have_no_form_with_eight_bits(variant: str) -> None:
    with pytest.raises(UnsupportedError, match="amsgrad and adabound"):
        Adam8bit(**{variant: True})
    model = words()
    optimizer = Adam8bit().setup(model)
    setattr(optimizer.hyperparam, variant, True)
    given_gradients(model)
    before = state_of(model)
    with pytest.raises(UnsupportedError, match="amsgrad and adabound"):
        optimizer.update()
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", np.nan), ("eps", np.inf), ("beta1", 1.5), ("beta2", -0.1), ("beta1", 1.0),
        ("alpha", "0.1"), ("eta", None), ("beta2", [0.9]), ("alpha", 1e39), ("eps", 10**400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("least_size", [0, 10**9])
def test_hyperparameters_that_would_spoil_a_state(name: str, value: Any, least_size: int) -> None:
    model = words()
    optimizer = Adam8bit(least_size=least_size).setup(model)
    train(model, optimizer, 1)
    setattr(optimizer, name, value)
    given_gradients(model)
    before = state_of(model)
    with pytest.raises(ValueError, match=name):
        optimizer.update()
    assert_same(before, state_of(model))


def test_an_eps_that_is_nothing_in_float32_is_refused() -> None:
    model = words()
    optimizer = Adam8bit(eps=1e-60).setup(model)
    given_gradients(model)
    with pytest.raises(ValueError, match="eps"):
        optimizer.update()


def test_an_optimizer_without_a_model() -> None:
    with pytest.raises(StateError, match=r"call its setup\(model\)"):
        Adam8bit().update()


def test_no_eps_and_no_gradient_is_no_error_of_division() -> None:
    model = words()
    optimizer = Adam8bit(eps=0).setup(model)
    given_gradients(model)
    with np.errstate(invalid="ignore", divide="ignore"):
        for param in model.params():
            param.update_rule.enabled = param is model.out.W
        model.out.W.grad[:] = 0
        model.out.W.grad[:, 80:] = 1
        optimizer.update()  # Chainer's Adam has NaN there too: 0 / 0
    assert np.isfinite(model.out.W.array[:, 80:]).all()
    assert np.isfinite(model.out.W.update_rule.state["v_scales"]).all()


def test_names_to_keep() -> None:
    model = words()
    with pytest.raises(ValueError, match=r"'/embeding/W', which is no parameter .*/embed/W"):
        Adam8bit(keep=["/embeding/W"]).setup(model)
    with pytest.raises(TypeError, match="sequence of names"):
        Adam8bit(keep="/out/W")
    with pytest.raises(SizeError, match="least_size"):
        Adam8bit(least_size=-1)
    with pytest.raises(TypeError, match="least_size"):
        Adam8bit(least_size=0.5)  # type: ignore[arg-type]


def test_a_parameter_that_got_another_shape() -> None:
    model = words()
    optimizer = Adam8bit().setup(model)
    train(model, optimizer, 1)
    model.out.W.array = np.zeros((100, 160), "f")
    model.out.W.grad = np.zeros((100, 160), "f")
    with pytest.raises(StateError, match=r"shape \(200, 160\), but the parameter has \(100, 160\)"):
        optimizer.update()


def test_whole_numbers_are_no_parameters() -> None:
    whole = np.zeros(4, "i4")
    with pytest.raises(UnsupportedError, match="float16, float32, float64; got int32"):
        update(MomentumStep(0.9, 0.1), whole, whole, [])


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])
@pytest.mark.parametrize("how", ["whole", "half", "strided"])
def test_an_update_makes_no_copy_larger_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, how: str, numba: bool
) -> None:
    if not numba:
        monkeypatch.setattr("umem.chainer.optimizers.paths.compiled", lambda name: None)
    size = 4 << 20
    dtype = "float16" if how == "half" else "float32"
    model = chainer.Chain()
    with model.init_scope():
        model.W = chainer.Parameter(np.zeros(size, dtype))
    if how == "strided":
        model.W.array = np.zeros((size, 2), dtype)[:, 0]
    optimizer = Adam8bit().setup(model)
    model.W.grad = np.zeros(size, dtype)
    tracemalloc.start(1)
    try:
        optimizer.update()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    state = sum(value.nbytes for value in model.W.update_rule.state.values())
    assert held < 1.01 * state + 65536
    assert peak - state < 3 << 20  # a float32 of each element would be 16 MiB
