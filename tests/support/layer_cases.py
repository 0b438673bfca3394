"""Smaller layers for tests of their gradients, on NumPy and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.layers import LowRankEmbedID, LowRankLinear, SeparableConvolution2D, in_groups

Array = np.ndarray[Any, Any]


class TiedWords(chainer.Chain):  # type: ignore[misc]
    """Words scored by the table that they are looked up in."""

    def __init__(self, words: int = 7, width: int = 5) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, width)
            self.score = L.Linear(width, words)

    def forward(self, x: Array) -> Any:
        return self.score(F.tanh(self.embed(x)), n_batch_axes=x.ndim)


def tied() -> Any:
    model = TiedWords()
    umem.chainer.tie(model, "/embed/W", "/score/W")
    return model


def images(generator: Any) -> Array:
    return generator.standard_normal((2, 4, 5, 6))


def rows(generator: Any) -> Array:
    return generator.standard_normal((3, 2, 4))


def numbers(generator: Any) -> Array:
    return generator.integers(0, 7, (4, 2)).astype("i")


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Array]]] = {
    "low-rank linear": (lambda: LowRankLinear(8, 6, rank=3), rows),
    "low-rank linear without bias": (lambda: LowRankLinear(None, 6, rank=3, nobias=True), rows),
    "low-rank table": (lambda: LowRankEmbedID(7, 5, rank=2, ignore_label=1), numbers),
    "separable": (lambda: SeparableConvolution2D(4, 6, 3, pad=1), images),
    "separable, wide": (
        lambda: SeparableConvolution2D(None, 3, (3, 2), 2, 1, True, dilate=2, multiplier=2),
        images,
    ),
    "in groups": (lambda: in_groups(L.Convolution2D(4, 6, 3, pad=1), 2), images),
    "tied": (tied, numbers),
}
"""By what it is called, a layer, and inputs for it in float64 or whole numbers."""


def made(name: str, dtype: Any) -> tuple[Any, Array]:
    """A layer of a type with parameters of every value, and its inputs."""
    make, inputs = LAYERS[name]
    generator = np.random.default_rng(0)
    x = inputs(generator)
    with chainer.using_config("dtype", np.dtype(dtype)):
        link = make()
        link(x if x.dtype.kind == "i" else x.astype(dtype))  # sizes that are taken from it
        for _, parameter in sorted(link.namedparams()):
            parameter.array[...] = generator.standard_normal(parameter.shape) * 0.5
    return link, x if x.dtype.kind == "i" else x.astype(dtype)


def gradients(link: Any, x: Array, gy: Array) -> dict[str, Array]:
    """By backward, of the sum of the results times ``gy``: by parameter, and of x."""
    xp = link.xp
    x = chainer.Variable(xp.asarray(x))
    link.cleargrads()
    y = link(x)
    y.grad = xp.asarray(gy, y.dtype)
    y.backward()
    found = {name: one.grad for name, one in link.namedparams()}
    if x.dtype.kind == "f":
        found["x"] = x.grad
    return {name: chainer.get_device("@numpy").send(one) for name, one in found.items()}


def differences(name: str, link: Any, x: Array, gy: Array) -> dict[str, Array]:
    """The same by central differences in float64, each element by itself."""
    whole, _ = made(name, np.float64)
    for path, parameter in whole.namedparams():
        source = dict(link.namedparams())[path].array
        parameter.array[...] = chainer.get_device("@numpy").send(source)
    x = x.astype(np.float64) if x.dtype.kind == "f" else x
    arrays = {path: parameter.array for path, parameter in whole.namedparams()}
    if x.dtype.kind == "f":
        arrays["x"] = x
    return {
        path: _slopes(lambda: float((whole(x).array * gy).sum()), a) for path, a in arrays.items()
    }


def _slopes(value: Callable[[], float], array: Array, step: float = 1e-4) -> Array:
    """Return the derivatives of a value by each element, by central differences."""
    found = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = value()
        array[index] = kept - step
        found[index] = (above - value()) / (2 * step)
        array[index] = kept
    return found


TOLERANCES = {"e": 1e-2, "f": 2e-5, "d": 1e-7}
"""Of the largest gradient, by type."""


def apart(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """How far gradients are apart, as a share of the largest of each."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max())
        for name in found
    )
