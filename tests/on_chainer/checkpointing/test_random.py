"""The random numbers that a checkpointed region draws: the same again, and no others outside."""

from __future__ import annotations

import threading
from typing import Any

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from checkpoint_cases import agree, draw, plain, variable

from umem.chainer import checkpoint
from umem.chainer.checkpointing import region_state as randomness
from umem.errors import RecomputeError

pytestmark = pytest.mark.thorough


def test_a_region_that_draws_nothing_leaves_the_generator_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y = checkpoint(F.tanh, variable(3))
    monkeypatch.setattr(np.random, "set_state", None)
    F.sum(y).backward()


def test_without_preserved_numbers_the_second_run_draws_anew() -> None:
    x = variable(99)
    y = checkpoint(F.dropout, x, preserve_rng_state=False)
    before = draw()
    F.sum(y).backward()
    assert np.any((x.grad != 0) != (y.array != 0)) and draw() != before


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_parameters_made_in_the_first_run_do_not_shift_the_dropout(depth: int) -> None:
    def gradients(call: Any) -> list[Any]:
        np.random.seed(0)
        model = chainer.Sequential(F.dropout, L.Linear(None, 6), F.dropout, L.Linear(None, 3))

        def nested(depth: int, x: Any) -> Any:
            x = F.dropout(x, 0.1)
            x = call(nested, depth - 1, x) if depth else model(x)
            return F.dropout(x, 0.2)

        y = nested(depth, x)
        model.cleargrads()
        F.sum(y * y).backward()
        return [y.array, *(p.grad for _, p in sorted(model.namedparams())), np.random.rand()]

    x = variable(5, 6)
    for expected, found in zip(gradients(plain), gradients(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_numbers_drawn_in_between_by_the_region_itself_are_drawn_again() -> None:
    x = variable(4, 4)

    def region(x: Any) -> Any:
        for _ in range(6):  # stochastic depth
            if np.random.rand() < 0.5:
                x = F.dropout(F.tanh(x), 0.3)
        return x * np.random.rand(4, 4).astype(np.float32)

    agree(lambda call: F.sum(call(region, x)), x)


def test_numbers_that_another_thread_drew_are_noticed() -> None:
    x = variable(8)

    def region(x: Any) -> Any:
        y = F.dropout(x)
        if chainer.config.in_recomputing:
            other = threading.Thread(target=np.random.rand)
            other.start()
            other.join()
        return F.dropout(y)

    y, before = checkpoint(region, x), draw()
    with pytest.raises(RecomputeError, match=r"other random numbers.*another thread"):
        F.sum(y).backward()
    assert x.grad is None and draw() == before
    F.sum(checkpoint(region, x, determinism_check=False)).backward()


class FakeRandom:
    """CuPy's random module, as far as it is used; draws from a generator that can be replaced."""

    def __init__(self) -> None:
        self.state = self.RandomState(1)
        self.cupy = type("cupy", (), {"random": self})

    RandomState = staticmethod(np.random.RandomState)

    def get_random_state(self) -> Any:
        return self.state

    def set_random_state(self, state: Any) -> None:
        self.state = state

    def randint(self, high: int) -> Any:
        return np.asarray(self.state.randint(high))


def test_on_cupy_a_region_draws_from_a_seeded_generator_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRandom()
    monkeypatch.setattr(randomness, "cupy_random", lambda leaves: fake)
    drawn: list[list[float]] = []
    link = L.Linear(None, 2)

    def region(x: Any) -> Any:
        drawn.append([])
        for layer in (F.tanh, link, F.tanh):
            if layer is link and link.W.array is None:
                fake.state.rand(100)  # an initialiser on the GPU
            x = layer(x)
            drawn[-1].append(fake.state.rand())
        return x

    own, numpy_before = fake.state, draw()
    link.W.initializer = chainer.initializers.One()
    y = checkpoint(region, variable(3, 4))
    z = checkpoint(F.tanh, y)
    assert fake.state is own and draw() == numpy_before
    F.sum(z).backward()
    assert fake.state is own and drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    checkpoint(region, variable(3, 4))
    assert drawn[2] != drawn[0]


def test_cupy_is_asked_only_where_an_argument_may_be_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("module", (), {"random": "its random module"})
    monkeypatch.setitem(randomness.sys.modules, "cupy", module)
    monkeypatch.setattr(chainer.backends.cuda, "available", True)
    array = type("ndarray", (), {"dtype": np.float32, "__module__": "cupy.core"})()
    assert randomness.cupy_random([variable(2), 3]) is None
    assert randomness.cupy_random([None, 3]) == "its random module"
    assert randomness.cupy_random([np.ones(2), array]) == "its random module"
    monkeypatch.setattr(chainer.backends.cuda, "available", False)
    assert randomness.cupy_random([array]) is None
