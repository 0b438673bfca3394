"""What is learnt with states of 8 bits, in half precision, and with activations in bfloat16?

Two small networks on NumPy, a transformer that fills in bytes of umem's own pages and a
convolutional network on gratings of which a tenth have a wrong label: the loss on what was held
out, after training by Chainer's Adam in float32 and with each technique, from the same start on the
same batches, over three seeds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, counted, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
from models.learners import Gratings, MaskedBytes

SEEDS = (0, 1, 2)
NETWORKS: dict[str, Callable[[], Any]] = {
    "language": lambda: MaskedBytes(common.HERE.parent / "docs"),
    "pictures": Gratings,
}


@dataclass(frozen=True)
class Technique:
    """A way to train, and for how long.

    Attributes:
        steps: of training.
        held_out: batches that the loss is the mean of.
        optimizer: makes the optimizer.
        block: what training is inside of, given the model and the optimizer.
    """

    steps: int
    held_out: int
    optimizer: Callable[..., Any] = chainer.optimizers.Adam
    block: Callable[[Any, Any], AbstractContextManager[Any]] = lambda model, rule: nullcontext()


TECHNIQUES = {
    "8-bit states": Technique(150, 25, umem.chainer.optimizers.Adam8bit),
    "half precision": Technique(100, 20, block=umem.chainer.half_precision),
    "saved in bfloat16": Technique(
        100, 20, block=lambda model, rule: umem.chainer.saved_in("bfloat16")
    ),
}


def loss_of(network: str, seed: int, how: Technique) -> float:
    """Train a network, and return its loss on what was held out."""
    np.random.seed(seed)
    model = NETWORKS[network]()
    optimizer = how.optimizer(alpha=1e-3).setup(model)
    generator = np.random.default_rng(seed)
    with how.block(model, optimizer):
        for step in range(how.steps):
            optimizer.alpha = 1e-3 * (1 - step / how.steps)  # to nothing: less noise at the end
            optimizer.update(model, *model.batch(generator, False))
    generator = np.random.default_rng(10_000)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        found = [float(model(*model.batch(generator, True)).array) for _ in range(how.held_out)]
    return statistics.fmean(found)


def learnt(name: str, network: str, seed: int, quick: bool) -> Row:
    """Compare a technique with plain training of the same length."""
    how = TECHNIQUES[name]
    steps, held_out = (3, 2) if quick else (how.steps, how.held_out)
    whole = loss_of(network, seed, Technique(steps, held_out))
    loss = loss_of(network, seed, Technique(steps, held_out, how.optimizer, how.block))
    return {
        "technique": name, "network": network, "seed": seed, "steps": steps, "whole": whole,
        "loss": loss, "change": loss / whole - 1,
    }  # fmt: skip


def means(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """By technique and network, how the mean loss over the seeds changes."""
    found = {}
    for key in dict.fromkeys((row["technique"], row["network"]) for row in rows):
        its = [row for row in rows if (row["technique"], row["network"]) == key]
        found[key] = sum(row["loss"] for row in its) / sum(row["whole"] for row in its) - 1
    return found


def signed(share: float) -> str:
    return percent(share, signed=True)


def answer(result: common.Result) -> str:
    found, parts = means(result["rows"]), []
    for name in dict.fromkeys(technique for technique, _ in found):
        changes = [change for (technique, _), change in found.items() if technique == name]
        parts.append(f"{span(changes, signed)} with {name}")
    return (
        "Over the seeds the mean loss on what is held out changes by "
        f"{'; '.join(parts)}; for a seed by {span((r['change'] for r in result['rows']), signed)}."
    )


BENCH = common.Bench(
    "low_precision",
    __doc__,
    answer,
    (
        text("technique", "technique"),
        text("network", "network"),
        counted("seed", "seed"),
        counted("steps", "steps"),
        quantity("loss in float32", "whole"),
        quantity("loss", "loss"),
        text("change", lambda row: signed(row["change"])),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Three steps, one seed.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    rows: list[Row] = []
    for name in TECHNIQUES:
        for network in NETWORKS:
            for seed in SEEDS[: 1 if quick else None]:
                rows.append(learnt(name, network, seed, quick))
                click.echo(f"{name}, {network}, seed {seed}", err=True)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
