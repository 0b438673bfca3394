"""What does a cap on the workspace of convolutions save, and what does it cost?

Steps on NumPy under `umem.chainer.workspace`, alone and with `Recompute("min")`, beside plain
Chainer. Peaks are of the arrays that a step allocates (gradients, saved arrays, workspace, the
update's temporaries; not parameters, the optimizer's state, inputs), by tracemalloc, in a pass of
their own. Times are processor time on one thread, the kinds of step in turn; a ratio is of
medians. Bits are compared, losses, gradients and running statistics over two steps, with those of
a plain step under the same cap; how far a capped step is from plain Chainer is the norm of the
difference of their gradients after one step, relative to the norm of plain Chainer's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import call
from recompute_parts.networks import NETWORKS, QUICK, Network
from recompute_parts.steps import Results, Trainee, different
from report_tables import Row, figure, quantity, span, text

import umem.chainer

NAMES = ("residual", "ResNet50", "VGG16", "U-Net", "DenseNet")
TARGETS = {
    ("residual", "min"): (0.20, 1.2),
    ("ResNet50", "min"): (0.45, 1.2),
    ("VGG16", "min"): (0.36, 1.2),
    ("U-Net", "min"): (0.22, 1.2),
    ("DenseNet", "min"): (0.22, 1.2),
    ("ResNet50", "alone"): (None, 1.05),
    ("VGG16", "alone"): (0.46, 1.05),
    ("U-Net", "alone"): (0.50, 1.05),
}
"""By network and mode, under `TARGET_CAP`: the most of the raw peak, and of the plain step."""
TARGET_CAP = "4MiB"
CAPS = ("16MiB", "4MiB", "1MiB")
MB = 1e6


class Together(AbstractContextManager[None]):
    """Blocks entered one inside the other, as often as this one is."""

    def __init__(self, *blocks: AbstractContextManager[Any]) -> None:
        self._blocks, self._stack = blocks, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(block)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def contexts(caps: tuple[str, ...]) -> dict[tuple[str, str], AbstractContextManager[Any]]:
    """The kinds of step, by mode and cap; plain Chainer first."""
    found: dict[tuple[str, str], AbstractContextManager[Any]] = {
        ("plain", ""): nullcontext(),
        ("min", ""): umem.chainer.Recompute("min"),
    }
    for cap in caps:
        block = umem.chainer.workspace(cap)
        found["alone", cap] = block
        found["min", cap] = Together(block, umem.chainer.Recompute("min"))
    return found


def measure(network: Network, caps: tuple[str, ...], repeats: int) -> list[Row]:
    """A row a kind of step."""
    trainee = Trainee(network)
    kinds = contexts(caps)
    peaks: dict[Any, int] = {}
    results: dict[Any, Results] = {}
    for kind, context in kinds.items():
        trainee.reset()
        with context:
            for _ in range(5 if kind[0] == "min" else 1):  # learn, follow, plan again
                trainee.step(call)
        peaks[kind], _, results[kind] = trainee.measure(context, call)
    seconds: dict[Any, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, context in kinds.items():
            seconds[kind].append(trainee.seconds(context, call)[0])
    plain = "plain", ""
    exact = gradients(trainee, kinds[plain])
    rows = []
    for kind, context in kinds.items():
        mode, cap = kind
        same = plain if not cap else ("alone", cap)
        ratios = [a / b for a, b in zip(seconds[kind], seconds[plain], strict=True)]
        row: dict[str, Any] = {
            "network": network.name,
            "mode": mode,
            "cap": cap,
            "peak_mb": peaks[kind] / MB,
            "of_raw": peaks[kind] / peaks[plain],
            "time_ratio": statistics.median(seconds[kind]) / statistics.median(seconds[plain]),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "identical": "no" if different(results[same], results[kind]) else "yes",
            "apart": apart(exact, gradients(trainee, context)) if mode == "alone" else None,
            "seconds": seconds[kind],
        }
        row["verdict"] = verdict(row)
        rows.append(row)
    return rows


def gradients(trainee: Trainee, context: AbstractContextManager[Any]) -> dict[str, Any]:
    """Each parameter's gradient after one step from the beginning."""
    trainee.reset()
    with context:
        trainee.step(call, update=lambda: None)
    return {name: p.grad.copy() for name, p in trainee.model.namedparams()}


def apart(exact: dict[str, Any], found: dict[str, Any]) -> float:
    """The norm of the difference of two steps' gradients, relative to that of the first."""
    differences = sum(
        float(np.square(g - found[name], dtype="d").sum()) for name, g in exact.items()
    )
    return (differences / sum(float(np.square(g, dtype="d").sum()) for g in exact.values())) ** 0.5


def verdict(row: Row) -> str | None:
    """What was missed of the target, "met", or None where there is none."""
    if row["cap"] != TARGET_CAP or (row["network"], row["mode"]) not in TARGETS:
        return None
    peak, pace = TARGETS[row["network"], row["mode"]]
    missed = [] if row["identical"] == "yes" else ["other bits"]
    if peak is not None and row["of_raw"] > peak:
        missed.append(f"peak above {peak:g}")
    if row["time_ratio"] > pace:
        missed.append(f"time above {pace:g}")
    return "missed: " + ", ".join(missed) if missed else "met"


def answer(result: common.Result) -> str:
    rows = result["rows"]
    alone = [row for row in rows if row["mode"] == "alone"]
    planned = [row for row in rows if row["mode"] == "min" and row["cap"]]
    bits = [row["identical"] == "yes" for row in rows]
    return (
        f"Alone, a cap leaves {span(row['of_raw'] for row in alone)} of the peak, and a step takes "
        f"{span(row['time_ratio'] for row in alone)} of its time; with the least plan "
        f"{span(row['of_raw'] for row in planned)} of the peak and "
        f"{span(row['time_ratio'] for row in planned)} of the time (at the median "
        f"{figure(statistics.median(row['time_ratio'] for row in planned))}). {sum(bits)} of "
        f"{len(bits)} have the bits of a plain step under the same cap."
    )


BENCH = common.Bench(
    "workspace",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("mode", "mode"),
        text("cap", "cap"),
        quantity("peak", "peak_mb", "MB"),
        quantity("peak of plain's", "of_raw"),
        quantity("time of plain's", "time_ratio"),
        text("least to most", lambda row: span((row["ratio_low"], row["ratio_high"]))),
        text("same bits under the cap", "identical"),
        text("gradients from plain's", lambda row: row["apart"] and f"{row['apart']:.0e}"),
        text("target", "verdict"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small network, one cap, a few steps.")
@click.option("--only", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--cap", "caps", multiple=True, default=CAPS, show_default=True, type=str)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@common.json_option
def main(
    quick: bool, names: tuple[str, ...], caps: tuple[str, ...], repeats: int, path: Path | None
) -> None:
    common.writable(path)
    chosen = QUICK[:1] if quick else [n for n in NETWORKS if n.name in (names or NAMES)]
    if quick:
        caps, repeats = ("64KiB",), 2
    rows = []
    for network in chosen:
        rows += measure(network, caps, repeats)
        click.echo(network.name, err=True)
    options = {"quick": quick, "networks": [n.name for n in chosen], "caps": caps,
               "repeats": repeats}  # fmt: skip
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
