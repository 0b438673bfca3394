"""Small networks that learn something in a minute, with what they learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from models.attention import TransformerLayer

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class MaskedBytes(chainer.Chain):  # type: ignore[misc]
    """A transformer that fills in bytes of a text of which 15% are left out.

    Args:
        folder: its Markdown pages are the text; the last tenth is held out.
    """

    length, width, share = 64, 128, 0.15

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(256, self.width)
            self.places = L.EmbedID(self.length, self.width)
            self.layers = chainer.ChainList(*(TransformerLayer(self.width, 4) for _ in range(2)))
            self.norm, self.score = L.LayerNormalization(self.width), L.Linear(self.width, 256)
        pages = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.md")))
        self.text = np.frombuffer(pages, np.uint8).astype("i")

    def batch(self, generator: np.random.Generator, held_out: bool, size: int = 16) -> Batch:
        """Draw lines with bytes left out, and these bytes; -1 for all others."""
        split = len(self.text) * 9 // 10
        low, high = (split, len(self.text)) if held_out else (0, split)
        starts = generator.integers(low, high - self.length, size)
        lines = self.text[starts[:, None] + np.arange(self.length)]
        missing = generator.random(lines.shape) < self.share
        return np.where(missing, 0, lines).astype("i"), np.where(missing, lines, -1).astype("i")

    def __call__(self, x: Any, t: Any) -> Any:
        places = np.broadcast_to(np.arange(self.length, dtype="i"), x.shape)
        y = self.embed(x) + self.places(places)
        for layer in self.layers:
            y = layer(y)
        y = self.score(self.norm(F.reshape(y, (-1, self.width))))
        return F.softmax_cross_entropy(y, t.reshape(-1))


class Gratings(chainer.Chain):  # type: ignore[misc]
    """A convolutional network that tells the direction of gratings; a tenth of them lie."""

    pixels, classes, lies = 24, 12, 0.1

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.convs = chainer.ChainList(
                L.Convolution2D(1, 32, 3, pad=1),
                L.Convolution2D(32, 64, 3, pad=1),
                L.Convolution2D(64, 64, 3, pad=1),
            )
            self.norms = chainer.ChainList(*(L.BatchNormalization(n) for n in (32, 64, 64)))
            self.wide, self.score = L.Linear(576, 128), L.Linear(128, self.classes)

    def batch(self, generator: np.random.Generator, held_out: bool, size: int = 32) -> Batch:
        """Draw pictures and their classes; none is ever drawn twice, so all are held out."""
        del held_out
        t = generator.integers(0, self.classes, size)
        angle = (t + generator.uniform(-0.3, 0.3, size)) * np.pi / self.classes
        rows, columns = np.mgrid[: self.pixels, : self.pixels]
        along = np.cos(angle)[:, None, None] * rows + np.sin(angle)[:, None, None] * columns
        wave = np.sin(
            along * generator.uniform(0.5, 0.9, (size, 1, 1)) + 6 * generator.random((size, 1, 1))
        )
        x = wave + generator.standard_normal(wave.shape)
        lying = generator.random(size) < self.lies
        t = np.where(lying, generator.integers(0, self.classes, size), t)
        return x[:, None].astype("f"), t.astype("i")

    def __call__(self, x: Any, t: Any) -> Any:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pooling_2d(F.relu(norm(conv(x))), 2)
        return F.softmax_cross_entropy(self.score(F.relu(self.wide(x))), t)
