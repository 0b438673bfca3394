"""Models of tokens without recurrence: a transformer, a mixer, and words from words."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from models.model import Model, Region, call, labels, normal


class TransformerLayer(chainer.Chain):
    """Norm first; its queries, keys and values are one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.norm1 = L.LayerNormalization(width)
            self.norm2 = L.LayerNormalization(width)
            self.qkv = L.Linear(width, 3 * width)
            self.out = L.Linear(width, width)
            self.wide = L.Linear(width, 4 * width)
            self.narrow = L.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        rows = F.reshape(x, (batch * length, width))
        rows = rows + self.out(self._attend(self.qkv(self.norm1(rows)), batch, length, width))
        rows = rows + self.narrow(F.relu(self.wide(self.norm2(rows))))
        return F.reshape(rows, x.shape)

    def _attend(self, qkv: Any, batch: int, length: int, width: int) -> Any:
        size = width // self.heads
        qkv = F.reshape(qkv, (batch, length, 3, self.heads, size))
        qkv = F.reshape(F.transpose(qkv, (2, 0, 3, 1, 4)), (3, batch * self.heads, length, size))
        q, k, v = F.separate(qkv)
        weights = F.softmax(F.matmul(q, k, transb=True) * size**-0.5, axis=2)
        y = F.reshape(F.matmul(weights, v), (batch, self.heads, length, size))
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), (batch * length, width))


def transformer(layers: int, length: int, width: int = 128) -> Model:
    """Build an encoder that classifies sequences."""
    parts = [TransformerLayer(width, 4) for _ in range(layers)]
    score = L.Linear(width, 100)

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(batch, length, width), labels(batch * length, classes=100)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        for part in parts:
            x = region(part, x)
        return F.softmax_cross_entropy(score(F.reshape(x, (-1, width))), t)

    return Model(chainer.ChainList(*parts, score), inputs, loss, "Adam")


def gelu(x: Any) -> Any:
    return x * F.sigmoid(1.702 * x)


class MixerLayer(chainer.Chain):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
            self.wide1, self.narrow1 = L.Linear(patches, 128), L.Linear(128, patches)
            self.wide2, self.narrow2 = L.Linear(width, 256), L.Linear(256, width)

    def forward(self, x: Any) -> Any:
        rows = F.reshape(self.norm1(F.reshape(x, (-1, x.shape[2]))), x.shape)
        mixed = self.narrow1(gelu(self.wide1(F.swapaxes(rows, 1, 2), n_batch_axes=2)), 2)
        x = x + F.swapaxes(mixed, 1, 2)
        rows = F.reshape(self.norm2(F.reshape(x, (-1, x.shape[2]))), x.shape)
        return x + self.narrow2(gelu(self.wide2(rows, n_batch_axes=2)), n_batch_axes=2)


def mixer(layers: int = 4, patches: int = 64, width: int = 128) -> Model:
    """Build an MLP-Mixer that classifies images."""
    parts = [MixerLayer(patches, width) for _ in range(layers)]
    score = L.Linear(width, 10)

    def inputs(batch: int) -> tuple[Any, Any]:
        return normal(batch, patches, width), labels(batch, classes=10)

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        for part in parts:
            x = region(part, x)
        return F.softmax_cross_entropy(score(F.mean(x, axis=1)), t)

    return Model(chainer.ChainList(*parts, score), inputs, loss, "AdamW")


def language_model(words: int = 4000, width: int = 128, length: int = 32) -> Model:
    """Says each word from the one before."""
    embed, score = L.EmbedID(words, width), L.Linear(width, words)

    def inputs(batch: int) -> tuple[Any]:
        return (labels(batch, length + 1, classes=words),)

    def loss(text: Any, region: Region = call) -> Any:
        y = F.reshape(F.dropout(embed(text[:, :-1])), (-1, width))
        return F.softmax_cross_entropy(region(score, y), text[:, 1:].ravel())

    return Model(chainer.ChainList(embed, score), inputs, loss, "Adam")


MODELS = {
    "transformer": {
        "4 layers": lambda: transformer(4, length=64),
        "12 layers": lambda: transformer(12, length=128),
    },
    "mixer": {"4 layers": mixer},
    "language model": {"4,000 words": language_model},
}
