"""What does planned recomputation save, and what does it cost?

On NumPy, beside plain Chainer. Peaks are of the arrays that a step allocates (gradients, saved
arrays, workspace; not parameters, the optimizer's state, inputs), by NumPy's own allocator, in a
pass of their own. The floor is the most that one function needs at once, forward or backward, with
the parameters' gradients: no plan can go below it, so a plan is judged by what it leaves of the
rest, the reducible part. Times are processor time on one thread, the kinds of step in turn; a ratio
is of medians. Results are compared by the bits of losses, gradients and running statistics over two
steps. Beside the plans: regions by hand, and Chen's blocks.

``--workspace`` asks another question: what does a cap on the workspace of convolutions save, and
what does it cost, alone and with the least plan? Bits are compared with those of a plain step under
the same cap.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import common
from models import Region, call
from recompute_parts.networks import NETWORKS, QUICK, Network
from recompute_parts.steps import Results, Trainee, different
from report_tables import Row, figure, quantity, span, text

import umem.chainer
from umem.errors import UmemError

# isort: split
import chainer.functions as F  # after the compatibility layer

MB = 1e6
WITH_WORKSPACE = ("residual", "ResNet50", "VGG16", "U-Net", "DenseNet")
CAPS = ("16MiB", "4MiB", "1MiB")


@dataclass
class Mode:
    """A way to run a step."""

    name: str
    context: Any
    region: Region = call
    budget: int | str | None = None
    error: str | None = None
    seconds: list[float] | None = None
    forward: list[float] | None = None


# -- the kinds of step -------------------------------------------------------------------------


def modes(network: Network, trainee: Trainee, keep_all: int, floor: int) -> list[Mode]:
    """Plain Chainer first."""
    constant = trainee.constant_bytes

    def planned(name: str, budget: int | str, **more: Any) -> Mode:
        return Mode(name, umem.chainer.Recompute(budget, **more), budget=budget)

    found = [
        Mode("plain", nullcontext()),
        planned("100%", "100%"),
        planned("half", constant + (keep_all + floor) // 2),
        planned("min", "min"),
    ]
    for share in network.points:
        found.append(planned(f"{share:.2f} of raw", constant + round(share * keep_all)))
    found.append(planned("min, Chen", "min", method="chen"))
    if not network.by_hand:
        return found
    if network.forget_is_wrong:
        found.append(Mode("by hand: checkpoint", nullcontext(), umem.chainer.checkpoint))
    else:
        found.append(Mode("by hand: F.forget", nullcontext(), F.forget))
    return found


def prepare(trainee: Trainee, mode: Mode) -> None:
    """Steps until the plan is made; what it raises is kept as the mode's error."""
    trainee.reset()
    try:
        with mode.context:
            for _ in range(5 if mode.budget is not None else 1):  # learn, follow, plan again
                trainee.step(mode.region)
    except (UmemError, MemoryError) as error:
        mode.error = f"{type(error).__name__}: {error}"


# -- a network ---------------------------------------------------------------------------------


