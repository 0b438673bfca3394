"""Does a batch in parts give the gradient of the whole, whatever its loss divides by?

Each small network takes a batch of 13 samples at once, then by `umem.chainer.accumulate` in parts
of 5, 5 and 3 and in parts of 2 and a last one of 1, with `dropout="batch"`. A figure is the norm of
the difference of the gradients relative to that of the whole, the worst of both. Beside it is the
mean of the parts' means, which Hugging Face's Trainer computed until October 2024
(transformers#34191). That fault is planted too, as `weight=` that is the same for every part: the
first step must refuse it. Two of the networks divide a sum by a number, and need a `weight=`.

What the comparisons of parts with wholes add to the time of an epoch is measured for a network
over sequences whose lengths and labels vary.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from contextlib import nullcontext
from pathlib import Path
from time import process_time
from typing import Any

import click
import common
import numpy as np
from accumulation_parts.small_networks import NETWORKS, Network, Trained
from report_tables import Row, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
from chainer import optimizers

from umem.errors import AccumulationError

SAMPLES, SIZES, SEED, BATCH = 13, (5, 2), 7, 64
MOST = {"float64": 1e-12, "float32": 1e-5}
"""How far apart gradients may be."""


def made(network: Network, dtype: Any) -> tuple[Trained, Any]:
    """A network, always the same, and its optimizer, which leaves parameters as they are."""
    np.random.seed(SEED)
    with chainer.using_config("dtype", dtype):
        trained = network.make(np.random.RandomState(SEED), SAMPLES, dtype)
        trained.loss(*trained.batch)
    return trained, optimizers.SGD(0.0).setup(trained.model)


def gradients(network: Network, dtype: Any, size: int | None, **options: Any) -> Any:
    """The gradient of a batch, at once or in parts; ignored labels and dropout are the same."""
    trained, optimizer = made(network, dtype)
    parts: Any = nullcontext()
    if size is not None:
        how: Any = {"dropout": "batch", "weight": trained.weight, **options}
        parts = umem.chainer.accumulate(optimizer, micro_batch=size, **how)
    with chainer.using_config("dtype", dtype), parts:
        np.random.seed(SEED)
        optimizer.update(trained.loss, *trained.batch)
    return flat(trained.model)


def mean_of_means(network: Network, dtype: Any, size: int) -> Any:
    """What a program gets that gives each part the same weight, masks of dropout as they come."""
    trained, _ = made(network, dtype)
    parts = -(-SAMPLES // size)
    total: Any = 0.0
    with chainer.using_config("dtype", dtype):
        for at in range(0, SAMPLES, size):
            trained.model.cleargrads()
            trained.loss(*(one[at : at + size] for one in trained.batch)).backward()
            total = total + flat(trained.model) / parts
    return total


def flat(model: Any) -> Any:
    return np.concatenate([p.grad.ravel() for _, p in sorted(model.namedparams())]).astype("d")


def alike(*batch: Any) -> float:
    """The fault: each part counts as much, whatever its loss was divided by."""
    return 1.0


def apart(whole: Any, parts: Any) -> float:
    return float(np.linalg.norm(whole - parts) / np.linalg.norm(whole))


def is_refused(network: Network) -> bool:
    """Whether the fault of 2024, planted, is refused."""
    try:
        gradients(network, np.float64, SIZES[0], weight=alike)
    except AccumulationError:
        return True
    return False


def measure(network: Network) -> Row:
    """A row: how far parts are from the whole, in both types."""
    row: dict[str, Any] = {"network": network.name, "loss": network.loss}
    for name in MOST:
        dtype = np.dtype(name)
        whole = gradients(network, dtype, None)
        row[name] = [apart(whole, gradients(network, dtype, size)) for size in SIZES]
    whole = gradients(network, np.dtype("d"), None)
    row["mean_of_means"] = apart(whole, mean_of_means(network, np.dtype("d"), SIZES[0]))
    row["refused"] = is_refused(network)
    row["met"] = all(max(row[name]) <= most for name, most in MOST.items()) and row["refused"]
    return row


def epoch_seconds(batches: int, check: bool) -> float:
    """How long an epoch of an unrolled LSTM takes, with labels and lengths that vary."""
    draw = np.random.RandomState(SEED)
    network = next(one for one in NETWORKS if one.name == "LSTM, unrolled")
    trained = network.make(draw, BATCH, np.dtype("f"))
    optimizer = optimizers.SGD(0.0).setup(trained.model)
    epoch = []
    for at in range(batches):
        x, t = (one.copy() for one in network.make(draw, BATCH, np.dtype("f")).batch)
        length = 6 if at < 3 else int(draw.randint(2, 7))
        t[draw.rand(BATCH) < draw.rand()] = -1
        epoch.append((x[:, :length], t[:, :length]))
    start = process_time()
    with umem.chainer.accumulate(optimizer, micro_batch=BATCH // 8, check=check):
        for batch in epoch:
            optimizer.update(trained.loss, *batch)
    return process_time() - start


def check_costs(batches: int, repeats: int) -> list[float]:
    """What the comparisons add to an epoch, as shares of its time."""
    epoch_seconds(3, check=True)
    pairs = [[epoch_seconds(batches, check) for check in (True, False)] for _ in range(repeats)]
    return [checked / plain - 1 for checked, plain in pairs]


def answer(result: common.Result) -> str:
    rows = result["rows"]
    costs = result["options"].get("check_costs", [])
    added = (
        f"; comparing parts with wholes adds {100 * float(np.median(costs)):.1f}% of processor "
        f"time to an epoch of {result['options']['batches']} batches of {BATCH} in eight parts (an "
        f"unrolled LSTM whose "
        f"lengths and labels vary; {100 * min(costs):.1f} to {100 * max(costs):.1f} in "
        f"{len(costs)} repeats)"
        if costs
        else ""
    )
    worst = {name: max(max(row[name]) for row in rows) for name in MOST}
    near = " and ".join(
        f"within {most:g} of the whole batch's gradient in {name} (the worst {worst[name]:.0e})"
        for name, most in MOST.items()
    )
    return (
        f"{sum(row['met'] for row in rows)} of {len(rows)} networks are {near}, while a mean of "
        f"means is {span(100 * row['mean_of_means'] for row in rows)}% away, and was refused on "
        f"{sum(row['refused'] for row in rows)} of {len(rows)} where it was planted{added}."
    )


def shown(value: float) -> str:
    return f"{value:.0e}" if value else "0"


BENCH = common.Bench(
    "accumulation",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("loss", "loss"),
        text("float64", lambda row: shown(max(row["float64"]))),
        text("float32", lambda row: shown(max(row["float32"]))),
        text("mean of means", lambda row: f"{row['mean_of_means']:.1%}"),
        text("that fault", lambda row: "refused" if row["refused"] else "not seen"),
        text("target", lambda row: "met" if row["met"] else "missed"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Four networks.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    chosen = NETWORKS[::6] if quick else NETWORKS
    rows = [measure(network) for network in chosen]
    batches, repeats = (10, 1) if quick else (100, 3)
    options: dict[str, Any] = {"quick": quick, "sizes": SIZES, "batches": batches}
    options["check_costs"] = check_costs(batches, repeats)
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
