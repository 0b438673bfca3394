"""Handwritten digits that scikit-learn ships, with small networks that learn to read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

CLASSES = 10
EDGE = 8


class Digits(NamedTuple):
    """Images of shape (n, 64) in float32, from 0 to 1, and their labels of shape (n,) in int32."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]

    def at(self, rows: np.ndarray[Any, Any]) -> Digits:
        return Digits(self.images[rows], self.labels[rows])


class Fold(NamedTuple):
    """What is learned from, and what is asked."""

    train: Digits
    test: Digits


def load() -> Digits:
    """Load the 1,797 digits (Alpaydin and Kaynak 1998, the test part of UCI's set)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return Digits((pixels / 16).astype(np.float32), labels.astype(np.int32))


def folds(digits: Digits, seed: int, count: int = 5) -> Iterator[Fold]:
    """Split into parts with equal shares of the classes, each of which is asked once."""
    from sklearn.model_selection import StratifiedKFold

    split = StratifiedKFold(count, shuffle=True, random_state=seed)
    for train, test in split.split(digits.images, digits.labels):
        yield Fold(digits.at(train), digits.at(test))


class DigitPerceptron(chainer.Chain):  # type: ignore[misc]
    """A perceptron with two hidden layers: 64-256-256-10, or of another width."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Linear(EDGE * EDGE, width), L.Linear(width, width)
            self.score = L.Linear(width, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.score(F.relu(self.second(F.relu(self.first(x)))))


class DigitConvolutional(chainer.Chain):  # type: ignore[misc]
    """A convolutional network: two convolutions of 3 x 3, pooling after each, two layers on top."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(1, width, 3, pad=1)
            self.second = L.Convolution2D(width, 2 * width, 3, pad=1)
            self.third = L.Linear(2 * width * (EDGE // 4) ** 2, 4 * width)
            self.score = L.Linear(4 * width, CLASSES)

    def forward(self, x: Any) -> Any:
        x = F.reshape(x, (-1, 1, EDGE, EDGE))
        x = F.max_pooling_2d(F.relu(self.first(x)), 2)
        x = F.max_pooling_2d(F.relu(self.second(x)), 2)
        return self.score(F.relu(self.third(x)))


NETWORKS = {"perceptron": DigitPerceptron, "convolutional": DigitConvolutional}


def train(model: Any, digits: Digits, epochs: int, seed: int, batch: int = 64) -> None:
    """Train by Adam on shuffled batches of equal size; what is left of an epoch is left out."""
    optimizer = chainer.optimizers.Adam().setup(model)
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(len(digits.labels))
        for low in range(0, len(order) - batch + 1, batch):
            part = digits.at(order[low : low + batch])
            optimizer.update(
                lambda part=part: F.softmax_cross_entropy(model(part.images), part.labels)
            )


def correct_count(model: Any, digits: Digits) -> int:
    """Count the digits that a model reads."""
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores = chainer.as_array(model(digits.images))
    return int((scores.argmax(axis=1) == digits.labels).sum())
