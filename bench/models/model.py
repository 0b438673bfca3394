"""What every model of the benchmarks has: parameters, an input of any size, and a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.links as L
import numpy as np

Region = Callable[..., Any]
RATES = {
    "SGD": {"lr": 1e-4},
    "MomentumSGD": {"lr": 1e-4},
    "Adam": {"alpha": 1e-4},
    "AdamW": {"alpha": 1e-4},
    "RMSprop": {"lr": 1e-4},
}


def call(function: Callable[..., Any], *variables: Any) -> Any:
    """Call a function: the region of a network that is not checkpointed by hand."""
    return function(*variables)


class Whole(chainer.Link):  # type: ignore[misc]
    """A whole model as programs call it: a link with all the parameters, whose result is a loss."""

    def __init__(self, link: Any, loss: Callable[..., Any]) -> None:
        super().__init__()
        self._link, self._loss = link, loss

    def params(self, include_uninit: bool = True) -> Iterator[Any]:
        """Yield the parameters of the model."""
        yield from self._link.params(include_uninit)

    def forward(self, *inputs: Any, **how: Any) -> Any:
        """Return the loss."""
        return self._loss(*inputs, **how)


@dataclass(frozen=True)
class Model:
    """A network with its input and its loss.

    Attributes:
        link: the Chainer link that holds the parameters.
        inputs: makes the input for a batch of a size, the same one each time; models of images
            take another edge in pixels after it.
        loss: takes the input, and ``region``: what is called as ``region(function, *variables)``
            around each part that one would checkpoint by hand.
        optimizer: its usual optimizer, by Chainer's name.
    """

    link: Any
    inputs: Callable[..., tuple[Any, ...]]
    loss: Callable[..., Any]
    optimizer: str = "MomentumSGD"

    def trainer(self) -> Callable[[int], None]:
        """Return a function that trains one step on a batch of a size."""
        optimizer = self.make_optimizer().setup(self.link)

        def step(batch: int) -> None:
            optimizer.update(lambda: self.loss(*self.inputs(batch)))

        return step

    def make_optimizer(self) -> Any:
        return getattr(chainer.optimizers, self.optimizer)(**RATES[self.optimizer])


def sent(inputs: tuple[Any, ...], place: Any) -> tuple[Any, ...]:
    """Move an input to a Chainer device."""
    return tuple(place.send(x) if isinstance(x, np.ndarray) else x.to_device(place) for x in inputs)


def chain(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Make one function of several, each called with what the one before returns."""

    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run


def grouped(region: Region, functions: Sequence[Callable[[Any], Any]], count: int, x: Any) -> Any:
    """Call functions one after another, in groups of about equal length."""
    bounds = [index * len(functions) // count for index in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        x = region(chain(functions[low:high]), x)
    return x


# -- inputs --------------------------------------------------------------------------------------


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def labels(*shape: int, classes: int) -> Any:
    return np.random.default_rng(1).integers(0, classes, shape, dtype=np.int32)


def images(pixels: int, classes: int, channels: int = 3) -> Callable[..., tuple[Any, Any]]:
    """Make inputs of square images with one label each."""

    def inputs(batch: int, pixels: int = pixels) -> tuple[Any, Any]:
        return normal(batch, channels, pixels, pixels), labels(batch, classes=classes)

    return inputs


def maps(
    pixels: int, classes: int, channels: int = 3, cropped: int = 0
) -> Callable[..., tuple[Any, Any]]:
    """Make inputs of square images with a label for each pixel, but those of a cropped margin."""

    def inputs(batch: int, pixels: int = pixels) -> tuple[Any, Any]:
        edge = pixels - cropped
        return normal(batch, channels, pixels, pixels), labels(batch, edge, edge, classes=classes)

    return inputs


# -- parts ---------------------------------------------------------------------------------------


class Parts(chainer.Chain):
    """A chain that takes links as they are made."""

    def add(self, link: Any) -> Any:
        with self.init_scope():
            setattr(self, f"link{len(list(self.children()))}", link)
        return link

    def conv(self, *args: Any, **kwargs: Any) -> Any:
        return self.add(L.Convolution2D(*args, **kwargs))

    def conv_norm(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        conv = self.conv(*args, nobias=True, **kwargs)
        norm = self.add(L.BatchNormalization(args[1]))
        return lambda x: norm(conv(x))

    def norm_relu_conv(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        norm = self.add(L.BatchNormalization(args[0]))
        conv = self.conv(*args, nobias=True, **kwargs)
        return lambda x: conv(chainer.functions.relu(norm(x)))
