"""A model trained on a graph in parts, in many ways, by a process alone or by each of several."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import umem.chainer  # isort: skip
import chainer
import numpy as np

WAYS = (
    "plain",
    "recompute",
    "checkpoint",
    "workspace",
    "virtual",
    "lookahead",
    "recorded",
    "offload",
    "files",
    "half",
    "8 bits",
)
SAME_BITS = WAYS[:8]
"""Ways that change no bit; the others are the same on any number of ranks, and not as plain."""


class Trained(NamedTuple):
    """What came of it; the first three are alike on all ranks."""

    losses: list[str]
    weights: str
    shares: list[float]
    sent_bytes: list[int]
    widths: list[int]
    parts: list[int]


def train(
    folder: Path,
    comm: Any,
    way: str = "plain",
    *,
    dropout: float = 0.3,
    updates: int = 4,
    place: Path | None = None,
) -> Trained:
    """Train a small model; `place` is a folder for who moves arrays to files."""
    graph = umem.chainer.ParallelGraph(folder, comm)
    np.random.seed(7 + graph.ranks.rank)  # only rank 0's counts
    hidden = 72 if way == "8 bits" else 12  # states of small parameters are not made small
    model = umem.chainer.ParallelGCN(
        comm, graph.feature_count, hidden, graph.class_count, layers=3, dropout=dropout
    )
    kind = umem.chainer.optimizers.Adam8bit if way == "8 bits" else chainer.optimizers.Adam
    optimizer = kind(0.01).setup(model)
    x = graph.features if way == "files" else graph.load_features()
    labels = graph.labels_where(graph.train_mask)
    losses, sent = [], []

    def loss() -> Any:
        again = way == "checkpoint"
        scores = umem.chainer.checkpoint(model, graph, x) if again else model(graph, x)
        found = graph.cross_entropy(scores, labels)
        losses.append(float(found.array).hex())
        return found

    with ExitStack() as stack:
        enter(stack, way, model, optimizer, place)
        for _ in range(updates):
            before = graph.ranks.sent_bytes["halo"]
            optimizer.update(loss)
            sent.append(graph.ranks.sent_bytes["halo"] - before)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores = model(graph, x)
        masks = graph.train_mask, graph.val_mask, graph.test_mask
        shares = [graph.accuracy(scores, graph.labels_where(mask)) for mask in masks]
    weights = b"".join(p.array.tobytes() for _, p in sorted(model.namedparams()))
    return Trained(
        losses,
        hashlib.sha256(weights).hexdigest(),
        shares,
        sent,
        model.exchanged_widths(x),
        list(graph.parts),
    )


def enter(stack: ExitStack, way: str, model: Any, optimizer: Any, place: Path | None) -> None:
    """Have what changes how a step is computed on until the stack is left."""
    if way == "recompute":
        stack.enter_context(umem.chainer.Recompute("min"))
    elif way == "workspace":
        stack.enter_context(umem.chainer.workspace("16KiB"))
    elif way in ("virtual", "lookahead"):
        stack.enter_context(umem.virtual_gpu("t4", vram="16MiB"))
        stack.enter_context(umem.managed())
        if way == "lookahead":
            stack.enter_context(umem.chainer.LookaheadPrefetch())
    elif way == "recorded":
        stack.enter_context(umem.record())
    elif way == "offload":
        assert place is not None
        stack.enter_context(umem.chainer.Offload(place))
    elif way == "half":
        stack.callback(umem.chainer.half_precision(model, optimizer).undo)
