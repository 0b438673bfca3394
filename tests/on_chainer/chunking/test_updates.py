"""Updates in chunks give the bits of Chainer's own, with temporaries of a chunk."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.chainer.parameter_updates import CHUNK_BYTES, CHUNKED_RULES

LARGE = 200_000
OBJECTS = 40_000
"""Bytes of Python's own objects, and NumPy's buffers, beside the arrays."""
CASES: dict[str, Any] = {name: getattr(optimizers, name) for name in CHUNKED_RULES}
CASES |= {
    "AdamW": lambda: optimizers.AdamW(weight_decay_rate=0.01, eta=0.7),
    "AMSGrad": optimizers.AMSGrad,
    "AdaBound": optimizers.AdaBound,
    "AMSBound": optimizers.AMSBound,
    "MSVAG, weight decay": lambda: optimizers.MSVAG(weight_decay_rate=0.01),
    "RMSprop, eps inside": lambda: optimizers.RMSprop(eps_inside_sqrt=True),
}
HOOKS = {
    "none": (),
    "decay": (lambda: hooks.WeightDecay(0.01), lambda: hooks.Lasso(0.01)),
    "clipping": (lambda: hooks.GradientClipping(1.0), lambda: hooks.GradientHardClipping(-1, 1)),
    "lars": (hooks.GradientLARS,),
    "noise": (lambda: hooks.GradientNoise(0.1),),
}


def made(shapes: list[tuple[int, ...]], dtype: str) -> chainer.Link:
    link, random = chainer.Link(), np.random.RandomState(0)
    with link.init_scope():
        for index, shape in enumerate(shapes):
            data = np.asarray(random.standard_normal(shape)).astype(dtype)
            setattr(link, f"p{index}", chainer.Parameter(data))
    return link


def fit_for(dtype: str, optimizer: Any) -> Any:
    """The optimizer with an epsilon that half precision can have."""
    if dtype == "float16" and isinstance(optimizer, optimizers.RMSprop):
        optimizer.eps = 1e-4
    return optimizer


def trained(
    optimizer: Any,
    link: chainer.Link,
    *,
    layout: Any = np.asarray,
    hooked: Any = (),
    steps: int = 3,
) -> list[Any]:
    """The parameters and all state after some updates with the same gradients."""
    np.random.seed(1)
    optimizer.setup(link)
    for hook in hooked:
        optimizer.add_hook(hook())
    random = np.random.RandomState(1)
    for _ in range(steps):
        for p in link.params():
            p.grad = layout(np.asarray(random.standard_normal(p.shape)).astype(p.dtype))
        optimizer.update()
    found = [p.array for _, p in sorted(link.namedparams())]
    for _, p in sorted(link.namedparams()):
        rule = p.update_rule
        found += [(rule.state or {})[name] for name in sorted(rule.state or {})]
        found.append(np.array([rule.t, getattr(rule, "beta_power", 0.0)]))
    return found


def check(make: Any, shapes: list[tuple[int, ...]], dtype: str = "float32", **how: Any) -> None:
    whole = trained(make(), made(shapes, dtype), **how)
    with umem.chainer.chunked_updates():
        chunked = trained(make(), made(shapes, dtype), **how)
    assert len(whole) == len(chunked)
    for a, b in zip(whole, chunked, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_rule_gives_the_bits_of_the_whole_update(name: str, dtype: str) -> None:
    check(
        lambda: fit_for(dtype, CASES[name]()),
        [(LARGE,), (30, 7000), (3, 5, 17, 611), (), (0, 4), (1,)],
        dtype,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mixed_precision_goes_in_chunks_of_the_copy(name: str) -> None:
    def make() -> Any:
        optimizer = CASES[name]()
        optimizer.use_fp32_update()
        return optimizer

    check(make, [(LARGE,), (3, 3)], "float16")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout", [np.asfortranarray, lambda a: np.repeat(a, 2, axis=-1)[..., ::2]]
)
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_any_layout_give_the_same_bits(name: str, layout: Any) -> None:
    check(CASES[name], [(40, 5000), (3, 100_000)], layout=layout)


@pytest.mark.parametrize("which", HOOKS)
def test_hooks_are_left_as_they_are(which: str) -> None:
    check(optimizers.Adam, [(LARGE,), (3, 3)], hooked=HOOKS[which])


@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.integers(1, 400_000), min_size=1, max_size=2),
    st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_any_size_gives_the_same_bits(name: str, sizes: list[int], steps: int) -> None:
    check(CASES[name], [(size,) for size in sizes], steps=steps)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_temporaries_are_those_of_a_chunk(name: str, dtype: str) -> None:
    def measured() -> tuple[int, int]:
        optimizer, link = fit_for(dtype, CASES[name]()), made([(4 * LARGE,)], dtype)
        trained(optimizer, link, steps=1)
        (p,) = link.params()
        state = sum(array.nbytes for array in (p.update_rule.state or {}).values())
        tracemalloc.start(1)
        p.update_rule.update(p)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, 2 * p.array.nbytes + state

    whole, arrays = measured()
    with umem.chainer.chunked_updates():
        chunked, _ = measured()
    assert chunked < 1.5 * 2**20 and chunked < whole
    expected = whole * CHUNK_BYTES / arrays
    assert expected * 0.95 <= chunked <= 1.6 * expected + OBJECTS  # NumPy's own temporaries


def test_a_rule_of_ones_own_sees_whole_arrays() -> None:
    sizes = []

    class Normed(type(optimizers.SGD().create_update_rule())):  # type: ignore[misc]
        def update_core_cpu(self, param: Any) -> None:
            sizes.append(param.grad.size)
            param.data -= param.grad / np.linalg.norm(param.grad)

    class Own(optimizers.SGD):
        def create_update_rule(self) -> Any:
            return Normed(self.hyperparam)

    check(Own, [(LARGE,)])
    assert set(sizes) == {LARGE}


def test_a_rule_that_was_given_another_method_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    kind = type(optimizers.SGD().create_update_rule())
    original = kind.update_core_cpu

    def told(rule: Any, param: Any) -> None:
        sizes.append(param.grad.size)
        original(rule, param)

    monkeypatch.setattr(kind, "update_core_cpu", told)
    with umem.chainer.chunked_updates():
        trained(optimizers.SGD(), made([(LARGE,)], "float32"), steps=1)
    assert sizes == [LARGE]


@pytest.mark.parametrize("rate", [np.float64(0.1), np.full(LARGE, 0.1, "float32")])
@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.SMORMS3])
def test_a_rate_of_another_type_or_of_each_element_gives_the_same_bits(
    make: Any, rate: Any
) -> None:
    check(lambda: make(lr=rate), [(LARGE,)])


def test_a_gradient_that_overlaps_its_parameter_is_read_before_it_changes() -> None:
    def moved(chunked: bool) -> Any:
        memory = np.random.RandomState(0).standard_normal(3 * LARGE).astype("float32")
        p = chainer.Parameter(memory[: 2 * LARGE])
        p.grad = memory[LARGE // 2 : 2 * LARGE + LARGE // 2]
        rule = optimizers.SGD(lr=0.5).create_update_rule()
        if chunked:
            with umem.chainer.chunked_updates():
                rule.update(p)
        else:
            rule.update(p)
        return p.array

    assert moved(True).tobytes() == moved(False).tobytes()


def test_an_error_of_a_rule_leaves_everything_as_it_was() -> None:
    link = made([(LARGE,)], "float16")
    before = link.p0.array.copy()
    with umem.chainer.chunked_updates(), pytest.raises(ValueError, match="eps"):
        trained(optimizers.RMSprop(), link)
    assert link.p0.array.tobytes() == before.tobytes()


def test_it_is_on_until_it_is_closed() -> None:
    point = chainer.optimizer.UpdateRule
    own = vars(point)["update_core"]
    one, other = umem.chainer.chunked_updates(), umem.chainer.chunked_updates()
    assert vars(point)["update_core"] is not own
    one.close()
    one.close()
    assert vars(point)["update_core"] is not own
    other.close()
    assert vars(point)["update_core"] is own
