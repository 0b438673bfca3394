"""The networks of bench/recompute.py: which models, and what is asked of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        model: its name and size in bench/models/.
        batch: how many samples a step has; of a graph network, how many nodes.
        target: the most of the reducible part that "min" may leave; None: not set.
        points: budgets of its own: a share of the raw peak, the most that the step may take.
        most: the share of the raw peak that "min" may leave; None: not set.
        again: how often "min" may run forward once more; None: its limit is that of the others.
        by_hand: whether it has regions that one would checkpoint by hand.
        forget_is_wrong: why F.forget does not train it right.
        repeats: timed steps of each kind.
    """

    name: str
    model: tuple[str, str]
    batch: int = 8
    target: float | None = None
    points: tuple[tuple[float, float], ...] = ()
    most: float | None = None
    again: float | None = None
    by_hand: bool = True
    forget_is_wrong: str | None = None
    repeats: int = 5


POINTS = ((0.46, 1.35), (0.38, 1.47))
WITH_DROPOUT = tuple((share + 0.02, limit) for share, limit in POINTS)
MASKS = "masks are drawn again"
NETWORKS = (
    Network("residual", ("residual", "24 blocks"), points=POINTS, repeats=7),
    Network("residual, dropout", ("residual", "24 blocks, dropout"), points=WITH_DROPOUT,
            repeats=7, forget_is_wrong=MASKS),
    Network("ResNet50", ("ResNet50", "128 px"), target=0.35, repeats=3),
    Network("VGG16", ("VGG16", "128 px, no dropout"), target=0.5, repeats=3),
    Network("VGG16, 64 px", ("VGG16", "64 px, no dropout"), target=0.5, repeats=3),
    Network("U-Net", ("U-Net", "5 levels"), target=0.5),
    Network("DenseNet", ("DenseNet", "24 layers"), target=0.35),
    Network("transformer", ("transformer", "12 layers"), target=0.35, most=0.19, again=1.05),
    Network("LSTM", ("unrolled LSTM", "200 words"), 128, target=0.35, most=0.05, again=1.05),
    Network("GCN", ("GCN", "8 layers"), 20_000, target=0.35),
    *(Network(f"{cell}, {count} words", (cell, f"{count} words, dropout"), batch,
              by_hand=False)
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