def measure(
    network: Network, repeats: int | None = None, names: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """A row a kind of step; of those that are named, if any are."""
    trainee = Trainee(network)
    keep_all, _, plain_results = trainee.measure(nullcontext(), call)
    floor = trainee.floor()
    kinds = modes(network, trainee, keep_all, floor)
    kinds = [mode for mode in kinds if not names or mode.name in ("plain", *names)]
    for mode in kinds:
        prepare(trainee, mode)
    works = [mode for mode in kinds if mode.error is None]
    measured = {}
    for mode in works:
        measured[mode.name] = trainee.measure(mode.context, mode.region)
        mode.seconds, mode.forward = [], []
    for _ in range(repeats or network.repeats):
        for mode in works:
            step, forward = trainee.seconds(mode.context, mode.region)
            mode.seconds.append(step)
            mode.forward.append(forward)
    rows = []
    for mode in kinds:
        row: dict[str, Any] = {"network": network.name, "mode": mode.name}
        if mode.error is not None:
            row |= {"error": mode.error}
        else:
            peak, objects, results = measured[mode.name]
            row |= memory(mode, peak, keep_all, floor, trainee.constant_bytes)
            row["objects_mb"] = objects / MB
            row |= pace(mode, kinds[0])
            row["identical"] = "no" if different(plain_results, results) else "yes"
            row["differ"] = different(plain_results, results)
        row["seconds"] = mode.seconds
        rows.append(row)
    return rows


def memory(mode: Mode, peak: int, keep_all: int, floor: int, constant: int) -> dict[str, Any]:
    """Make the columns of memory of a mode."""
    promise = mode.context.predicted_bytes if mode.budget is not None else None
    found = {
        "peak_mb": peak / MB, "of_raw": peak / keep_all, "floor_mb": floor / MB,
        "floor_of_raw": floor / keep_all, "reducible": (peak - floor) / (keep_all - floor),
        "predicted_over_measured": promise and promise / (peak + constant),
        "predicted_over_measured_step": promise and (promise - constant) / peak,
        "measured_over_budget": None,
    }  # fmt: skip
    if isinstance(mode.budget, int):
        found["measured_over_budget"] = (peak + constant) / mode.budget
    return found


def pace(mode: Mode, plain: Mode) -> dict[str, Any]:
    """Make the columns of time of a mode, beside the plain step's."""
    assert mode.seconds and plain.seconds and plain.forward
    ratios = [a / b for a, b in zip(mode.seconds, plain.seconds, strict=True)]
    return {
        "median_s": statistics.median(mode.seconds),
        "forward_of_plain": statistics.median(plain.forward) / statistics.median(plain.seconds),
        "time_ratio": statistics.median(mode.seconds) / statistics.median(plain.seconds),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


# -- a cap on workspace ------------------------------------------------------------------------


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


def capped_steps(caps: tuple[str, ...]) -> dict[tuple[str, str], AbstractContextManager[Any]]:
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


def capped(network: Network, caps: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
    """Measure each kind of step under caps: a row a kind."""
    trainee, plain = Trainee(network), ("plain", "")
    kinds = capped_steps(caps)
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
    rows = []
    for mode, cap in kinds:
        own, same = seconds[mode, cap], results["alone", cap] if cap else results[plain]
        ratios = [a / b for a, b in zip(own, seconds[plain], strict=True)]
        rows.append({
            "network": network.name, "mode": mode, "cap": cap, "peak_mb": peaks[mode, cap] / MB,
            "of_raw": peaks[mode, cap] / peaks[plain],
            "time_ratio": statistics.median(own) / statistics.median(seconds[plain]),
            "ratio_low": min(ratios), "ratio_high": max(ratios),
            "identical": "no" if different(same, results[mode, cap]) else "yes",
            "seconds": own,
        })  # fmt: skip
    return rows


def workspace_answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    alone = [row for row in rows if row["mode"] == "alone"]
    planned = [row for row in rows if row["mode"] == "min" and row["cap"]]
    bits = [row["identical"] == "yes" for row in rows]
    return (
        f"Alone, a cap leaves {span(row['of_raw'] for row in alone)} of the peak, and a step takes "
        f"{span(row['time_ratio'] for row in alone)} of its time; with the least plan "
        f"{span(row['of_raw'] for row in planned)} of the peak and "
        f"{span(row['time_ratio'] for row in planned)} of the time (at the median "
        f"{_median(planned, 'time_ratio')}). {sum(bits)} of {len(bits)} have the bits of a plain "
        "step under the same cap."
    )


# -- all of it ---------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = [row for row in result["rows"] if row["mode"] == "min" and "error" not in row]
    bits = [row["identical"] == "yes" for row in result["rows"] if "identical" in row]
    return (
        f'The least plan ("min") leaves {span(row["of_raw"] for row in rows)} of the peak of '
        f"{len(rows)} networks, and {_median(rows, 'reducible')} of what can be saved at the "
        f"median; a step takes {span(row['time_ratio'] for row in rows)} of its time "
        f"({_median(rows, 'time_ratio')} at the median), and {sum(bits)} of {len(bits)} ways to "
        "run it have the same bits."
    )


def _median(rows: list[dict[str, Any]], key: str) -> str:
    return figure(statistics.median(row[key] for row in rows))


def _spread(row: Row) -> str | None:
    return span((row["ratio_low"], row["ratio_high"])) if "ratio_low" in row else None


BENCH = common.Bench(
    "recompute",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("mode", "mode"),
        quantity("peak", "peak_mb", "MB"),
        quantity("floor", "floor_mb", "MB"),
        quantity("peak of plain's", "of_raw"),
        quantity("reducible part left", "reducible"),
        quantity("time of plain's", "time_ratio"),
        text("least to most", _spread),
        quantity("forward of plain's step", "forward_of_plain"),
        text("same bits", "identical"),
        quantity("predicted of measured", "predicted_over_measured", places=3),
        quantity("measured of budget", "measured_over_budget", places=3),
    ),
    notes=common.errors("network", "mode"),
)
WORKSPACE = common.Bench(
    "recompute-workspace",
    "What does a cap on the workspace of convolutions save, and what does it cost?",
    workspace_answer,
    (
        text("network", "network"),
        text("mode", "mode"),
        text("cap", "cap"),
        quantity("peak", "peak_mb", "MB"),
        quantity("peak of plain's", "of_raw"),
        quantity("time of plain's", "time_ratio"),
        text("least to most", _spread),
        text("same bits under the cap", "identical"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small networks, a few steps.")
@click.option("--only", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--mode", "kinds", multiple=True, help='Only this kind of step, such as "min".')
@click.option("--repeats", type=click.IntRange(1), help="Timed steps of each kind.")
@click.option("--workspace", "is_workspace", is_flag=True, help="Caps on workspace, beside no cap.")
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    kinds: tuple[str, ...],
    repeats: int | None,
    is_workspace: bool,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
    common.writable(path)
    chosen = QUICK if quick else [n for n in NETWORKS if not names or n.name in names]
    if is_workspace:
        chosen = QUICK[:1] if quick else [n for n in chosen if n.name in WITH_WORKSPACE]
    caps = ("64KiB",) if quick else CAPS
    rows = []
    for network in chosen:
        if is_workspace:
            rows += capped(network, caps, repeats or network.repeats)
        else:
            rows += measure(network, repeats, kinds)
        click.echo(f"{network.name}: {len(rows)} rows so far", err=True)
    options = {"quick": quick, "networks": [n.name for n in chosen], "repeats": repeats}
    bench = WORKSPACE if is_workspace else BENCH
    bench.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
