"""The state that is put back for another run of a loss function, and the graphs that it holds."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from umem.compat import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.chainer.step_state import StepState

pytestmark = pytest.mark.thorough

X = np.ones((2, 3), np.float32)


class Stateful(chainer.Chain):
    """Keeps its output, which the next pass begins from; ``cut`` without its graph."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(3, 3)
        self.h: Any = None

    def forward(self, x: Any, cut: bool = False) -> Any:
        begin = 0 if self.h is None else self.h.array if cut else self.h
        self.h = F.tanh(self.linear(x) + begin)
        return self.h


def test_a_graph_that_nothing_else_has_is_not_kept_but_its_values_are() -> None:
    model = Stateful()
    model(X)
    state, graph = StepState(model, holds_graphs=False), weakref.ref(model.h.creator_node)
    values = model.h.array.copy()
    model(X, cut=True)
    assert graph() is None
    for _ in range(2):  # as often as it is put back
        state.restore()
        assert model.h.creator_node is None and np.array_equal(model.h.array, values)
        model.h = None


def test_a_graph_that_the_new_one_goes_on_from_is_put_back() -> None:
    model = Stateful()
    model(X)
    state, node = StepState(model, holds_graphs=False), weakref.ref(model.h.node)
    model(X)
    state.restore()
    assert model.h.node is node() and model.h.creator_node is not None


def test_graphs_are_held_where_that_is_asked_for() -> None:
    model = Stateful()
    model(X)
    state, h = StepState(model), model.h
    model.h = None
    state.restore()
    assert model.h is h


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"steps": 2}])
def test_accumulation_lets_the_graph_of_the_update_before_go(options: Any) -> None:
    before: list[Any] = []
    alive: list[bool] = []

    def watched(x: Any) -> Any:
        alive.append(any(one() is not None for one in before))
        return x

    net = chainer.Sequential(watched, L.Linear(3, 3))
    model = L.Classifier(net, F.mean_squared_error)
    model.compute_accuracy = False
    optimizer = chainer.optimizers.SGD().setup(model)
    with umem.chainer.accumulate(optimizer, check=False, **options):
        for _ in range(4):
            optimizer.update(model, X, X)
            before[:] = [weakref.ref(model.loss.node)]
    assert len(alive) >= 4 and not any(alive)
