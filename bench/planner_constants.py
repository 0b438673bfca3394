"""What do the constants of the planners buy, and what do they cost?

Each constant of our own heuristics is halved and doubled, the others as they are. Graphs are
networks that are recorded here (long chains among them, with the seconds that their calls took),
and random ones of up to 24 nodes; budgets are the least that plans of lower sets need, and a
quarter and a half of the way to keeping all. A plan's overhead is a share of forward; its change is
in points of that share, on the average and for the plan that loses most. Planning time is a ratio
of the sums over all plans, of processor time.

No plan at all within a budget counts as a loss of 100 points. Two constants that limit the nodes of
a graph are only halved, because twice of them changes nothing up to 24.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import click
import common
from models import build
from recompute_parts.networks import NETWORKS
from report_tables import counted, quantity, text
from small_graphs import random_graphs

from umem.errors import BudgetError
from umem.planner import Graph, forget_tables, min_budget, plan

LONG = ("U-Net", "DenseNet", "transformer", "LSTM, 60 words", "LSTM", "GRU, 300 words")
SHARES = 0.0, 0.25, 0.5
NO_PLAN = 1.0


class Constant(NamedTuple):
    """A constant of a module of the planner, and those that follow it, each by a factor."""

    module: str
    name: str
    graphs: str
    follow: Mapping[str, float] = {}
    factors: tuple[float, ...] = (0.5, 2)

    @contextmanager
    def of(self, value: int) -> Iterator[None]:
        """Give the constant another value for a while.

        The planner's modules are private to it: they are changed by name, here alone.
        """
        module = sys.modules[f"umem.planner.{self.module}"]
        names = self.name, *self.follow
        before = {name: getattr(module, name) for name in names}
        setattr(module, self.name, value)
        for name, factor in self.follow.items():
            setattr(module, name, round(value * factor))
        try:
            yield
        finally:
            for name in names:
                setattr(module, name, before[name])

    @property
    def value(self) -> int:
        found: int = getattr(sys.modules[f"umem.planner.{self.module}"], self.name)
        return found


CONSTANTS = (
    Constant("step_table", "LEVELS", "long", {"FINE": 1 / 4}),
    Constant("saved", "WINDOW", "long"),
    Constant("kusumoto.families", "MAX_SETS", "long"),
    Constant("search", "NARROW", "long"),
    Constant("search", "WIDER", "long"),
    Constant("search", "ROUNDS", "long"),
    Constant("rematerialize", "KEEPING_ROUNDS", "long"),
    Constant("beam", "WIDTH", "short"),
    Constant("beam", "FULL_WIDTH", "short", factors=(0.5,)),
    Constant("beam", "PROTECTED", "short"),
    Constant("rematerialize", "SHORT", "short", factors=(0.5,)),
)


class Case(NamedTuple):
    """A graph to plan for a budget."""

    name: str
    graph: Graph
    budget: int

    @property
    def forward(self) -> float:
        return sum(node.cost for node in self.graph.nodes)


class Found(NamedTuple):
    """The overhead of each case's plan as a share of forward, and the seconds of all."""

    overheads: list[float]
    seconds: float


def long_graphs(names: tuple[str, ...]) -> Iterator[tuple[str, Graph]]:
    """Record a forward pass of some networks; a call costs the seconds that it took."""
    for network in NETWORKS:
        if network.name in names:
            model = build(*network.model)
            inputs = model.inputs(network.batch)
            model.loss(*inputs)  # the first pass makes parameters
            with umem.record() as recorder:
                loss = model.loss(*inputs)
            del loss
            yield network.name, Graph.from_trace(recorder.trace, "seconds")


def cases(graphs: Iterator[tuple[str, Graph]]) -> list[Case]:
    found = []
    for name, graph in graphs:
        low = min_budget(graph, "lower_sets")
        high = plan(graph, None, "store_all").peak_bytes
        found += [Case(name, graph, int(low + share * (high - low))) for share in SHARES]
    return found


def planned(some: list[Case]) -> Found:
    """Plan every case, from nothing."""
    overheads, start = [], time.process_time()
    for case in some:
        forget_tables()
        try:
            overheads.append(plan(case.graph, case.budget).overhead / case.forward)
        except BudgetError:
            overheads.append(NO_PLAN)
    return Found(overheads, time.process_time() - start)


def row(constant: Constant, factor: float, some: list[Case], usual: Found) -> dict[str, Any]:
    """Compare the plans under another value of a constant with those under the usual one."""
    value = round(constant.value * factor)
    before = constant.value
    with constant.of(value):
        found = planned(some)
    again = planned(some)  # beside it in time: the machine's speed changes
    changes = [new - old for new, old in zip(found.overheads, usual.overheads, strict=True)]
    worst = max(range(len(some)), key=lambda place: changes[place])
    return {
        "constant": f"{constant.module}.{constant.name}",
        "graphs": constant.graphs,
        "plans": len(some),
        "usual": before,
        "value": value,
        "mean_change": fmean(changes),
        "most_lost": changes[worst],
        "lost_by": some[worst].name,
        "most_won": -min(changes),
        "seconds": found.seconds,
        "time_ratio": found.seconds / again.seconds,
    }


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    half = [one for one in rows if one["value"] < one["usual"]]
    double = [one for one in rows if one["value"] > one["usual"]]
    loses = max(half, key=lambda one: one["mean_change"])
    wins = min(double, key=lambda one: one["mean_change"])
    return (
        f"Halved, {loses['constant']} costs most: {100 * loses['mean_change']:.2f} points of "
        f"forward on the average, {100 * loses['most_lost']:.1f} at worst ({loses['lost_by']}); "
        f"doubled, {wins['constant']} wins most: {-100 * wins['mean_change']:.2f} points, for "
        f"{wins['time_ratio']:.2g} times the planning."
    )


BENCH = common.Bench(
    "planner_constants",
    __doc__,
    answer,
    (
        text("constant", "constant"),
        text("graphs", "graphs"),
        counted("plans", "plans"),
        counted("usual", "usual"),
        counted("here", "value"),
        quantity("mean change", "mean_change", "points", per=0.01, places=3, signed=True),
        quantity("most lost", "most_lost", "points", per=0.01, places=2),
        text("by", "lost_by"),
        quantity("most won", "most_won", "points", per=0.01, places=2),
        quantity("planning", "time_ratio", "of usual"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two constants, two small graphs.")
@click.option("--only", multiple=True, type=click.Choice([one.name for one in CONSTANTS]))
@click.option("--random", "count", default=140, show_default=True, help="Random graphs.")
@common.json_option
def main(quick: bool, only: tuple[str, ...], count: int, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    warnings.simplefilter("ignore", UserWarning)  # batch normalisation of a single value
    names = ("WIDTH", "PROTECTED") if quick else only
    chosen = [one for one in CONSTANTS if not names or one.name in names]
    make = {
        "short": lambda: random_graphs(2 if quick else count),
        "long": lambda: long_graphs(LONG),
    }
    kinds = {kind: cases(make[kind]()) for kind in {one.graphs for one in chosen}}
    usual = {kind: planned(some) for kind, some in kinds.items()}
    rows = [
        row(constant, factor, kinds[constant.graphs], usual[constant.graphs])
        for constant in chosen
        for factor in constant.factors
    ]
    options: dict[str, Any] = {"quick": quick, "only": list(only), "random": count}
    options["networks"] = list(LONG) if "long" in kinds else []
    BENCH.finish(rows, path, simulated=True, options=options)


if __name__ == "__main__":
    main()
