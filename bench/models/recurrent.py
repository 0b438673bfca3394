"""Models that go through a sequence: LSTM and GRU, with a loss at each of its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from models.model import Model, Region, call, normal


def stateful(cell: Any, length: int, width: int, hidden: int, optimizer: str) -> Model:
    """A cell that keeps its state between words."""
    model = chainer.Sequential(cell(width, hidden), L.Linear(hidden, 8))

    def loss(xs: Any) -> Any:
        model[0].reset_state()
        return sum(F.mean(model(x) ** 2) for x in xs)

    return Model(model, lambda batch: (normal(length, batch, width),), loss, optimizer)


def unrolled(length: int, groups: int, width: int = 128) -> Model:
    """An LSTM whose state is passed on, with a region around each group of words."""
    cell, score = L.StatelessLSTM(width, width), L.Linear(width, 8)
    step = -(-length // groups)

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(2, batch, width), normal(length, batch, width)

    def part(xs: Any) -> Callable[..., Any]:
        def run(c: Any, h: Any) -> Any:
            total: Any = 0
            for x in xs:
                c, h = cell(c, h, x)
                total += F.mean(score(h) ** 2)
            return c, h, total

        return run

    def loss(state: Any, xs: Any, region: Region = call) -> Any:
        c, h, total = region(part(xs[:step]), *state)
        for first in range(step, length, step):
            c, h, more = region(part(xs[first : first + step]), c, h)
            total += more
        return total

    return Model(chainer.ChainList(cell, score), inputs, loss, "Adam")


def normalised(cell: Any, length: int, width: int) -> Model:
    """A cell with dropout behind it, and a score of the normalised state each tenth word."""
    model = chainer.ChainList(cell(width, width), L.LayerNormalization(width), L.Linear(width, 10))

    def loss(xs: Any, t: Any, region: Region = call) -> Any:
        model[0].reset_state()
        total: Any = 0
        for number, x in enumerate(xs, 1):
            h = F.dropout(model[0](x), 0.2)
            if number % 10 == 0:
                total += F.softmax_cross_entropy(model[2](model[1](h)), t)
        return total

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(length, batch, width), np.random.randint(0, 10, batch).astype("i")

    return Model(model, inputs, loss, "SGD")


MODELS = {
    "LSTM": {
        "60 words, dropout": lambda: normalised(L.LSTM, 60, 64),
        "300 words, dropout": lambda: normalised(L.LSTM, 300, 32),
        "40 words": lambda: stateful(L.LSTM, 40, 256, 256, "SGD"),
        "200 narrow words": lambda: stateful(L.LSTM, 200, 32, 64, "MomentumSGD"),
    },
    "GRU": {
        "40 words": lambda: stateful(L.StatefulGRU, 40, 256, 256, "SGD"),
        "60 words, dropout": lambda: normalised(L.StatefulGRU, 60, 128),
        "300 words, dropout": lambda: normalised(L.StatefulGRU, 300, 64),
    },
    "unrolled LSTM": {
        "129 words": lambda: unrolled(129, 1),
        "200 words": lambda: unrolled(200, 15),
    },
}
