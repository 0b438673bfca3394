"""How long does a plan of recomputation take, by the number of calls?

Processor time on a chain of calls of several sizes and costs: the first plan, which makes the
table of steps; a plan within half of what the step takes as it is, of the same graph; and
`pareto`, of up to 2,000 calls. Under both models; each plan is carried out by the referee.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
from report_tables import counted, figure, quantity, text

from umem.planner import Graph, Node, pareto, plan, simulate

COUNTS = (1_000, 2_000, 5_000, 10_000)
PARETO = 2_000
"""The most calls of which the front is asked for."""
MODELS = ("kusumoto", "saved")


def chain(count: int) -> Graph:
    """Calls one after another; the same each time."""
    source = random.Random(0)
    nodes = [
        Node(
            f"call{v}",
            source.randrange(1 << 16, 1 << 24),
            source.random(),
            saved=source.random() < 0.7,
            workspace_bytes=source.randrange(1 << 20),
        )
        for v in range(count)
    ]
    return Graph(nodes, [(f"call{v - 1}", f"call{v}") for v in range(1, count)])


def measure(count: int, model: Any) -> dict[str, Any]:
    graph = chain(count)
    first, least = timed(lambda: plan(graph, None, model=model))
    whole = plan(graph, None, "store_all", model=model)
    budget = whole.peak_bytes // 2
    second, half = timed(lambda: plan(graph, budget, model=model))
    for found in (least, half):
        simulate(graph, found, budget_bytes=found.budget_bytes)
    front, points = None, None
    if count <= PARETO:
        front, points = timed(lambda: len(pareto(graph, model=model)))
    return {
        "calls": count,
        "model": model,
        "first_cpu_seconds": first,
        "half_cpu_seconds": second,
        "pareto_cpu_seconds": front,
        "points": points,
        "least_share_percent": round(100 * least.peak_bytes / whole.peak_bytes, 2),
    }


def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = ask()
    return time.process_time() - start, found


def answer(result: common.Result) -> str:
    rows = result["rows"]
    most = max(row["calls"] for row in rows)
    longest = [row for row in rows if row["calls"] == most]
    keys = ("first_cpu_seconds", "half_cpu_seconds")
    first, second = (figure(max(row[key] for row in longest)) for key in keys)
    fronts = [row for row in rows if row["pareto_cpu_seconds"] is not None]
    slowest = max(fronts, key=lambda row: row["pareto_cpu_seconds"])
    return (
        f"For a chain of {most:,} calls at most {first} s of processor time, and another plan of "
        f"it {second} s; the whole front of {slowest['calls']:,} calls takes at most "
        f"{figure(slowest['pareto_cpu_seconds'])} s."
    )


BENCH = common.Bench(
    "planner_speed",
    __doc__,
    answer,
    (
        counted("calls", "calls"),
        text("model", "model"),
        quantity("first plan", "first_cpu_seconds", "CPU s"),
        quantity("another plan", "half_cpu_seconds", "CPU s"),
        quantity("front", "pareto_cpu_seconds", "CPU s"),
        counted("points of the front", "points"),
        quantity("least peak, of all kept", "least_share_percent", "%"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A short chain.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    counts = (120,) if quick else COUNTS
    rows = [measure(count, model) for count in counts for model in MODELS]
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
