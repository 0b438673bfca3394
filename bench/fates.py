"""How near the optimum are plans that keep, run again or move each value?

On 200 random graphs of up to 24 nodes, each with a link whose rates let all values pass in 0.3 to
3 times the time of a step, at a budget between the least and keeping all: the time of the plan,
of recomputation alone, of moving alone, and of an integer programme (fates_optimum.py), whose
optimum nothing can be below. Then the processor time of plans of 1,000 calls.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import common
from fates_optimum import least_time
from planner_speed import chain
from report_tables import Column, Table, counted, figure, percent, quantity, text
from small_graphs import random_graphs, residual

from umem.errors import BudgetError
from umem.planner import Graph, Link, Plan, chains, plan, rematerialize, simulate

NEAR = 1.03
LONG = 1_000
SHARES = (0.3, 0.6)
"""Budgets of long graphs, of the bytes of keeping all."""
RATES = (0.5, 2.0)
"""Steps in which all values of a long graph pass its link."""


def small_row(name: str, graph: Graph, seconds: float) -> dict[str, Any]:
    """One random graph: times in units of cost."""
    source = random.Random(name)
    rates = [source.uniform(1 / 3, 1 / 0.3) for _ in "oi"]
    link = link_of(graph, *rates)
    least = plan(graph, None, model="saved", link=link).peak_bytes
    keep_all = plan(graph, None, "store_all", model="saved").peak_bytes
    budget = int(least + source.random() * (keep_all - least))
    ours, cpu_seconds = planned(graph, budget, link)
    done = simulate(graph, ours, budget_bytes=budget)
    start = time.perf_counter()
    best = least_time(graph, ours, budget, link, seconds)
    if best.bound > done.seconds * (1 + 1e-6):
        raise RuntimeError(f"{name}: {done.seconds} is below the optimum, {best.bound}")
    return {
        "graph": name,
        "nodes": len(graph),
        "budget": budget,
        "keep_all": keep_all,
        "out_rate": link.out_rate,
        "in_rate": link.in_rate,
        "plain": step_of(graph),
        "time": done.seconds,
        "again_alone": time_of(graph, budget, None, "auto"),
        "moved_alone": time_of(graph, budget, link, "store_all"),
        "overhead": done.overhead,
        "moved_bytes": done.sent_bytes,
        "optimum": best.least,
        "bound": best.bound,
        "status": best.status,
        "cpu_seconds": cpu_seconds,
        "seconds": time.perf_counter() - start,
    }


def planned(graph: Graph, budget: int, link: Link | None) -> tuple[Plan, float]:
    """A plan, and the processor time that it takes from a cold start."""
    chains._problem.cache_clear()
    rematerialize.least_plan.cache_clear()
    start = time.process_time()
    found = plan(graph, budget, model="saved", link=link)
    return found, time.process_time() - start


def step_of(graph: Graph) -> float:
    """The time of a step that keeps all."""
    return sum(graph.numbered.cost) + sum(graph.numbered.backward_cost)


def link_of(graph: Graph, out: float, back: float) -> Link:
    """A link over which all values pass so many times in a step that keeps all."""
    rate = sum(graph.numbered.size) / step_of(graph)
    return Link(out * rate, back * rate)


def time_of(graph: Graph, budget: int, link: Link | None, method: str) -> float | None:
    """The time of a plan by the referee, None where there is none."""
    try:
        found = plan(graph, budget, method, model="saved", link=link)
    except BudgetError:
        return None
    return simulate(graph, found, budget_bytes=budget).seconds


def long_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Chains and residual networks: times, and what planning took from a cold start."""
    count = 24 if quick else LONG
    for name, graph in (("chain", chain(count)), ("residual network", residual(count // 3))):
        keep_all = plan(graph, None, "store_all", model="saved").peak_bytes
        for share in SHARES[1:] if quick else SHARES:
            for rate in RATES:
                yield long_row(name, graph, int(share * keep_all), link_of(graph, rate, rate))


def long_row(name: str, graph: Graph, budget: int, link: Link) -> dict[str, Any]:
    _, alone_cpu_seconds = planned(graph, budget, None)
    _, cpu_seconds = planned(graph, budget, link)
    return {
        "graph": name,
        "nodes": len(graph),
        "budget": budget,
        "plain": step_of(graph),
        "out_rate": link.out_rate,
        "time": time_of(graph, budget, link, "auto"),
        "again_alone": time_of(graph, budget, None, "auto"),
        "moved_alone": time_of(graph, budget, link, "store_all"),
        "again_alone_cpu_seconds": alone_cpu_seconds,
        "cpu_seconds": cpu_seconds,
    }


# -- what comes out ----------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    rows = result["rows"]
    solved = [row for row in rows if row["status"] == "optimal"]
    near = sum(row["time"] <= NEAR * row["optimum"] for row in solved)
    bounded = sum(row["time"] <= NEAR * row["bound"] for row in rows)
    most = max((row["time"] / row["optimum"] for row in solved), default=1)
    slowest = max(row["cpu_seconds"] for row in rows)
    long = result["long"]
    calls, cpu = long[0]["nodes"], [row["cpu_seconds"] for row in long]
    quicker = sum(quicker_than_one(row) for row in [*rows, *long])
    return (
        f"Of {len(rows)} programmes {len(solved)} were solved, and {near} of those plans are "
        f"within 3 % of the optimum ({bounded} of all within 3 % of what is proved), none more "
        f"than {percent(most - 1)} above; {quicker} of all {len(rows) + len(long)} plans are "
        "quicker than recomputation alone and than moving alone, a small graph takes at most "
        f"{figure(slowest)} s of processor time and one of {calls:,} calls {figure(min(cpu))} to "
        f"{figure(max(cpu))} s."
    )


def quicker_than_one(row: dict[str, Any]) -> bool:
    """Tell whether a plan is quicker than both of those with two fates, as far as there are any."""
    alone = [row[key] for key in ("again_alone", "moved_alone") if row[key] is not None]
    return all(row["time"] < time * (1 - 1e-9) for time in alone)


TIMES: tuple[Column, ...] = (
    text("graph", "graph"),
    counted("calls", "nodes"),
    counted("budget", "budget"),
    quantity("keeping all", "plain", "cost"),
    quantity("three fates", "time", "cost"),
    quantity("recomputation alone", "again_alone", "cost"),
    quantity("moving alone", "moved_alone", "cost"),
)


def tables(result: common.Result) -> Iterator[Table]:
    yield Table(
        (
            *TIMES,
            quantity("planning", "cpu_seconds", "CPU s"),
            quantity("planning of recomputation alone", "again_alone_cpu_seconds", "CPU s"),
        ),
        result["long"],
        "long graphs",
    )
    yield Table(
        (
            *TIMES,
            quantity("optimum", "optimum", "cost"),
            quantity("bound", "bound", "cost"),
            text("programme", "status"),
            quantity("planning", "cpu_seconds", "CPU s"),
            quantity("solving", "seconds", "s"),
        ),
        result["rows"],
        "random graphs",
    )


BENCH = common.Bench("fates", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Six small graphs, and short long ones.")
@click.option("--random", "random_count", default=200, show_default=True, help="Random graphs.")
@click.option("--seconds", default=20.0, show_default=True, help="For each integer programme.")
@common.json_option
def main(quick: bool, random_count: int, seconds: float, path: Path | None) -> None:
    count = 6 if quick else random_count
    long = list(long_rows(quick))
    rows = [small_row(name, graph, seconds) for name, graph in random_graphs(count)]
    options = {"quick": quick, "random": count, "seconds": seconds}
    BENCH.finish(rows, path, simulated=True, options=options, long=long)


if __name__ == "__main__":
    main()
