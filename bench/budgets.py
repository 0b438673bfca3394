"""On NumPy, is a budget in bytes kept from the first step, and what do the first steps cost?

Three budgets a network: the least, which "min" promises; 1.25 times it; and halfway to what a plain
step takes. Each has a fresh `umem.chainer.Recompute`. Peaks are those of arrays, with parameters,
state and inputs, by NumPy's own allocator in steps of their own. Times are processor time on one
thread, of the first three steps, beside plain ones right before; the planner's is taken off.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import common
from models import call
from recompute_parts.array_bytes import ArrayBytes
from recompute_parts.networks import NETWORKS, QUICK, Network
from recompute_parts.steps import Trainee
from report_tables import percent, quantity, span, text

import umem.chainer
from umem.errors import BudgetError, RecomputeWarning

FIRST, PLANNED, TRACED = 3, 4, 2
"""The steps whose time is taken; the step from which a plan holds; the steps traced at a time."""
MB = 1e6
Mode = AbstractContextManager[Any]


# -- memory ------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[ArrayBytes]:
    """Count arrays, without those of plans: in a first step a plan is made in between."""
    # Private: no hook tells when a plan is made.
    from umem.chainer.recompute.graph_store import Graphs

    plan_first = Graphs.plan_first

    def planned(graphs: Any, now: Any) -> Any:
        with meter.paused():
            return plan_first(graphs, now)

    Graphs.plan_first = planned  # type: ignore[method-assign]
    try:
        with ArrayBytes() as meter:
            yield meter
    finally:
        Graphs.plan_first = plan_first  # type: ignore[method-assign]


def peaks(trainee: Trainee, mode: Mode, planned: bool = True) -> list[int]:
    """The peaks of the first two steps and of two planned ones: arrays, with what is there before.

    Between them plans are made, untraced: their tables are arrays, too, on the host alone.
    """
    trainee.reset()
    trainee.model.cleargrads()
    gc.collect()
    with mode:
        found = traced(trainee)
        if planned:
            for _ in range(PLANNED - TRACED):
                trainee.step()
            found += traced(trainee)
    return found


def traced(trainee: Trainee) -> list[int]:
    """The peaks of the next steps."""
    found: list[int] = []
    with counted() as meter:
        for _ in range(TRACED):
            gc.collect()
            meter.reset()
            trainee.step()
            found.append(meter.peak + trainee.constant_bytes)
    return found


# -- time --------------------------------------------------------------------------------------


class Planner:
    """The processor seconds that plans take while it is entered."""

    def __enter__(self) -> Planner:
        # Private: plans are made inside of steps.
        from umem.chainer.recompute.graph_store import Graphs

        self.seconds, self._of, self._plan = 0.0, Graphs, Graphs._carried
        Graphs._carried = self.timed(Graphs._carried)  # type: ignore[method-assign]
        return self

    def timed(self, plan: Any) -> Any:
        """Wrap a method that plans, whose time is added up."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return plan(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed

    def __exit__(self, *exception: object) -> None:
        self._of._carried = self._plan  # type: ignore[method-assign]


def first_steps(trainee: Trainee, budget: int, repeats: int) -> dict[str, Any]:
    """The mean of the first steps, of plain's median right before them, without the planner."""
    ratios, planner = [], []
    for _ in range(repeats):
        plain = [trainee.seconds(nullcontext(), call)[0] for _ in range(FIRST)]
        with Planner() as planning, umem.chainer.Recompute(budget):
            steps = [trainee.seconds(nullcontext(), call)[0] for _ in range(FIRST)]
        planner.append(planning.seconds)
        ratios.append((sum(steps) - planning.seconds) / FIRST / statistics.median(plain))
    return {
        "first_ratio": statistics.median(ratios),
        "planner_ms": statistics.median(planner) * 1e3,
        "repeats": ratios,
    }


# -- a network ---------------------------------------------------------------------------------


def measure(network: Network, repeats: int) -> list[dict[str, Any]]:
    """A row a budget."""
    trainee = Trainee(network)
    plain = max(peaks(trainee, nullcontext(), planned=False))
    mode = umem.chainer.Recompute("min")
    peaks(trainee, mode)
    least = mode.predicted_bytes
    assert least is not None
    budgets = {"least": least, "1.25 least": least * 5 // 4, "halfway": (least + plain) // 2}
    rows = []
    for name, budget in budgets.items():
        row: dict[str, Any] = {"network": network.name, "budget": name, "budget_mb": budget / MB}
        row |= {"plain_mb": plain / MB}
        try:
            found = peaks(trainee, umem.chainer.Recompute(budget))
        except BudgetError as error:
            rows.append(row | {"error": str(error)})
            continue
        row |= {
            "first_of_budget": found[0] / budget,
            "second_of_budget": found[1] / budget,
            "planned_of_budget": max(found[TRACED:]) / budget,
        }
        rows.append(row | first_steps(trainee, budget, repeats))
    return rows


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = [row for row in result["rows"] if "error" not in row]
    wide = [row for row in rows if row["budget"] != "least"]
    at = [row["first_ratio"] for row in rows if row["budget"] == "1.25 least"]
    return (
        f"Planned steps take at most {percent(max(r['planned_of_budget'] for r in rows))} of the "
        f"budget, and the first step at most {percent(max(r['first_of_budget'] for r in wide))} "
        "of it where that is above the least; at 1.25 times the least the first three steps take "
        f"{statistics.median(at):.2f} of a plain step in the median ({span(at)})."
    )


BENCH = common.Bench(
    "budgets",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("budget", "budget"),
        quantity("budget", "budget_mb", "MB"),
        quantity("plain", "plain_mb", "MB"),
        quantity("first step of budget", "first_of_budget", places=3),
        quantity("second", "second_of_budget", places=3),
        quantity("planned", "planned_of_budget", places=3),
        quantity("first three steps of plain", "first_ratio"),
        quantity("planner", "planner_ms", "ms"),
    ),
    notes=common.errors("network", "budget"),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small networks.")
@click.option("--only", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@common.json_option
def main(quick: bool, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    chosen = QUICK if quick else [n for n in NETWORKS if not names or n.name in names]
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        for network in chosen:
            rows += measure(network, repeats)
            click.echo(f"{network.name}: {len(rows)} rows so far", err=True)
    options = {"networks": [n.name for n in chosen], "repeats": repeats}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
