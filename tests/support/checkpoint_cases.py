"""Models with regions, and a training loop that runs them with and without checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.chainer import GCN, Adjacency
from umem.graphs import normalised_adjacency, rmat

Call = Callable[..., Any]
"""`checkpoint`, or `plain`."""


def plain(func: Callable[..., Any], *xs: Any, **kwargs: Any) -> Any:
    """The call that a checkpoint stands for."""
    for option in ("preserve_rng_state", "determinism_check"):
        kwargs.pop(option, None)
    return func(*xs, **kwargs)


class Model(chainer.Chain):  # type: ignore[misc, unused-ignore]
    """A model whose regions are called through ``call``."""

    call: Call = staticmethod(plain)


class Mlp(Model):
    """Two regions with dropout inside; lazily made parameters; dropout before and after."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a, self.b, self.c = L.Linear(None, 24), L.Linear(None, 24), L.Linear(None, 10)

    def forward(self, x: Any) -> Any:
        h = F.dropout(chainer.as_variable(x), 0.1)
        h = self.call(lambda h: F.dropout(F.relu(self.a(h))), h)
        h = self.call(lambda h: F.tanh(F.dropout(self.b(h), 0.3)), h)
        return self.c(F.dropout(h))


class Residual(Model):
    """Convolution, batch normalisation and dropout around a skip, twice, with shared weights."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.second = L.Convolution2D(8, 8, 3, pad=1, nobias=True)
            self.out = L.Linear(None, 10)

    def block(self, h: Any) -> Any:
        return h + F.dropout(self.second(F.relu(self.norm(h))), 0.3)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x))
        for _ in range(3):
            h = self.call(self.block, h)
        return self.out(F.max_pooling_2d(h, 2))


class Recurrent(Model):
    """An embedding and an LSTM in one region, which resets the state it keeps."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(30, 12)
            self.cell = L.LSTM(12, 16)
            self.out = L.Linear(16, 10)

    def read(self, words: Any) -> Any:
        self.cell.reset_state()
        for column in range(words.shape[1]):
            h = self.cell(self.embed(words[:, column]))
        return h

    def forward(self, words: Any) -> Any:
        return self.out(self.call(self.read, words))


class Stepwise(Model):
    """A stateless LSTM, a region a step: state is argument and result, weights are shared."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(30, 12)
            self.cell = L.StatelessLSTM(12, 16)
            self.out = L.Linear(16, 10)

    def forward(self, words: Any) -> Any:
        c = h = None
        for column in range(words.shape[1]):
            c, h = self.call(lambda c, h, w: self.cell(c, h, self.embed(w)), c, h, words[:, column])
        return self.out(h)


class Graphs(Model):
    """A graph network; the adjacency matrix is an argument that is no array."""

    def __init__(self) -> None:
        super().__init__()
        graph = rmat(80, 400, 12, 10, seed=1)
        self.adjacency = Adjacency(normalised_adjacency(graph))
        with self.init_scope():
            self.net = GCN(12, 16, 16, layers=2, dropout=0.2)
            self.out = L.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        return self.out(F.relu(self.call(self.net, self.adjacency, x)))


def rows(rng: Any) -> Any:
    return rng.standard_normal((80, 12), dtype=np.float32)


def images(rng: Any) -> Any:
    return rng.standard_normal((6, 3, 10, 10), dtype=np.float32)


def words(rng: Any) -> Any:
    return rng.integers(0, 30, (7, 5)).astype(np.int32)


MODELS: dict[str, tuple[type[Model], Callable[[Any], Any]]] = {
    "mlp": (Mlp, rows),
    "residual": (Residual, images),
    "lstm": (Recurrent, words),
    "lstm, stepwise": (Stepwise, words),
    "gcn": (Graphs, rows),
}


def train(
    name: str, call: Call, optimizer: Any = None, steps: int = 3, loss_scale: float | None = None
) -> dict[str, Any]:
    """Train, and give every number there is: losses, parameters, gradients, statistics, random."""
    make, data = MODELS[name]
    np.random.seed(0)
    model = make()
    model.call = call
    rng = np.random.default_rng(1)
    x = data(rng)
    if x.dtype == np.float32:
        x = x.astype(chainer.get_dtype())
    t = rng.integers(0, 10, len(x)).astype(np.int32)
    optimizer = (optimizer or chainer.optimizers.Adam)().setup(model)
    found: dict[str, Any] = {}
    for step in range(steps):
        loss = F.softmax_cross_entropy(model(x), t)
        found[f"random after forward {step}"] = draw()
        model.cleargrads()
        loss.backward(loss_scale=loss_scale)
        found[f"random after backward {step}"] = draw()
        optimizer.update()
        found[f"loss {step}"] = loss.array
        for key, p in sorted(model.namedparams()):
            found[f"{key} {step}"] = p.array.copy()
            found[f"{key}.grad {step}"] = p.grad.copy()
    for key, link in sorted(model.namedlinks()):
        for name in sorted(link._persistent):
            found[f"{key}.{name}"] = np.array(getattr(link, name))
    return found


def draw() -> Any:
    """What NumPy would give now; the generator stays."""
    state = np.random.get_state()
    value = np.random.rand()
    np.random.set_state(state)
    return np.asarray(value)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that every number is equal, bit for bit."""
    assert found.keys() == expected.keys()
    different = [
        key
        for key, value in expected.items()
        if value.dtype != found[key].dtype or value.tobytes() != found[key].tobytes()
    ]
    assert not different


def gradients(func: Callable[[Call], Any], *variables: Any) -> list[Any]:
    """Loss and gradients of these variables after backward of ``func(call)``, plain and not."""
    found = []
    for call in (plain, umem.chainer.checkpoint):
        np.random.seed(5)
        for x in variables:
            x.cleargrad()
        loss = func(call)
        loss.backward()
        found.append([loss.array, *(x.grad for x in variables), np.random.rand()])
    return found


def agree(func: Callable[[Call], Any], *variables: Any) -> list[Any]:
    """Assert that loss and gradients are equal bit for bit; gives the gradients."""
    expected, found = gradients(func, *variables)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert np.asarray(a).dtype == np.asarray(b).dtype
            np.testing.assert_array_equal(a, b)
    return found[1:-1]


def variable(*shape: int, seed: int = 0, requires_grad: bool = True) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return chainer.Variable(values, requires_grad=requires_grad)
