"""Programs whose graph never comes back: trees, and sentences of varied lengths.

A program is a model and a function from a seed to a loss. The graph is drawn from the seed, and
so is the data.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

Size = tuple[int, int, int]
"""Rows of a batch, width of a layer, and about how many words, leaves or functions."""


@dataclass(frozen=True)
class Program:
    """A model, and how it makes a loss from a seed."""

    name: str
    make: Callable[[Size], Any]
    loss: Callable[[Any, Size, int], Any]
    size: Size
    quick: Size


# -- a tree ------------------------------------------------------------------------------------


def tree(size: Size) -> Any:
    """A child-sum TreeLSTM (Tai et al. 2015), and a class at each node."""
    _, width, _ = size
    return chainer.Chain(
        embed=L.EmbedID(500, width), cell=L.ChildSumTreeLSTM(width, width), out=L.Linear(width, 5)
    )


def tree_loss(model: Any, size: Size, seed: int) -> Any:
    """Compute the loss of a Tree-LSTM on a random tree."""
    rows, _, leaves = size
    rng, choice = np.random.default_rng(seed), random.Random(seed)
    losses: list[Any] = []

    def node(count: int) -> Any:
        if count == 1:
            c, h = model.cell(model.embed(rng.integers(0, 500, rows, "i")))
        else:
            cut = choice.randint(1, count - 1)
            (c1, h1), (c2, h2) = node(cut), node(count - cut)
            c, h = model.cell(c1, c2, h1, h2, None)
        losses.append(F.softmax_cross_entropy(model.out(h), rng.integers(0, 5, rows, "i")))
        return c, h

    node(choice.randint(leaves // 2, leaves))
    return sum(losses)


# -- from sentence to sentence -------------------------------------------------------------------


def seq2seq(size: Size) -> Any:
    """An encoder, a decoder that looks back at all of its words, and a word at each step."""
    _, width, _ = size
    return chainer.Chain(
        source=L.EmbedID(500, width),
        target=L.EmbedID(500, width),
        encoder=L.StatelessLSTM(width, width),
        decoder=L.StatelessLSTM(width, width),
        mixed=L.Linear(2 * width, width),
        out=L.Linear(width, 500),
    )


def seq2seq_loss(model: Any, size: Size, seed: int) -> Any:
    """Compute the loss of a translation with attention, of random lengths."""
    rows, _, words = size
    rng, choice = np.random.default_rng(seed), random.Random(seed)
    c = h = None
    seen = []
    for _ in range(choice.randint(words // 2, words)):
        c, h = model.encoder(c, h, model.source(rng.integers(0, 500, rows, "i")))
        seen.append(h)
    memory = F.stack(seen, 1)
    del seen
    total: Any = 0
    for _ in range(choice.randint(words // 2, words)):
        c, h = model.decoder(c, h, model.target(rng.integers(0, 500, rows, "i")))
        weights = F.softmax(F.matmul(memory, F.expand_dims(h, 2)), 1)
        context = F.squeeze(F.matmul(memory, weights, transa=True), 2)
        mixed = F.dropout(F.tanh(model.mixed(F.concat([h, context]))), 0.2)
        total += F.softmax_cross_entropy(model.out(mixed), rng.integers(0, 500, rows, "i"))
    return total


# -- a tagger ------------------------------------------------------------------------------------


def tagger(size: Size) -> Any:
    """A two-way LSTM over words, and a conditional random field over their tags."""
    _, width, _ = size
    return chainer.Chain(
        embed=L.EmbedID(500, width),
        there=L.StatelessLSTM(width, width),
        back=L.StatelessLSTM(width, width),
        score=L.Linear(2 * width, 12),
        crf=L.CRF1d(12),
    )


def tagger_loss(model: Any, size: Size, seed: int) -> Any:
    """Compute the loss of a bidirectional tagger with a CRF, of a random length."""
    rows, _, words = size
    rng, choice = np.random.default_rng(seed), random.Random(seed)
    length = choice.randint(words // 2, words)
    xs = [F.dropout(model.embed(rng.integers(0, 500, rows, "i")), 0.1) for _ in range(length)]

    def run(cell: Any, xs: Any) -> list[Any]:
        c = h = None
        made = []
        for x in xs:
            c, h = cell(c, h, x)
            made.append(h)
        return made

    there, back = run(model.there, xs), run(model.back, xs[::-1])[::-1]
    scores = [model.score(F.concat(pair)) for pair in zip(there, back, strict=True)]
    return model.crf(scores, [rng.integers(0, 12, rows, "i") for _ in range(length)])


PROGRAMS = [
    Program("TreeLSTM", tree, tree_loss, (32, 128, 80), (8, 32, 14)),
    Program("seq2seq", seq2seq, seq2seq_loss, (32, 128, 60), (8, 32, 20)),
    Program("CRF tagger", tagger, tagger_loss, (32, 128, 80), (8, 32, 14)),
]
