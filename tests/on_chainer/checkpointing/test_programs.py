"""Random programs: regions in regions, branches, captures, shared weights."""

from __future__ import annotations

import random
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from checkpoint_cases import plain, variable

pytestmark = pytest.mark.thorough


class Program:
    """A random network of functions and regions, the same for the same seed."""

    def __init__(self, seed: int, call: Any) -> None:
        np.random.seed(seed)
        self.seed, self.call = seed, call
        self.links = chainer.ChainList(L.Linear(4, 4), L.Linear(4, 4), L.BatchNormalization(4))
        self.captured = variable(3, 4, seed=seed)
        self.x = variable(3, 4, seed=seed + 1)

    def run(self) -> dict[str, Any]:
        self.links.cleargrads()
        values = self.grow(random.Random(self.seed), [self.x], depth=2, count=8)
        loss = sum(F.sum(value) for value in values[-3:])
        loss.backward()
        found = {"loss": loss.array, "x": self.x.grad, "captured": self.captured.grad}
        found.update({name: p.grad for name, p in self.links.namedparams()})
        found.update(mean=self.links[2].avg_mean, var=self.links[2].avg_var)
        return {**found, "random": np.random.rand()}

    def grow(self, dice: random.Random, values: list[Any], depth: int, count: int) -> list[Any]:
        values = list(values)
        for _ in range(count):
            if depth and dice.random() < 0.25:
                values += self.region(dice, values, depth)
            else:
                values.append(self.function(dice, dice.choice(values), dice.choice(values)))
        return values

    def function(self, dice: random.Random, a: Any, b: Any) -> Any:
        functions = (
            lambda: F.tanh(dice.choice(self.links)(a)),
            lambda: a * F.sigmoid(b),
            lambda: F.dropout(a),
            lambda: F.tanh(a + b + self.captured),
            lambda: F.concat(F.split_axis(a, 2, 1), 1),
            lambda: F.sin(self.captured * a),
        )
        return dice.choice(functions)()

    def region(self, dice: random.Random, values: list[Any], depth: int) -> Any:
        seed, outer = dice.random(), values[-1:] if dice.random() < 0.4 else []

        def region(*inputs: Any) -> tuple[Any, ...]:
            inner = random.Random(seed)
            made = self.grow(inner, [*inputs, *outer], depth - 1, inner.randrange(1, 5))
            return tuple(made[-inner.randrange(1, 3) :])

        return self.call(region, *dice.choices(values, k=dice.randrange(1, 3)))


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_random_programs_agree_with_the_plain_run_up_to_rounding(start: int) -> None:
    for seed in range(start, start + 20):
        expected = Program(seed, plain).run()
        found = Program(seed, umem.chainer.checkpoint).run()
        for name, value in expected.items():
            assert (value is None) == (found[name] is None), (seed, name)
            if name in ("loss", "mean", "var", "random"):
                np.testing.assert_array_equal(found[name], value, f"{seed} {name}")
            elif value is not None:
                np.testing.assert_allclose(found[name], value, 1e-4, 1e-4, err_msg=f"{seed} {name}")
