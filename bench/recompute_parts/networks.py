"""The networks of bench/recompute.py: which models, and what is asked of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        model: its name and size in bench/models/.
        batch: how many samples a step has; of a graph network, how many nodes.
        points: budgets of its own, as shares of the raw peak.
        by_hand: whether it has regions that one would checkpoint by hand.
        forget_is_wrong: why F.forget does not train it right.
        repeats: timed steps of each kind.
    """

    name: str
    model: tuple[str, str]
    batch: int = 8
    points: tuple[float, ...] = ()
    by_hand: bool = True
    forget_is_wrong: str | None = None
    repeats: int = 5


MASKS = "masks are drawn again"
NETWORKS = (
    Network("residual", ("residual", "24 blocks"), points=(0.46, 0.38), repeats=7),
    Network("residual, dropout", ("residual", "24 blocks, dropout"), points=(0.48, 0.40),
            repeats=7, forget_is_wrong=MASKS),
    Network("ResNet50", ("ResNet50", "128 px"), repeats=3),
    Network("VGG16", ("VGG16", "128 px, no dropout"), repeats=3),
    Network("VGG16, 64 px", ("VGG16", "64 px, no dropout"), repeats=3),
    Network("U-Net", ("U-Net", "5 levels")),
    Network("DenseNet", ("DenseNet", "24 layers")),
    Network("transformer", ("transformer", "12 layers")),
    Network("LSTM", ("unrolled LSTM", "200 words"), 128),
    Network("GCN", ("GCN", "8 layers"), 20_000),
    *(Network(f"{cell}, {count} words", (cell, f"{count} words, dropout"), batch, by_hand=False)
      for cell, count, batch in (("LSTM", 60, 32), ("LSTM", 300, 16), ("GRU", 60, 64),
                                 ("GRU", 300, 32))),
)  # fmt: skip
QUICK = (
    Network("small residual", ("residual", "6 narrow blocks"), repeats=3),
    Network(
        "small residual, dropout",
        ("residual", "6 narrow blocks, dropout"),
        repeats=3,
        forget_is_wrong=MASKS,
    ),
)
