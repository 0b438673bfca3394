"""Models that go through a sequence: LSTM and GRU, with a loss at each of its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

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


MODELS = {
    "LSTM": {
        "40 words": lambda: stateful(L.LSTM, 40, 256, 256, "SGD"),
        "200 narrow words": lambda: stateful(L.LSTM, 200, 32, 64, "MomentumSGD"),
    },
    "GRU": {"40 words": lambda: stateful(L.StatefulGRU, 40, 256, 256, "SGD")},
    "unrolled LSTM": {
        "129 words": lambda: unrolled(129, 1),
        "200 words": lambda: unrolled(200, 15),
    },
}
